"""The task `tools`: functions, an interpreter and an MCP server as tools, and the misuse of each."""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from practicum.core.plugins import load_plugin
from practicum.errors import DataError
from practicum.ports import TaskContext
from practicum.ports.tasks import (
    ToolProblem,
)
from practicum.tasks import tools
from practicum.tasks.tools import Config, build
from practicum.tools import function, interpreter, mcp
from practicum.types import CallOutcome, Prompt, Rollout

PROMPT = Prompt("p", ())
HERE = Path(__file__).parent


def check(outcome: CallOutcome, said: str, session: Any, name: str, **arguments: Any) -> None:
    with pytest.raises(ToolProblem) as caught:
        session.call(name, arguments)
    assert caught.value.outcome == outcome and said in str(caught.value), str(caught.value)


@pytest.fixture(scope="module")
def find() -> Iterator[function.FunctionTool]:
    tool = function.build(function.Config(function="tool_functions:find"))
    yield tool
    tool.process.close()


def test_a_function_tells_its_schema(find: function.FunctionTool) -> None:
    (schema,) = find.schemas
    assert (schema.name, schema.description) == ("find", "Find pages about a word.")
    assert schema.parameters["required"] == ["word"]
    assert schema.parameters["properties"] == {
        "word": {"type": "string"},
        "most": {"type": "integer", "default": 2, "minimum": 1, "description": "pages"},
        "kind": {"type": "string", "default": "a", "enum": ["a", "b"]},
    }


def test_a_function_answers_and_refuses_other_arguments(find: function.FunctionTool) -> None:
    assert find.open(0).call("find", {"word": "x", "most": 3}) == '["a:x", "a:x", "a:x"]'
    check("invalid", "word: Field required", find, "find")
    check(
        "invalid", "most: Input should be greater than or equal to 1", find, "find", word="", most=0
    )
    check("invalid", "colour: Extra inputs are not permitted", find, "find", word="", colour=1)
    check("invalid", "kind: Input should be 'a' or 'b'", find, "find", word="", kind="</s>")


def test_a_function_that_misbehaves_is_an_outcome_and_is_asked_again() -> None:
    config = function.Config(function="tool_functions:misbehave", seconds=0.5)
    tool = function.build(config)
    try:
        check("failed", "KeyError: 'door' (tool_functions.py, line", tool, "misbehave", how="raise")
        check("failed", "its process ended by itself", tool, "misbehave", how="leave")
        check("timeout", "the tool took longer than 0.5 s", tool, "misbehave", how="sleep")
        assert tool.call("misbehave", {"how": "print"}) == "did print", "a print is no answer"
        assert json.loads(tool.call("misbehave", {"how": "set"})) == {"done": "{1, 2}"}
    finally:
        tool.process.close()


FORGE = """
import os, sys
frame = sys._getframe()
while "request_id" not in frame.f_locals: frame = frame.f_back
text = '{"id": "%s", ' % frame.f_locals["request_id"] + ANSWER + "}\\n"
for descriptor in range(3, 9):
    try: os.write(descriptor, text.encode())
    except OSError: pass
os._exit(0)
"""


@pytest.mark.parametrize(
    "answer",
    [
        '"value": 7',
        '"value": null',
        '"value": {}',
        '"value": [1]',
        '"value": "x"',
        '"value": {"result": 7}',
        '"value": {"result": "a", "invalid": "b"}',
        '"refused": "x"',
    ],
)
def test_a_program_that_writes_its_own_answer_gets_a_problem(answer: str) -> None:
    session = interpreter.build(interpreter.Config(seconds=20)).open(1)
    try:
        check("failed", "", session, "python", code=FORGE.replace("ANSWER", repr(answer)))
        assert session.call("python", {"code": "1 + 1"}) == "2", "the next call is answered"
    finally:
        session.close()


def test_a_program_reads_neither_the_users_files_nor_writes_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text("secret")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    session = interpreter.build(interpreter.Config(seconds=20)).open(1)
    try:
        for code in (
            f"open({str(tmp_path / 'rows.jsonl')!r}).read()",
            f"__import__('os').listdir({str(tmp_path)!r})",
            f"open({str(HERE / 'test_tools.py')!r}).read()",
        ):
            check("failed", "Error", session, "python", code=code)
        flood = "import os\nwhile True:\n  for n in (3, 4, 5):\n    try: os.write(n, b'x' * 65536)\n    except OSError: pass"
        began = time.monotonic()
        check("failed", "more than 1048576 bytes", session, "python", code=flood)
        assert time.monotonic() - began < 15
    finally:
        session.close()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bare", "has no docstring, which tells the model what it does"),
        ("untyped", "has no type for word; write word: str"),
        ("many", "takes *words: str, and a tool only takes arguments by name"),
        ("THING", "is no function"),
        ("missing", "has no 'missing'"),
    ],
)
def test_what_cannot_be_a_tool_is_one_line_at_the_start(name: str, said: str) -> None:
    with pytest.raises(DataError, match=r"^task\.tools: .*" + said.replace("*", r"\*")):
        function.build(function.Config(function=f"tool_functions:{name}"))


