"""Servers and harnesses that return odd values: a run counts and replaces them, or ends with a one-line error."""

import asyncio
import json
import math
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from foreign_doubles import (
    DEEP,
    HALF,
    INNER,
    LONG,
    build_task,
    converse,
    make_renderer,
    read_refusal,
)

from practicum.ports import Task
from practicum.rollouts.conversation import Conversation
from practicum.tasks import openenv
from practicum.tools import mcp
from practicum.types import (
    Message,
)


def observe(text: str = '"b"', reward: str = "0", done: str = "false") -> str:
    data = f'{{"observation": {{"text": {text}}}, "reward": {reward}, "done": {done}}}'
    return f'{{"type": "observation", "data": {data}}}'


ODD_REPLIES = {
    "7": "is no observation",
    "NaN": "is not JSON",
    '"\\ud800"': "is no observation",
    "{": "is not JSON",
    DEEP: "is not JSON",
    "9" * 5000: "is not JSON",
    '{"type": "error", "data": {"message": "\\ud800\\n"}}': "was refused: \\ud800",
    observe("7"): "has no text 'text'",
    observe("null", "NaN"): "is not JSON",
    observe(reward="1e999"): "is not JSON",
    observe(reward='"1"'): "is no observation",
    observe(done="7"): "is no observation",
}


class Socket:
    """A connection to an OpenEnv server that gives an odd answer to the second reset, or the first turn."""

    def __init__(self, odd: Any, place: str) -> None:
        self.odd, self.place, self.resets, self.kind = odd, place, 0, ""

    def __enter__(self) -> "Socket":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def send(self, text: str) -> None:
        self.kind = json.loads(text)["type"]
        self.resets += self.kind == "reset"

    def recv(self, timeout: float) -> str:
        is_odd = self.kind == self.place and (self.kind == "step" or self.resets == 2)
        if is_odd and isinstance(self.odd, BaseException):
            raise self.odd
        return self.odd if is_odd else observe()


def open_env(monkeypatch: pytest.MonkeyPatch, odd: Any, place: str) -> Task:
    client = SimpleNamespace(connect=lambda *address, **settings: Socket(odd, place))
    monkeypatch.setattr(
        openenv,
        "import_module",
        lambda name: client if name.endswith(".client") else import_module(name),
    )
    settings = {"url": "http://localhost:1", "train_size": 2, "heldout_size": 0}
    return build_task(Path(), "openenv", **settings)


def test_observations_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    odd: dict[Any, str] = {
        **ODD_REPLIES,
        TimeoutError("slow"): "TimeoutError",
        OSError(): "OSError",
    }
    for reply, words in odd.items():
        line = read_refusal(lambda reply=reply: open_env(monkeypatch, reply, "reset"))
        assert words in line and line.startswith("task.url: "), (str(reply)[:60], line)
        ended = converse(open_env(monkeypatch, reply, "step"), "a")
        assert isinstance(ended, str) and words in ended, (str(reply)[:60], ended)
    line = read_refusal(lambda: open_env(monkeypatch, observe('"\\ud800"'), "reset"))
    assert line.startswith("the task's prompt 2 ('openenv-1') has a message that is no text")
    assert not read_refusal(lambda: open_env(monkeypatch, observe(json.dumps(LONG)), "reset"))
    repaired = converse(open_env(monkeypatch, observe('"\\ud800"'), "step"), "a", "b")
    assert isinstance(repaired, Conversation) and "unicode" in repaired.rejected
    assert repaired.turns[1].text == "\ufffd"
    for reward in ("1e308", "1" + "0" * 400):
        ended = converse(open_env(monkeypatch, observe(reward=reward, done="true"), "step"), "a")
        assert isinstance(ended, str) and "ServerError" in ended, reward


def ask_student(base_url: str, tokens: Sequence[int]) -> None:
    """Ask for one turn of the student, as the library's training client does."""
    url = base_url.replace("/v1", "/inference/v1/generate")
    body = json.dumps({"token_ids": list(tokens)}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=10) as answer:
        json.load(answer)


