"""Rollouts ahead of updates: the same bytes for any delay or kill, and with lag 0 the bytes of sequential steps."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from stub_server import FolderModel, Stub, late
from toy import (
    assert_same_run,
    curve,
    exit_status,
    forked,
    rows,
    start_fork,
    toy_data,
    toy_recipe,
    toy_run,
)

from practicum.core.abandon import Cancelled, cancel_scope
from practicum.costs import Usage
from practicum.errors import DataError, RecipeError, TeacherError
from practicum.recipe import parse_recipe
from practicum.remote.http import JsonClient, JsonRequest, Server
from practicum.rollouts import select_prompts
from practicum.runs.assembly import assemble_run
from practicum.training import asynchronous
from practicum.training.asynchronous import OverlappedSteps, SampledStep
from practicum.training.loop import train
from practicum.types import Message, Prompt, Rollout, StepResult, TeacherSignal

pytestmark = pytest.mark.long

STEPS = {"train.steps": 5, "train.checkpoint_every": 2, "train.prompts_per_step": 3}
SAMPLED = {
    "signal": "sampled",
    "estimator": "score_function(gamma=1)",
    "correction": "ratio_truncate(2)",
}


def ahead(lag: int, **changes: Any) -> dict[str, Any]:
    return {**STEPS, "rollout.max_staleness": lag, **changes}


@pytest.fixture(autouse=True)
def nothing_is_left_over() -> Iterator[None]:
    """Assert that the threads of a run end with it, also after errors."""
    before = set(threading.enumerate())
    yield
    left = [
        thread for thread in threading.enumerate() if thread not in before and not thread.daemon
    ]
    assert not left, left


@pytest.fixture(scope="module")
def whole(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run two updates ahead without interruption."""
    return toy_run(models, tmp_path_factory.mktemp("whole"), ahead(2)).folder


@pytest.fixture
def server(models: Path) -> Iterator[Stub]:
    with Stub(FolderModel(models / "teacher"), name="m") as stub:
        yield stub


def until(ready: Callable[[], bool]) -> None:
    """Wait until a condition holds; the timeout of half a minute is far longer than needed."""
    for _ in range(6000):
        if ready():
            return
        time.sleep(0.005)
    raise AssertionError("it never happened")


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def remote(stub: Stub, **settings: Any) -> dict[str, Any]:
    """Return recipe changes for a teacher behind the server."""
    teacher = {
        "type": "openai_api",
        "url": stub.url,
        "model": "m",
        "retry_seconds": 0.0,
        **settings,
    }
    return {"teacher": teacher, "objective": SAMPLED}


@pytest.mark.parametrize("lag", [1, 2])
def test_every_rollout_is_as_old_as_it_was_said(
    models: Path, whole: Path, tmp_path: Path, lag: int
) -> None:
    folder = whole if lag == 2 else toy_run(models, tmp_path, ahead(lag)).folder
    for row in rows(folder / "rollouts.jsonl"):
        assert row["policy_version"] == max(row["step"] - 1 - lag, 0)
    assert curve(folder, "staleness") == [float(min(lag, step)) for step in range(5)]
    assert curve(folder, "staleness_p95") == curve(folder, "staleness")


def test_a_step_learns_from_its_own_prompts_all_of_them(models: Path, tmp_path: Path) -> None:
    changes = ahead(2, **{"rollout.n": 2, "rollout.max_new_tokens": 12})
    folder = toy_run(models, tmp_path, changes).folder
    recipe = toy_recipe(models, changes)
    prompts = assemble_run(recipe, tmp_path).parts.prompts
    written = rows(folder / "rollouts.jsonl")
    for step in range(1, 6):
        expected = [prompt.id for prompt in select_prompts(prompts, 0, step, 3) for _ in range(2)]
        assert [row["prompt"] for row in written if row["step"] == step] == expected


def results(
    models: Path, folder: Path, changes: dict[str, Any], *, threads: bool
) -> tuple[list[StepResult], Any]:
    """Return the results of a recipe's steps, sequential or through the threads, and the final weights."""
    built = assemble_run(toy_recipe(models, changes), folder)
    if not threads:
        return list(train(1, 3, built.parts, built.settings)), built.trainer.save_state()["student"]
    with OverlappedSteps(built.parts, built.settings, last=3, lag=0) as stages:
        return list(
            train(1, 3, built.parts, built.settings, stages.step)
        ), built.trainer.save_state()["student"]


