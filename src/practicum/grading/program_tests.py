"""The verifier `tests`: 1 if the program of a reply passes all tests of its row, else 0.

Rows have the layout of MBPP, `test_list` with `test_setup_code` or `test_imports`, or `inputs` and
`outputs` of a program that reads standard input. Each reply is run in a separate child process,
in the sandbox: see `practicum.sandbox.worker.serve_apart`.
"""

import contextlib
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from practicum.core.strict_json import JsonError, parse_json
from practicum.prompts import Prompt
from practicum.thoughts import read_answer

FUNCTION = "practicum.grading.program_tests:verify"
"""The name under which the verifier's process finds the function."""

COLUMNS = ("test_list", "test_setup_code", "test_imports", "inputs", "outputs")
"""The columns of tests."""

FIELD = "tests"
"""The privileged field of a prompt that holds its tests as JSON."""

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


def read_tests(row: Mapping[str, Any]) -> str:
    """Return the tests of a row as JSON; ValueError if it has none that can be run."""
    texts = {name: _read_texts(row[name], name) for name in COLUMNS if row.get(name) is not None}
    setup = [*texts.get("test_imports", []), *texts.get("test_setup_code", [])]
    if texts.get("test_list"):
        return json.dumps({"setup": "\n".join(setup), "test_list": texts["test_list"]})
    inputs, outputs = texts.get("inputs", []), texts.get("outputs", [])
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(
            "verifier tests: the row has no test_list, and no inputs with as many outputs"
        )
    return json.dumps({"inputs": inputs, "outputs": outputs})


def _read_texts(cell: Any, name: str) -> list[str]:
    """Return a column as texts; a text that is a list in JSON is that list."""
    if isinstance(cell, str) and name != "test_setup_code" and cell.lstrip().startswith("["):
        with contextlib.suppress(JsonError):
            cell = parse_json(cell)
    texts = [cell] if isinstance(cell, str) else cell
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} is not a list of texts")
    return texts


def find_program(reply: str) -> str:
    """Return the last fenced block of a reply after its thoughts, or all that follows them."""
    answer = read_answer(reply)
    blocks = _BLOCK.findall(answer)
    return blocks[-1] if blocks else answer


def verify(reply: str, prompt: Prompt) -> float:
    """Run the reply's program against the tests of its prompt."""
    tests, program = json.loads(prompt.privileged[FIELD]), find_program(reply)
    # What a program prints is no answer of this process.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if "test_list" in tests:
            return float(_passes(program, tests["setup"], tests["test_list"]))
        pairs = zip(tests["inputs"], tests["outputs"], strict=True)
        return float(all(_prints(program, text, expected) for text, expected in pairs))


def _passes(program: str, setup: str, tests: Sequence[str]) -> bool:
    """Return True if every assertion holds after the program."""
    variables: dict[str, Any] = {"__name__": "program"}
    try:
        for part in (setup, program, *tests):
            exec(compile(part, "<program>", "exec"), variables)
    # A program may raise anything, and leave with `exit()`.
    except BaseException:
        return False
    return True


def _prints(program: str, text: str, expected: str) -> bool:
    """Return True if the program writes the expected lines, apart from spaces at their ends."""
    printed = io.StringIO()
    sys.stdin = io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit:
        pass
    except BaseException:
        return False
    return _strip_lines(printed.getvalue()) == _strip_lines(expected)


def _strip_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