def test_a_module_that_is_missing_is_one_line() -> None:
    with pytest.raises(DataError, match=r"^task\.tools: no module 'nowhere_at_all'"):
        function.build(function.Config(function="nowhere_at_all:find"))
    with pytest.raises(ValidationError, match=r"write package\.module:function"):
        function.Config(function="find")


@pytest.fixture(scope="module")
def python() -> Iterator[interpreter.InterpreterSession]:
    session = interpreter.build(interpreter.Config(seconds=3)).open(1)
    yield session
    session.close()


def test_an_interpreter_keeps_its_variables(python: interpreter.InterpreterSession) -> None:
    assert python.call("python", {"code": "a = 3\nprint('hi')\na * 2"}) == "hi\n6"
    assert python.call("python", {"code": "a += 1"}) == ""
    assert python.call("python", {"code": "a"}) == "4"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1/0", "ZeroDivisionError: division by zero (line 1)"),
        ("a = (", "SyntaxError"),
        ("exit()", "SystemExit"),
        ("input()", "EOFError"),
        ("x = 1\nraise KeyboardInterrupt", "KeyboardInterrupt:  (line 2)"),
        ("open('/etc/passwd')", "PermissionError"),
        ("open('x', 'w')", "Error"),
        ("import socket; socket.socket()", "Error"),
        ("import subprocess; subprocess.run(['true'])", "Error"),
        ("def f(): f()\nf()", "RecursionError"),
        ("'a' * 10**10", "MemoryError"),
        ("\0", "Error"),
    ],
)
def test_a_program_that_fails_says_why(
    python: interpreter.InterpreterSession, code: str, said: str
) -> None:
    check("failed", said, python, "python", code=code)


def test_an_interpreter_takes_a_program_alone(python: interpreter.InterpreterSession) -> None:
    check("invalid", "the only argument, code", python, "python", code=3)
    check("invalid", "the only argument, code", python, "python", code="1", more=2)
    check("invalid", "the only argument, code", python, "python")


def test_a_program_that_ends_its_interpreter_or_hangs_begins_a_new_one() -> None:
    session = interpreter.build(interpreter.Config(seconds=1)).open(1)
    try:
        session.call("python", {"code": "a = 1"})
        check("failed", "broke off", session, "python", code="import os; os._exit(0)")
        check("failed", "NameError", session, "python", code="a")
        check("timeout", "took longer than 1 s", session, "python", code="while True: pass")
        forge = "import os\nfor n in range(3, 9):\n  try: os.write(n, b'{\"id\": 1}\\n')\n  except OSError: pass"
        check("failed", "broke off", session, "python", code=forge)
        assert session.call("python", {"code": "2"}) == "2"
    finally:
        session.close()


def test_conversations_have_interpreters_of_their_own_and_equal_seeds_draw_the_same() -> None:
    tool = interpreter.build(interpreter.Config())
    drawn = []
    for seed in (1, 1, 2):
        session = tool.open(seed)
        drawn.append(session.call("python", {"code": "import random\nrandom.random()"}))
        session.close()
    assert drawn[0] == drawn[1] != drawn[2]


RECORD = json.loads((HERE / "mcp_record.json").read_text())
"""Recorded answers of mcp_server.py through the mcp package: see the slow test."""