@contextmanager
def install_verifiers(tasks: Any, trace: Any) -> Iterator[None]:
    """Return a fake library with a taskset of these tasks and an agent of one turn that ends with this trace."""
    loaders = SimpleNamespace(
        taskset_config_type=lambda name: SimpleNamespace(model_validate=lambda settings: settings),
        load_taskset=lambda config: tasks,
        harness_class=lambda name: SimpleNamespace(EXECUTES_CODE=False),
        harness_config_type=lambda name: lambda id: id,
    )

    def make_agent(config: Any) -> Any:
        async def run(task: Any) -> Any:
            prompt = make_renderer().render((Message("user", task.data.prompt),))
            await asyncio.to_thread(ask_student, config.client.base_url, prompt)
            if isinstance(trace, BaseException):
                raise trace
            return trace

        return SimpleNamespace(run=run)

    library = SimpleNamespace(
        TrainClientConfig=SimpleNamespace,
        AgentConfig=SimpleNamespace,
        SubprocessConfig=SimpleNamespace,
        make_agent=make_agent,
    )
    with pytest.MonkeyPatch.context() as patch:
        top = SimpleNamespace(__spec__=ModuleSpec("verifiers", None))
        for name, module in (
            ("verifiers", top),
            ("verifiers.v1", library),
            ("verifiers.v1.utils", top),
            ("verifiers.v1.utils.loaders", loaders),
        ):
            patch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
        yield


def describe_task(prompt: Any, name: Any = None) -> Any:
    return SimpleNamespace(data=SimpleNamespace(prompt=prompt, system_prompt=None, id=name))


def describe_trace(reward: Any) -> Any:
    return SimpleNamespace(rewards={"right": reward}, reward=reward, last_error=None)


def open_taskset() -> Task:
    settings = {"taskset": "odd", "harness": "odd", "train_size": 2, "heldout_size": 0}
    return build_task(Path(), "verifiers", **settings, seconds=5)


def test_tasks_of_verifiers() -> None:
    class Broken:
        def __iter__(self) -> Iterator[Any]:
            yield describe_task("a")
            raise KeyError("odd")

    for tasks, words in (
        (7, "task.taskset: its task 0 cannot be read (TypeError"),
        (Broken(), "task.taskset: its task 0 cannot be read (KeyError"),
        ([describe_task("a"), 7], "task.taskset: its task 1 cannot be read (AttributeError"),
        ([describe_task("a"), describe_task(7)], "task.taskset: its task 1 cannot be read"),
        ([describe_task("a"), describe_task(math.nan)], "task.taskset: its task 1 cannot be read"),
        (
            [describe_task(None)],
            "task.taskset: task 0 has no prompt, because another participant opens",
        ),
        ([describe_task("a"), describe_task(HALF)], "the task's prompt 2 ('1') has a message"),
        ([describe_task("a"), describe_task("b", "0")], "task.taskset: two tasks are called '0'"),
        ([], "task.taskset: 'odd' has 0 tasks"),
        ([describe_task(LONG), describe_task("b", 10**400)], ""),
    ):
        with install_verifiers(tasks, describe_trace(1.0)):
            line = read_refusal(open_taskset)
        assert line.startswith(words) and bool(words) == bool(line), (str(tasks)[:80], line)


def test_ends_of_agents() -> None:
    for trace, words in (
        (describe_trace(math.nan), "the reward is nan; set task.reward_range"),
        (describe_trace(1e300), "the reward is 1e+300; set task.reward_range"),
        (describe_trace("much"), "ValueError"),
        (describe_trace([1.0]), "TypeError"),
        (SimpleNamespace(rewards={}, reward=None, last_error=f"\n{HALF}"), "\\ud800"),
        (KeyError("odd"), "KeyError: 'odd'"),
        (SystemExit(3), "the harness left with SystemExit(3)"),
        (None, "AttributeError"),
    ):
        with install_verifiers([describe_task("a")], trace):
            ended = converse(open_taskset(), "b")
        assert isinstance(ended, str) and words in ended, (str(trace)[:80], ended)
    with install_verifiers([describe_task("a")], describe_trace(0.5)):
        ended = converse(open_taskset(), "b")
    assert isinstance(ended, Conversation) and ended.turns[0].reward == 0.5


