"""A user's verifier in a separate process: `python -m practicum.grading.user_function NAME`."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, SupportsFloat

from practicum.foreign import describe_error, load_object
from practicum.prompts import Prompt
from practicum.sandbox.worker import VerifierUnavailable, serve_apart

Function = Callable[[str, Prompt], Any]
"""`verify(reply, prompt)`: a number for the text that a model wrote to a prompt."""

SIGNATURE = "def verify(reply: str, prompt: Prompt) -> float"


class NoNumber(ValueError):
    """A function returned something that is no number."""


def load_function(name: str) -> Function:
    """Import a verifier; raise ValueError, in one line, if it is none."""
    function = load_object(name)
    problem = find_signature_problem(function)
    if problem is not None:
        raise ValueError(f"{name!r} {problem}")
    return function


def find_signature_problem(function: Any) -> str | None:
    """Return what is wrong with a verifier that cannot take a reply and a prompt, or None."""
    if inspect.ismodule(function):
        return f"is a module; name a function in it: {function.__name__}:verify"
    if not callable(function):
        return f"is a {type(function).__name__} and no function; write {SIGNATURE}"
    try:
        signature = inspect.signature(function)
        signature.bind("reply", None)
    except TypeError as error:
        return f"cannot take a reply and a prompt ({error}); write {SIGNATURE}"
    except ValueError:
        # A function in C without a signature: the first call tells.
        return None
    if next(iter(signature.parameters)) == "prompt":
        return f"takes the prompt first, and a verifier takes the reply first; write {SIGNATURE}"
    return None


def compute_score(function: Function, reply: str, prompt: Prompt) -> float:
    """Return the function's number as a float; NoNumber for anything else, such as None."""
    value = function(reply, prompt)
    if not isinstance(value, SupportsFloat):
        raise NoNumber(f"it returned {value!r:.80}, which is no number")
    return float(value)


def describe_failure(function: Function, error: BaseException) -> str:
    """Describe an error of the function in one line, with the innermost line in its file."""
    if isinstance(error, NoNumber):
        return str(error)
    code = inspect.unwrap(function).__code__ if inspect.isfunction(function) else None
    return describe_error(error, code.co_filename if code else None)


def _serve_function(name: str, sandbox: str) -> None:
    """Score requests with a reply and a prompt; a request without them checks the function."""

    @functools.cache
    def load() -> Function:
        try:
            return load_function(name)
        except ValueError as error:
            raise VerifierUnavailable(str(error)) from error

    def respond(request: dict[str, Any]) -> float:
        function = load()
        if "reply" not in request:
            return 1.0
        return compute_score(function, request["reply"], Prompt.from_json(request["prompt"]))

    def describe(error: Exception) -> str:
        line = describe_failure(load(), error)
        # Most likely a file, an address or a program that the function needs.
        is_walled_off = sandbox != "off" and isinstance(error, OSError)
        return f"{line}; it runs in the sandbox: see task.sandbox" if is_walled_off else line

    serve_apart(respond, describe, load, sandbox=sandbox)


if __name__ == "__main__":
    _serve_function(sys.argv[1], sys.argv[2])
