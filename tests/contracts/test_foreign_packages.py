"""Packages that return odd values: a run counts and replaces them, or ends with a one-line error.

The tasks of `OUTSIDE` in test_foreign_values.py that read rows or generate them; all further tasks, and tools over MCP, are in
test_foreign_servers.py. Each package is a double.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from foreign_doubles import DEEP, HALF, INNER, LONG, build_task, make_renderer, read_refusal

from practicum.errors import DataError
from practicum.grading import run_reasoning_gym
from practicum.ports import Task, TaskContext
from practicum.ports.gate import ask_reward
from practicum.rollouts.sources.traces import load_traced_rollouts
from practicum.rows import PromptSet
from practicum.sandbox import worker
from practicum.sandbox.deadline import VerifierProcess
from practicum.tasks import reasoning_gym
from practicum.tasks.reverse import Config as ReverseConfig
from practicum.types import (
    Message,
    Rollout,
)


class Table:
    """A split of a dataset with these rows; an exception is raised while they are read."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def with_format(self, kind: str) -> "Table":
        return self

    def iter(self, batch_size: int) -> Iterator["Table"]:
        yield self

    def to_pylist(self) -> Any:
        if isinstance(self.rows, BaseException):
            raise self.rows
        return self.rows


GOOD = {"prompt": "2 + 2", "answer": "4"}


@pytest.mark.parametrize(
    ("loaded", "words"),
    [
        (KeyError("train"), "a/b: split 'train' cannot be loaded (KeyError: 'train')"),
        (7, "a/b[train]: the rows after row 0 cannot be read (AttributeError"),
        (Table(OverflowError("year 10000 is out of range")), "cannot be read (OverflowError: year"),
        (Table(7), "the rows after row 0 cannot be read (TypeError"),
        (Table([GOOD, 7]), "row 2: is of type int, not an object with named columns"),
        (Table([GOOD, {7: "a"}]), "row 2: is of type dict"),
        (Table([GOOD, {"prompt": math.nan}]), "prompt is of type float, not a text"),
        (Table([GOOD, {"prompt": HALF}]), "prompt contains half of a surrogate pair"),
        (
            Table([GOOD, {"prompt": "a", "answer": math.nan}]),
            "answer is nan, which is not a number",
        ),
        (Table([GOOD, {"prompt": "a", "answer": 10**400}]), ""),
        (Table([GOOD, {"prompt": LONG, "answer": 1e308}]), ""),
    ],
)
def test_rows_of_datasets(
    loaded: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(path: str, name: str | None, split: str) -> Any:
        if isinstance(loaded, BaseException):
            raise loaded
        return loaded

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    settings = {"path": "a/b", "heldout": 0, "max_rejected": 0.0}
    line = read_refusal(lambda: build_task(tmp_path, "datasets", **settings))
    assert words in line and bool(words) == bool(line), line
    if "row 2" not in line:
        return
    task = build_task(tmp_path, "datasets", **{**settings, "max_rejected": 1.0})
    (rejected,) = map(json.loads, (tmp_path / "rejected.jsonl").read_text().splitlines())
    assert len(task.train_prompts()) == 1 and rejected["row"] == 2


class OddInner:
    """A user's task that returns None in place of prompts."""

    class Config(ReverseConfig):
        """The settings of the odd task."""

        type: Literal["test_foreign_packages:OddInner"] = "test_foreign_packages:OddInner"  # type: ignore[assignment]

    @staticmethod
    def build(config: Any, context: TaskContext) -> Any:
        return PromptSet([7], [])  # type: ignore[list-item]


def test_rows_of_an_earlier_run(tmp_path: Path) -> None:
    def play(row: str, inner: Mapping[str, Any] = INNER) -> Task:
        (tmp_path / "rollouts.jsonl").write_text(row + "\n")
        return build_task(tmp_path, "played", run={"model": str(tmp_path)}, task=inner)

    name = json.dumps(build_task(tmp_path, "reverse", **INNER).train_prompts()[0].id)
    turn = '{"role": "assistant", "text": "a", "tokens": 1}'
    half = '{"role": "user", "text": "\\ud800"}'
    for fields, words in {
        '"prompt": 7': "row 1 is not a rollout",
        '"prompt": NaN': "row 1 is not a rollout",
        '"prompt": "\\ud800"': "row 1: no prompt of task.task is called",
        f'"prompt": {name}, "turns": 7': "row 1 is not a rollout",
        f'"prompt": {name}, "turns": [{turn.replace("1", "0")}, {half}]': "row 1 is not a rollout",
        f'"prompt": {name}, "tokens": [1e999], "turns": [{turn}]': "row 1 is not a rollout",
        f'"prompt": {name}, "tokens": [{2**31}], "turns": [{turn}]': "row 1 is not a rollout",
        f'"prompt": {name}, "tokens": [{10**400}], "turns": [{turn}]': "row 1 is not a rollout",
        f'"prompt": {name}, "notes": {{"x": 7}}': "row 1 is not a rollout",
        f'"prompt": {name}, "notes": {{"x": "\\ud800"}}': "row 1 is not a rollout",
        f'"prompt": {name}, "notes": {DEEP}': "row 1 is not a rollout",
        f'"prompt": {name}, "notes": {{"x": "{LONG}"}}': "",
    }.items():
        line = read_refusal(lambda fields=fields: play(f"{{{fields}}}"))
        assert words in line and bool(words) == bool(line), (fields[:60], line)
    line = read_refusal(lambda: play(f'{{"prompt": {name}}}', {"type": OddInner.Config().type}))
    assert line.startswith("the task's prompt 1 is a int")


def test_traces_of_agents(tmp_path: Path) -> None:
    renderer = make_renderer()
    path = tmp_path / "traces.jsonl"
    asked = {"message": {"role": "user", "content": "a"}, "token_ids": [], "mask": []}
    asked |= {"token_ids": list(renderer.render([Message("user", "a")])), "mask": [False] * 3}
    said = {"parent": 0, "message": {"role": "assistant", "content": "b"}, "mask": [True]}
    said |= {"token_ids": [renderer.encode("b")[0]], "logprobs": [-1.0]}
    nodes = [asked, said]
    trace = {"version": 1, "id": "t", "task": {"data": {"id": "q"}}, "nodes": nodes}

    def load(line: str) -> Task:
        path.write_text(line + "\n")
        return build_task(tmp_path, "traces", path=str(path))

    def change(**changes: Any) -> str:
        return json.dumps({**trace, **changes})

    def answer(**changes: Any) -> str:
        return change(nodes=[asked, {**said, **changes}])

    def reward(score: Any, weight: Any = 1.0) -> str:
        return change(rewards={"right": {"score": score, "weight": weight}})

    for line in (
        "7",
        "NaN",
        DEEP,
        change(nodes=7),
        change(id=HALF),
        change(task={"data": {"idx": math.nan}}),
        reward(math.nan),
        reward("1"),
        reward(1e200, 1e200),
        reward(1e16),
        answer(message={"role": "assistant", "content": HALF}),
        answer(token_ids=[2**31]),
        answer(token_ids=[math.nan]),
        answer(logprobs=[math.nan]),
        answer(logprobs=[-1e300]),
        answer(logprobs=[3.0]),
    ):
        refusal = read_refusal(lambda line=line: load(line))
        assert "line 1 is no trace of verifiers" in refusal, (line[:200], refusal)
    assert read_refusal(lambda: load(change(nodes=[{**said, "parent": None}]))).startswith(
        "the task's prompt 1 ('q') has no message"
    )
    assert not read_refusal(lambda: load(answer(message={"role": "assistant", "content": LONG})))
    task = load(reward(0.5))
    found = load_traced_rollouts(path, task.train_prompts(), renderer, 8)["q"]
    assert [rollout.reward for rollout in found] == [0.5]
    task = load(answer(token_ids=[2**31 - 1]))
    with pytest.raises(DataError, match="line 1 has the token 2147483647, and the student's"):
        load_traced_rollouts(path, task.train_prompts(), renderer, 8)


class Generator:
    """A generator of reasoning-gym that returns this value as its first item, or as the score of the reply `odd`."""

    def __init__(self, item: Any, score: Any) -> None:
        self.item, self.score = item, score

    def __getitem__(self, number: int) -> Any:
        return self._give(self.item) if number == 0 else {"question": f"q{number}", "answer": "a"}

    def score_answer(self, answer: str | None, entry: Any) -> Any:
        return self._give(self.score) if answer == "odd" else float(answer == entry["answer"])

    def _give(self, value: Any) -> Any:
        if isinstance(value, BaseException):
            raise value
        return value


class InProcess(VerifierProcess):
    """Exchanges a generator's requests and answers as lines of JSON, without its process."""

    def __init__(self, module: str, settings: str, **more: Any) -> None:
        super().__init__(module, settings, **more)
        served: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_reasoning_gym, "serve", served.append)
            patch.setattr(sys, "argv", [module, settings])
            patch.setenv("MPLCONFIGDIR", "")
            run_reasoning_gym.run()
        (self.respond,) = served

    def _exchange(self, request: dict[str, Any], seconds: float, largest: int) -> dict[str, Any]:
        request = json.loads(json.dumps(request))
        return json.loads(worker._respond(self.respond, worker._describe, "1", request))


