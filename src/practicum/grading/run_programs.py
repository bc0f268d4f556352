"""Run small programs of a model in a separate process: `python -m practicum.grading.run_programs`.

A line assigns a whole number to a name: `a=3`, `a+=4` or `b=(a-1)*2`. Anything else is refused
before it runs, so that a program can neither call nor import anything. In addition, the process
runs in the sandbox.
"""

import ast
from collections.abc import Sequence
from typing import Any

from practicum.sandbox.worker import serve

MAX_LINE = 80
MAX_VALUE = 10**9
"""Limits of a line's length and of every value, so that no line takes long."""

ALLOWED = (
    *(ast.Module, ast.Assign, ast.AugAssign, ast.Name, ast.Load, ast.Store, ast.Constant),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.UnaryOp, ast.USub, ast.UAdd),
)
"""The only parts of Python that a line may have."""


def count_running_lines(lines: Sequence[str]) -> int:
    """Return how many lines run, each after all lines before it, from the first on."""
    return len(_run(lines))


def compute_result(program: str) -> int | None:
    """Return the value that the last line of a program assigns, or None if a line does not run."""
    lines = program.strip().split("\n")
    values = _run(lines)
    return values[-1] if len(values) == len(lines) else None


def _run(lines: Sequence[str]) -> list[int]:
    """Return the value that each line assigns, up to the first line that does not run."""
    variables: dict[str, int] = {}
    values: list[int] = []
    for line in lines:
        name = _execute(line.strip(), variables)
        if name is None:
            break
        values.append(variables[name])
    return values


def _execute(line: str, variables: dict[str, int]) -> str | None:
    """Execute a line on the variables; return the name that it assigns, or None if it fails."""
    try:
        tree = ast.parse(line) if len(line) <= MAX_LINE else ast.Module([], [])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    target = _find_target(tree)
    if target is None or not all(isinstance(node, ALLOWED) for node in ast.walk(tree)):
        return None
    # Python knows `__debug__` and `__builtins__` in every program.
    if any(isinstance(node, ast.Name) and node.id.startswith("__") for node in ast.walk(tree)):
        return None
    numbers = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    if not all(type(number) is int and number <= MAX_VALUE for number in numbers):
        return None
    try:
        exec(compile(tree, "<step>", "exec"), {"__builtins__": {}}, variables)
    except (NameError, RecursionError, MemoryError):
        return None
    return target if abs(variables[target]) <= MAX_VALUE else None


def _find_target(tree: ast.Module) -> str | None:
    """Return the name that a line assigns, or None if the line does anything else."""
    match tree.body:
        case [ast.Assign(targets=[ast.Name(id=name)])] | [ast.AugAssign(target=ast.Name(id=name))]:
            return name
    return None


def respond(request: dict[str, Any]) -> float:
    """Return the number of lines that run, or whether two programs have the same result."""
    if "lines" in request:
        return float(count_running_lines(request["lines"]))
    expected = compute_result(request["answer"])
    return float(expected is not None and compute_result(request["reply"]) == expected)


if __name__ == "__main__":
    serve(respond)