class Connection:
    """A server of the Model Context Protocol with these tools and this answer to every call."""

    def __init__(self, tools: Any, answer: Any) -> None:
        self.tools, self.answer = tools, answer

    def list_tools(self) -> Any:
        return self._give(self.tools)

    def call_tool(self, name: str, arguments: Mapping[str, Any], seconds: float) -> Any:
        return self._give(self.answer)

    def _give(self, value: Any) -> Any:
        if isinstance(value, BaseException):
            raise value
        return value

    def close(self) -> None:
        pass


TOOL = {"name": "find", "description": "Find.", "inputSchema": {"type": "object"}}


def open_tools(monkeypatch: pytest.MonkeyPatch, tools: Any, answer: Any = None) -> Any:
    monkeypatch.setattr(mcp, "connect", lambda config: Connection(tools, answer))
    tool = {"type": "mcp", "command": ["server"]}
    return build_task(Path(), "tools", task=INNER, tools=[tool], calls="json")


def test_tools_over_mcp(monkeypatch: pytest.MonkeyPatch) -> None:
    for tools, words in (
        (KeyError("odd"), "the MCP server 'server' does not list its tools (KeyError: 'odd')"),
        (7, "the MCP server lists a int of tools"),
        ([TOOL, 7], "tool 2 of the MCP server has no name: 7"),
        ([{**TOOL, "name": math.nan}], "tool 1 of the MCP server has no name"),
        ([{**TOOL, "name": HALF}], "has a schema that is no JSON (half of a surrogate pair)"),
        ([{**TOOL, "description": 7}], "tool 1 of the MCP server ('find') has a description"),
        ([{**TOOL, "inputSchema": None}], "tool 1 of the MCP server ('find') has no inputSchema"),
        ([{**TOOL, "inputSchema": {"least": math.nan}}], "has a schema that is no JSON"),
        ([{**TOOL, "inputSchema": {"least": b"x"}}], "has a schema that is no JSON"),
        ([{**TOOL, "description": LONG}], "characters"),
    ):
        line = read_refusal(lambda tools=tools: open_tools(monkeypatch, tools))
        assert line.startswith("task.tools: ") and words in line, (str(tools)[:60], line)


def test_results_over_mcp(monkeypatch: pytest.MonkeyPatch) -> None:
    call = json.dumps({"name": "find", "parameters": {}})

    def write(*parts: Any, **more: Any) -> dict[str, Any]:
        return {"content": list(parts), **more}

    for answer, text, rejected in (
        (7, "error: the server returned an invalid result", ("type",)),
        (None, "error: the server returned an invalid result", ("type",)),
        ({"content": math.nan}, "error: the server returned an invalid result", ("type",)),
        (write(7, {"type": 7, "text": math.nan}), "[content]\n[7]", ()),
        (write({"text": HALF}), "\ufffd", ("unicode",)),
        (write({"text": HALF}, isError=True), "error: \ufffd", ("unicode",)),
        (write({"text": LONG}), f"{LONG[:2000]}... ({len(LONG)} characters, cut off)", None),
        (TimeoutError("odd"), "error: the tool took longer than 30 s", ()),
    ):
        task = open_tools(monkeypatch, [TOOL], answer)
        held = converse(task, call, "b", tools=task.toolbox.use)
        assert isinstance(held, Conversation), held
        if rejected is None:
            # The result does not fit into the remaining length of the conversation.
            assert held.sample.stop_reason == "length"
            continue
        assert (held.turns[1].text, held.rejected) == (text, rejected), str(answer)[:60]
    broken = converse(open_tools(monkeypatch, [TOOL], KeyError("odd")), call, tools=None)
    assert isinstance(broken, str)