class Recorded:
    """A connection that replays the answers of a real server."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Mapping[str, Any]]] = []

    def list_tools(self) -> list[dict[str, Any]]:
        return RECORD["tools"]

    def call_tool(self, name: str, arguments: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        self.calls.append((name, arguments))
        if name == "wait":
            raise TimeoutError
        return RECORD["results"][name]

    def close(self) -> None:
        pass


def test_the_tools_of_a_server_are_read_and_called(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = Recorded()
    monkeypatch.setattr(mcp, "connect", lambda config: connection)
    tool = mcp.build(mcp.Config(command=("server",), tools=("count_letter", "wait"), seconds=2))
    assert [schema.name for schema in tool.schemas] == ["count_letter", "wait"]
    assert tool.schemas[0].description == "Count a letter in a word."
    assert tool.schemas[0].parameters["required"] == ["word", "letter"]
    hold_server(tool)
    assert connection.calls[0] == ("count_letter", {"word": "banana", "letter": "a"})
    with pytest.raises(DataError, match="the MCP server has no tool 'sing'; it has count_letter"):
        mcp.build(mcp.Config(command=("server",), tools=("sing",)))


def hold_server(tool: Any) -> None:
    """Run a server with recorded or real answers."""
    session = tool.open(0)
    assert session.call("count_letter", {"word": "banana", "letter": "a"}) == "3"
    check("failed", "Error executing tool fail", session, "fail")
    check("timeout", "the tool took longer than 2 s", session, "wait", seconds=30)


def test_parts_of_a_result_that_are_no_text_are_named() -> None:
    assert mcp._read_content({"type": "image", "data": "..."}) == "[image]"


@pytest.mark.skipif(find_spec("mcp") is not None, reason="the package is there")
def test_without_the_package_the_error_names_the_extra() -> None:
    with pytest.raises(DataError, match=r"pip install -e '\.\[mcp\]'"):
        mcp.build(mcp.Config(command=("server",)))


@pytest.mark.slow
def test_a_real_server_answers_what_was_recorded() -> None:
    pytest.importorskip("mcp")
    command = (sys.executable, str(HERE / "mcp_server.py"))
    tool = mcp.build(mcp.Config(command=command, seconds=2))
    try:
        hold_server(tool)
        found = {
            "tools": tool.connection.list_tools(),
            "results": {
                "count_letter": tool.connection.call_tool(
                    "count_letter", {"word": "banana", "letter": "a"}, 2
                ),
                "fail": tool.connection.call_tool("fail", {}, 2),
            },
        }
        assert found == RECORD
        with pytest.raises(ConnectionError, match="ended by itself"):
            tool.call("leave", {})
    finally:
        tool.connection.close()
    with pytest.raises(DataError, match=r"did not start \(FileNotFoundError"):
        mcp.build(mcp.Config(command=("no-such-program-anywhere",)))


def make(**changes: Any) -> Config:
    given: dict[str, Any] = {
        "task": {"type": "reverse", "train_size": 4, "heldout_size": 1},
        "tools": [{"type": "interpreter"}],
        **changes,
    }
    return Config.model_validate(given)


def test_any_task_may_have_tools(tmp_path: Path) -> None:
    task = build(make(characters=5), TaskContext(0, tmp_path))
    assert task.toolbox is not None and not task.opens_episodes
    prompt = task.train_prompts()[0]
    assert task.reward(Rollout.from_text(prompt, "call", str(prompt.answer))) == 1
    assert task.feedback(Rollout.from_text(prompt, "call", "x")) is None
    assert [schema.name for schema in task.toolbox.use.schemas] == ["python"]
    session = task.toolbox.open(prompt, 0)
    assert session.call("python", {"code": "'a' * 9"}) == "'aaaa... (11 characters, cut off)"
    session.close()


def test_what_the_inner_task_says_of_the_answer_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    inner = {"type": "jsonl", "path": "rows.jsonl", "verifier": "number"}
    said = build(make(task=inner), TaskContext(0, tmp_path))
    alone = load_plugin("tasks", "jsonl").build(make(task=inner).task, TaskContext(0, tmp_path))
    prompt = alone.train_prompts()[0]
    rollout = replace(Rollout.from_text(prompt, "calls 2", "it is 3"), reward=0.0)
    answer = replace(Rollout.from_text(prompt, "it is 3"), reward=0.0)
    assert said.feedback(rollout) == alone.feedback(answer) is not None


def test_answers_are_counted_between_tags(tmp_path: Path) -> None:
    task = build(make(tags=["<answer>", "</answer>"]), TaskContext(0, tmp_path))
    prompt, answer = task.train_prompts()[0], "<answer>a</answer>"
    for replies, count in [
        (("call", answer), 1),
        ((answer, answer), 2),
        (("call", "a"), 0),
        (("<answer>a", "</answer>"), 1),
        ((answer, "</answer>"), 0),
    ]:
        assert task.count_answers(Rollout.from_text(prompt, *replies)) == count, replies
    plain = build(make(), TaskContext(0, tmp_path))
    assert plain.count_answers(Rollout.from_text(prompt, "call", answer)) is None


def test_an_environment_with_tools_is_one(tmp_path: Path) -> None:
    task = build(make(task={"type": "walker", "turns": 2}), TaskContext(0, tmp_path))
    assert task.toolbox is not None and task.opens_episodes
    assert set("vwxyz") <= set(task.letters)
    assert task.open(task.train_prompts()[0], 0).step("x").message is not None


def test_tools_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    twice = make(tools=[{"type": "interpreter"}, {"type": "interpreter"}])
    with pytest.raises(DataError, match="two tools are called 'python'; rename one of them"):
        build(twice, TaskContext(0, tmp_path))
    with pytest.raises(ValidationError, match="tools within tools"):
        make(
            task={"type": "tools", "task": {"type": "reverse"}, "tools": [{"type": "interpreter"}]}
        )
    with pytest.raises(ValidationError, match="known: function, interpreter, mcp"):
        make(tools=[{"type": "hammer"}])
    assert tools.KINDS == "practicum.tools"
