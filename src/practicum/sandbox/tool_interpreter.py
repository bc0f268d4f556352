"""Run programs of a model, in the sandbox: `python -m practicum.sandbox.tool_interpreter SEED`.

With a second argument, the walls of the sandbox, each program runs in a copy of the process.
"""

import ast
import contextlib
import io
import random
import sys
import traceback
from typing import Any

from practicum.sandbox.worker import LONGEST_ANSWER, serve, serve_apart

LONGEST_RESULT = 1 << 16
"""The most characters of a result that leave the process."""

LONGEST_COPY_RESULT = (LONGEST_ANSWER - 256) // 6
"""The most characters of the result of a copy: JSON writes a character in up to six bytes."""

NAME = "<program>"


class Failed(Exception):
    """A program ended with an error, which the message says with its line."""


def run_program(code: str, variables: dict[str, Any]) -> str:
    """Return what a program prints and the value of its last expression; Failed if it fails."""
    printed = io.StringIO()
    # The requests come over standard input: a program must neither read nor close it.
    sys.stdin = io.StringIO()
    try:
        tree = ast.parse(code, NAME)
        # A notebook shows the value of a cell's last expression, and models write for notebooks.
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, NAME, "exec"), variables)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), NAME, "eval"), variables)
                if value is not None:
                    printed.write(repr(value))
    # A program may raise anything, and leave with `exit()`.
    except BaseException as error:
        raise Failed(_describe(error)) from None
    return printed.getvalue()[:LONGEST_RESULT]


def _describe(error: BaseException) -> str:
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == NAME
    ]
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{text} (line {lines[-1]})" if lines else text


def _serve_programs(seed: str, walls: str | None = None) -> None:
    random.seed(seed)
    variables: dict[str, Any] = {"__name__": "__main__"}

    def respond(request: dict[str, Any]) -> dict[str, Any]:
        arguments = request["arguments"]
        code = arguments.get("code")
        if not isinstance(code, str) or len(arguments) > 1:
            return {"invalid": "give the program as the only argument, code, as text"}
        if walls is not None:
            # Python gives each copy of a process other random numbers.
            random.seed(seed)
        result = run_program(code, variables)
        return {"result": result if walls is None else result[:LONGEST_COPY_RESULT]}

    if walls is None:
        serve(respond, str)
    else:
        serve_apart(respond, str, sandbox=walls)


if __name__ == "__main__":
    _serve_programs(*sys.argv[1:])