@pytest.mark.parametrize(
    "how", [{}, {"student.lora": {"rank": 4, "alpha": 8}}, {"student.trainable_layers": 1}]
)
def test_without_a_lag_the_threads_give_what_one_thread_gives(
    models: Path, tmp_path: Path, how: dict[str, Any]
) -> None:
    changes = {"objective": SAMPLED, **how}
    alone, weights = results(models, tmp_path / "alone", changes, threads=False)
    apart, others = results(models, tmp_path / "apart", changes, threads=True)
    for one, other in zip(alone, apart, strict=True):
        mine, theirs = (
            {
                name: value
                for name, value in result.metrics.items()
                if not name.startswith("seconds_")
            }
            for result in (one, other)
        )
        assert mine == theirs
        for rollout, twin in zip(one.rollouts, other.rollouts, strict=True):
            assert (
                rollout.tokens.equal(twin.tokens) and rollout.policy_version == twin.policy_version
            )
            assert rollout.sampling_logprobs.equal(twin.sampling_logprobs)
        assert one.outputs.logprobs.equal(other.outputs.logprobs)
    assert all(value.equal(others[name]) for name, value in weights.items())


def slowly(work: Callable[..., Any], seconds: Sequence[float]) -> Callable[..., Any]:
    """Run the same steps, where calls wait in turn according to a repeated list."""
    waits = iter([*seconds] * 100)

    def waiting(*given: Any, **named: Any) -> Any:
        time.sleep(next(waits))
        return work(*given, **named)

    return waiting


@pytest.mark.parametrize("slow", ["generate_rollouts", "score_with", "update_student"])
def test_who_is_slow_changes_no_byte(
    models: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    work = getattr(asynchronous, slow)
    monkeypatch.setattr(asynchronous, slow, slowly(work, (0.08, 0.0, 0.0, 0.03)))
    assert_same_run(whole, toy_run(models, tmp_path, ahead(2)).folder)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain, evaluated on the way": {"evaluation.prompts": 4, "evaluation.every": 3},
    "adapters, by sampled tokens": {
        "student.lora": {"rank": 4, "alpha": 8},
        "objective": SAMPLED,
        "rollout.n": 2,
    },
    "dropout under a following teacher, with an old self": {
        "student.model": {"hidden_size": 32, "layers": 1, "heads": 2, "dropout": 0.2, "seed": 1},
        "student.dropout": True,
        "teacher": {
            "type": "privileged",
            "teacher": {"type": "self", "weights": "ema", "rate": 0.3},
            "reference": "{answer}",
        },
        "reference": {"type": "self", "weights": "frozen"},
        "objective": {
            "losses": [
                {"signal": "full"},
                {"signal": "full", "against": "reference", "coefficient": 0.1},
            ],
        },
    },
    "a teacher that writes half": {"rollout.source": "mix(student=0.5, other=teacher)"},
    "numbers that move": {
        "rollout.temperature": "adaptive(1.0, 0.5, rate=0.5)",
        "rollout.max_new_tokens": "linear(6, 3)",
        "optimizer.learning_rate": "adaptive(0.003, 0.001, rate=0.5)",
    },
    "kept answers": {
        "teacher": {"type": "cached", "teacher": {"type": "model", "model": "TEACHER"}}
    },
}


def variant(models: Path, name: str) -> dict[str, Any]:
    changes = ahead(2, **VARIANTS[name])
    if name == "kept answers":
        changes["teacher"]["teacher"]["model"] = str(models / "teacher")
    return changes


QUICK = (
    "plain, evaluated on the way",
    "dropout under a following teacher, with an old self",
    "numbers that move",
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in VARIANTS]
)
def test_killed_anywhere_and_resumed_it_leaves_the_same_bytes(
    models: Path, tmp_path: Path, name: str
) -> None:
    changes = variant(models, name)
    whole = toy_run(models, tmp_path / "whole", changes).folder
    out = tmp_path / "cut"
    assert forked(lambda: toy_run(models, out, changes), {"PRACTICUM_FAULT": "update:4"}) == 137
    assert (
        forked(lambda: toy_run(models, out, changes, resume=True), {"PRACTICUM_FAULT": "score:3"})
        == 137
    )
    assert_same_run(whole, toy_run(models, out, changes, resume=True).folder)


LATER = ("rollout:1", "score:5", "save.after_tensors:2", "save.after_rename:2")


@pytest.mark.parametrize(
    "fault",
    [
        "rollout:5",
        "save.before_rename:1",
        *(pytest.param(one, marks=pytest.mark.slow) for one in LATER),
    ],
)
def test_no_moment_of_a_crash_is_worse_than_another(
    models: Path, whole: Path, tmp_path: Path, fault: str
) -> None:
    assert forked(lambda: toy_run(models, tmp_path, ahead(2)), {"PRACTICUM_FAULT": fault}) == 137
    assert_same_run(whole, toy_run(models, tmp_path, ahead(2), resume=True).folder)


