"""Serve a function of the user's as a tool: `python -m practicum.sandbox.tool_function NAME`."""

import functools
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from practicum.foreign import describe_error, load_object
from practicum.sandbox.worker import VerifierUnavailable, serve

LONGEST_RESULT = 1 << 20
"""The most characters of a result that leave the process."""


def build_arguments(function: Callable[..., Any]) -> type[BaseModel]:
    """Return the model of a function's arguments; ValueError if it cannot be a tool."""
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"takes {parameter}, and a tool only takes arguments by name")
        if name not in hints:
            raise ValueError(f"has no type for {name}; write {name}: str, for example")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints[name], default)
    return create_model("arguments", __config__=ConfigDict(extra="forbid"), **fields)


def describe_function(function: Callable[..., Any], arguments: type[BaseModel]) -> dict[str, Any]:
    """Return the fields of the function's schema: its name, what it does, and its arguments."""
    text = inspect.getdoc(function)
    if not text:
        raise ValueError("has no docstring, which tells the model what it does; write one")
    parameters = arguments.model_json_schema()
    # The titles repeat the names, and every prompt contains all tokens of a schema.
    parameters.pop("title")
    for member in parameters.get("properties", {}).values():
        member.pop("title", None)
    return {"name": function.__name__, "description": text, "parameters": parameters}


def write_result(result: Any) -> str:
    """Return a function's result as text: a text unchanged, anything else as JSON."""
    text = result if isinstance(result, str) else json.dumps(result, default=str)
    return text[:LONGEST_RESULT]


def describe_invalid(error: ValidationError) -> str:
    """Return what is wrong with a call's arguments in one line."""
    problems = [
        f"{'.'.join(map(str, problem['loc'])) or 'arguments'}: {problem['msg']}"
        for problem in error.errors(include_url=False)
    ]
    return "; ".join(problems)


def _serve_function(name: str) -> None:
    """Answer calls; a request without arguments asks for the schema."""

    @functools.cache
    def load() -> tuple[Callable[..., Any], type[BaseModel]]:
        try:
            function = load_object(name)
            if not inspect.isroutine(function):
                raise ValueError("is no function")
            return function, build_arguments(function)
        # A foreign signature may hold types of any kind.
        except Exception as error:
            raise VerifierUnavailable(f"the tool {name!r} {error}") from error

    def respond(request: dict[str, Any]) -> dict[str, Any]:
        function, model = load()
        if "arguments" not in request:
            try:
                return describe_function(function, model)
            except ValueError as error:
                raise VerifierUnavailable(f"the tool {name!r} {error}") from error
        try:
            checked = model.model_validate(request["arguments"])
        except ValidationError as error:
            return {"invalid": describe_invalid(error)}
        return {"result": write_result(function(**dict(checked)))}

    serve(respond, lambda error: describe_error(error), load)


if __name__ == "__main__":
    _serve_function(sys.argv[1])