def test_items_and_scores_of_reasoning_gym(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known: Any = {"odd": (Generator, None)}
    made: dict[str, Any] = {}
    package = SimpleNamespace(
        __spec__=ModuleSpec("reasoning_gym", None),
        create_dataset=lambda name, seed, size: Generator(**made),
    )
    factory = SimpleNamespace(DATASETS=known)
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)  # type: ignore[arg-type]
    monkeypatch.setattr(reasoning_gym, "VerifierProcess", InProcess)
    settings = {"generator": "odd", "sandbox": "best_effort", "train_size": 2, "heldout_size": 0}

    def generate(item: Any = None, score: Any = 0.0) -> Task:
        made.update(item=item or {"question": "q0", "answer": "a"}, score=score)
        return build_task(tmp_path, "reasoning_gym", **settings)

    cannot = "task.config: the generator 'odd' cannot make item 0"
    for item, words in (
        (7, cannot),
        ({"question": "q"}, cannot),
        (KeyError("odd"), cannot),
        (RecursionError(), cannot),
        ({"question": HALF, "answer": "a"}, "the task's prompt 1 ('train-0') has a message"),
        ({"question": "q", "answer": HALF}, "the task's prompt 1 ('train-0') has an answer"),
        ({"question": math.nan, "answer": math.inf}, ""),
        ({"question": LONG, "answer": 10**400}, ""),
    ):
        line = read_refusal(lambda item=item: generate(item))
        assert line.startswith(words) and bool(words) == bool(line), (str(item)[:60], line)
    for score, kind in (
        ("1", "error"),
        (None, "error"),
        (KeyError("odd"), "error"),
        (math.nan, "number"),
        (1e300, "number"),
        (10**400, "error"),
    ):
        task = generate(score=score)
        rewarded = ask_reward(task, Rollout.from_text(task.train_prompts()[0], "odd"))
        assert (rewarded.reward, rewarded.rejected) == (0.0, (kind,)), score
    known[7] = None
    assert read_refusal(generate).startswith("task.type: the package reasoning-gym does not list")