def test_a_signal_saves_what_was_begun_and_the_resume_is_exact(
    models: Path, tmp_path: Path
) -> None:
    changes = ahead(3, **{"train.steps": 16, "train.checkpoint_every": None, "monitors": "off"})
    pid = start_fork(lambda: toy_run(models, tmp_path / "cut", changes), output=tmp_path / "output")
    until(lambda: lines(tmp_path / "cut" / "toy" / "metrics.jsonl") >= 3)
    os.kill(pid, signal.SIGTERM)
    assert exit_status(os.waitpid(pid, 0)[1]) == 143, (tmp_path / "output").read_text()
    resumed = toy_run(models, tmp_path / "cut", changes, resume=True).folder
    assert_same_run(toy_run(models, tmp_path / "whole", changes).folder, resumed)


def test_every_step_is_counted_by_itself(models: Path, tmp_path: Path) -> None:
    changes = {"evaluation.prompts": 4, "evaluation.every": 2, "rollout.n": 2}
    folder = toy_run(models, tmp_path, ahead(2, **changes)).folder
    written = rows(folder / "rollouts.jsonl")
    for row in rows(folder / "metrics.jsonl"):
        own = sum(len(one["tokens"]) for one in written if one["step"] == row["step"])
        assert (
            row["cost/sampled_tokens"]
            == row["cost/scored_tokens"]
            == row["cost/update_tokens"]
            == own
        )
    first = toy_run(models, tmp_path / "in turn", {**STEPS, **changes}).folder
    columns = [name for name in rows(folder / "metrics.jsonl")[0] if name.startswith("cost/")]
    assert columns and all(curve(folder, name)[0] == curve(first, name)[0] for name in columns)


def test_a_server_is_asked_while_the_student_learns(
    models: Path, tmp_path: Path, server: Stub
) -> None:
    plain = toy_run(models, tmp_path / "plain", ahead(2, **remote(server))).folder
    server.script = [late(0.05), None, None, late(0.02)] * 10
    again = toy_run(models, tmp_path / "again", ahead(2, **remote(server))).folder
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert (plain / name).read_bytes() == (again / name).read_bytes()


def test_a_teacher_that_fails_ends_the_run_at_its_step_and_a_resume_is_exact(
    models: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, calls = asynchronous.score_with, iter(range(1, 100))

    def failing(teacher: Any, *given: Any) -> list[TeacherSignal]:
        if teacher is not None and next(calls) == 4:
            raise TeacherError("the server is gone")
        return work(teacher, *given)

    monkeypatch.setattr(asynchronous, "score_with", failing)
    with pytest.raises(TeacherError) as caught:
        toy_run(models, tmp_path, ahead(2))
    said = "step 4: the server is gone (the state after step 3 is saved; resume with resume=True)"
    assert str(caught.value) == said and caught.value.exit_code == 5
    assert_same_run(whole, toy_run(models, tmp_path, ahead(2), resume=True).folder)


def test_what_fails_in_a_thread_is_raised_once_as_itself(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = asynchronous.generate_rollouts

    def failing(step: int, *given: Any) -> list[Rollout]:
        if step == 4:
            raise DataError("the fourth step has no prompts")
        return work(step, *given)

    monkeypatch.setattr(asynchronous, "generate_rollouts", failing)
    with pytest.raises(DataError, match="the fourth step has no prompts"):
        toy_run(models, tmp_path, ahead(2, **{"train.checkpoint_every": None}))
    assert [row["step"] for row in rows(tmp_path / "toy" / "metrics.jsonl")] == [1, 2, 3]


def test_a_second_interrupt_does_not_wait_for_a_server(
    models: Path, tmp_path: Path, server: Stub
) -> None:
    changes = ahead(2, **remote(server, timeout=300.0), **{"train.steps": 200})
    pid = start_fork(lambda: toy_run(models, tmp_path, changes), output=tmp_path / "output")
    until(lambda: lines(tmp_path / "toy" / "metrics.jsonl") > 1)
    server.script = [late(20.0)] * 99
    until(lambda: len(server.script) < 99)
    time.sleep(1.0)  # the steps that have an answer already
    start = time.monotonic()
    for _ in range(2):
        os.kill(pid, signal.SIGINT)
        time.sleep(0.3)
    assert exit_status(os.waitpid(pid, 0)[1]) == 130, (tmp_path / "output").read_text()
    assert time.monotonic() - start < 15.0, "the server takes twenty seconds"
    assert "stopped at once" in (tmp_path / "output").read_text()


def test_a_question_that_nobody_waits_for_is_given_up() -> None:
    told = threading.Event()
    with Stub(script=[late(20.0)]) as stub, ThreadPoolExecutor(1) as pool:
        client = JsonClient(Server(stub.url))

        def asking() -> object:
            with cancel_scope(told):
                return client.ask(
                    JsonRequest(
                        "/v1/completions", {"prompt": [1], "temperature": 1.0}, seconds=60.0
                    )
                )

        asked = pool.submit(asking)
        until(lambda: bool(stub.asked))
        told.set()
        with pytest.raises(Cancelled):
            asked.result(timeout=10.0)


def test_rollouts_come_back_from_a_checkpoint_bit_for_bit() -> None:
    prompt = Prompt("p", (Message("user", "ab"),))
    logprobs = torch.tensor([-0.1, -1.17549435e-38, torch.nan, 0.0])
    rollout = Rollout(
        prompt, (3, 4), torch.tensor([5, 6, 7, 2]), torch.tensor([False, True, True, True]), logprobs, logprobs, 3, "stop",
        "ab", 1, 1 / 3, "student",
    )  # fmt: skip
    written = SampledStep(9, [rollout], {("sample", "student"): Usage(4, 2, 10**18, 7)})
    back = SampledStep.from_json(written.to_json())
    assert back.step == 9 and back.work == written.work
    (other,) = back.rollouts
    assert torch.equal(other.sampling_logprobs.nan_to_num(9.0), logprobs.nan_to_num(9.0))
    assert other.tokens.equal(rollout.tokens) and other.loss_mask.equal(rollout.loss_mask)
    assert (other.reward, other.policy_version, other.text) == (1 / 3, 3, "ab")


IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "replay": ({"rollout.source": "mix(other=replay)"}, r"max_staleness is 2, and mix\(other=replay\).*completions of any age"),
    "a following teacher writes": (
        {"teacher": {"type": "self"}, "rollout.source": "teacher"},
        "teacher 'self' may follow the student, so it cannot write ahead of it",
    ),
    "a following teacher inside writes": (
        {"teacher": {"type": "privileged", "teacher": {"type": "self"}, "system": "a"}, "rollout.source": "prefix(2)"},
        "teacher 'privileged' may follow the student",
    ),
    "a question that adapts": (
        {"objective": {"signal": "topk(k=adaptive(4, 8), support=teacher)"}},
        "requests to teachers are fixed ahead",
    ),
    "a lag that moves": ({"rollout.max_staleness": "linear(2, 0)"}, "one number for the whole run"),
    "a lag below nothing": ({"rollout.max_staleness": -1}, "max_staleness"),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_done_ahead_is_refused_with_the_alternative(models: Path, name: str) -> None:
    changes, words = IMPOSSIBLE[name]
    data = toy_data(models, ahead(2, **changes))
    with pytest.raises(RecipeError, match=words):
        parse_recipe(data, "toy")
    if name not in ("a lag that moves", "a lag below nothing"):
        parse_recipe({**data, "rollout": {**data["rollout"], "max_staleness": 0}}, "toy")


@pytest.mark.parametrize(
    ("objective", "warned"),
    [
        ({"signal": "sampled"}, True),
        ({"signal": "sampled", "correction": "ratio"}, False),
        ({"signal": "full"}, False),
    ],
)
def test_tokens_of_an_older_policy_without_a_correction_are_named(
    models: Path, tmp_path: Path, notes: list[str], objective: dict[str, Any], warned: bool
) -> None:
    assemble_run(toy_recipe(models, ahead(2, objective=objective)), tmp_path)
    lines = [line for line in notes if line.startswith("warning: rollout.max_staleness is 2")]
    assert len(lines) == warned
    assert not warned or "correction: ratio_truncate(2)" in lines[0]


def test_a_lag_alone_alarms_no_engine_and_a_patch_names_it(models: Path, tmp_path: Path) -> None:
    changes = ahead(
        2,
        **{"optimizer.learning_rate": 0.01, "train.steps": 6, "monitors": {"M18": {"level": 0.5}}},
    )
    folder = toy_run(models, tmp_path, changes).folder
    alarms = {row["id"]: row for row in rows(folder / "alarms.jsonl")}
    assert "M16" not in alarms, (
        "sampler and learner never have the same weights, so there is no alarm about engines"
    )
    assert "probability_error" in rows(folder / "metrics.jsonl")[0], "the first step is on policy"
    assert alarms["M18"]["patch"] == ["rollout.max_staleness=1"]


def test_signals_are_one_a_rollout(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: object) -> list[TeacherSignal]:
        return []

    monkeypatch.setattr(asynchronous, "score_with", short)
    with pytest.raises(TeacherError, match=r"step 1: the teacher answered 0 of 3 rollouts"):
        toy_run(models, tmp_path, ahead(1))
