"""A teacher behind the Tinker API: the student's own candidates, a restarted service, and impossible answers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from service import LEFT_OPEN, Served, assert_same_but_rounding, serving
from toy import curve, rows, toy_recipe, toy_run

from practicum.errors import RecipeError, TeacherError
from practicum.objective import Sampled, Signal, TopK
from practicum.remote.tinker import Connection, ServiceSampler
from practicum.types import ScoreRequest

pytestmark = [pytest.mark.long, LEFT_OPEN]


@pytest.fixture
def served(models: Path, tmp_path: Path) -> Iterator[Served]:
    with serving(models, tmp_path / "served") as served:
        yield served


def teacher_of(served: Served, **more: Any) -> dict[str, Any]:
    return {"type": "tinker", "url": served.url, "model": "teacher", "retry_seconds": 20.0, **more}


class After:
    """A console that runs a function after a step."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self._step = step
        self._act = act

    def step(self, step: int, *_: Any) -> None:
        if step == self._step:
            self._act()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def test_it_teaches_as_its_model_does_here(models: Path, served: Served, tmp_path: Path) -> None:
    for number, signal in enumerate(["sampled", "topk(4, support=teacher)", "topk(4)"]):
        changes = {"objective": {"signal": signal}, "train.steps": 2}
        here = toy_run(models, tmp_path / f"here-{number}", changes).folder
        there = toy_run(
            models, tmp_path / f"there-{number}", {**changes, "teacher": teacher_of(served)}
        ).folder
        for measure in ("loss", "grad_norm"):
            assert curve(there, measure) == pytest.approx(
                curve(here, measure), rel=1e-4, abs=1e-6
            ), signal
        assert min(row["wire_bytes"] for row in rows(there / "timings.jsonl")) > 100


def test_a_service_that_is_started_again_costs_nothing_but_time(
    models: Path, served: Served, tmp_path: Path
) -> None:
    changes = {"teacher": teacher_of(served), "objective": {"signal": "topk(4)"}}
    whole = toy_run(models, tmp_path / "whole", changes).folder

    def again() -> None:
        served.stop()
        served.start()

    shaken = toy_run(models, tmp_path / "shaken", changes, console=After(2, again)).folder  # type: ignore[arg-type]
    assert_same_but_rounding(whole, shaken)

    def swapped() -> None:
        served.stop()
        served.start(teacher=models / "student")

    with pytest.raises(
        TeacherError,
        match="teacher is another model: it changed when the service restarted; serve",
    ):
        toy_run(models, tmp_path / "swapped", changes, console=After(2, swapped))  # type: ignore[arg-type]


def test_what_is_kept_is_found_by_the_candidates_too(
    models: Path, served: Served, tmp_path: Path
) -> None:
    teacher = {"type": "cached", "folder": str(tmp_path / "scores"), "teacher": teacher_of(served)}
    changes = {"teacher": teacher, "objective": {"signal": "topk(4)"}, "train.steps": 2}
    first = toy_run(models, tmp_path / "first", changes).folder
    asked = len(served.said)
    again = toy_run(models, tmp_path / "again", changes).folder
    for name in ("metrics.jsonl", "rollouts.jsonl", "summary.json"):
        assert (first / name).read_bytes() == (again / name).read_bytes()
    assert len(served.said) == asked + 1, "only the canary is scored again"
    toy_run(models, tmp_path / "other", {**changes, "objective": {"signal": "topk(3)"}})
    assert len(served.said) > asked + 2


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ({}, "set either model"),
        ({"model": "a", "model_path": "tinker://b"}, "set either model"),
        (
            {"model_path": "b"},
            "model_path 'b' is no tinker:// address; a base model is written as model",
        ),
        ({"model": "a", "largest_k": 3}, "answers at most k=3, not 4"),
        ({"model": "a", "url": "http://169.254.169.254"}, "which is never asked"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(
    models: Path, teacher: dict[str, Any], message: str
) -> None:
    whole = {"type": "tinker", "url": "http://localhost:1", **teacher}
    with pytest.raises(RecipeError, match=message):
        toy_recipe(models, {"teacher": whole, "objective": {"signal": "topk(4)"}})


def test_other_supports_are_refused(models: Path) -> None:
    teacher = {"type": "tinker", "url": "http://localhost:1", "model": "a"}
    for signal, message in (
        ("topk(4, support=union)", "cannot score support 'union'; it can: student, teacher"),
        ("full", "sampled, topk"),
    ):
        with pytest.raises(RecipeError, match=message):
            toy_recipe(models, {"teacher": teacher, "objective": {"signal": signal}})


# Impossible answers, from a fake client.

PROMPT, TOKENS = (1, 2), (3, 4, 5)
CANDIDATES = torch.tensor([[3, 1], [4, 0], [2, 5]])


class Answering(Connection):
    """A connection and client in one, which gives a fixed answer."""

    def __init__(self, **answer: Any) -> None:
        self.address, self.reopened, self.service = "http://localhost", 0, None
        self.given = SimpleNamespace(
            **{
                "prompt_logprobs_np": np.full(5, -1.0, dtype=np.float32),
                "topk_prompt_logprobs_np": None,
                "target_prompt_logprobs": None,
            }
            | answer
        )
        self.asked: list[dict[str, Any]] = []

    def wait(self, requests: Any, what: str) -> list[Any]:
        return list(requests)

    def request(self, send: Callable[[], Any], what: str) -> Any:
        return send()

    def sample(self, *_: Any, **named: Any) -> Any:
        self.asked.append(named)
        return self.given


def scored(answering: Answering, signal: Signal) -> Any:
    sampler = ServiceSampler(answering, lambda service: answering, 7)
    return sampler.score([ScoreRequest(PROMPT, TOKENS, CANDIDATES)], signal)[0]


def table(ids: list[list[int]], values: list[list[float]]) -> Any:
    """Return a top-k table with two empty first rows."""
    empty = [[0] * len(ids[0])] * 2
    return SimpleNamespace(
        token_ids=np.array(empty + ids, dtype=np.int32),
        logprobs=np.array(empty + values, dtype=np.float32),
    )


def named(values: torch.Tensor) -> Any:
    return SimpleNamespace(to_torch=lambda: values)


def test_an_answer_that_is_right_is_taken_and_minus_infinity_is_lifted() -> None:
    values = torch.tensor([[0.0, 0.0], [-1.0, -2.0], [-torch.inf, -1.0], [-1.0, -1.5]])
    answering = Answering(target_prompt_logprobs=named(values))
    found = scored(answering, TopK(k=2))
    assert found.topk_ids.equal(CANDIDATES) and found.logprobs.tolist() == [-1.0] * 3
    assert found.topk_logprobs[0].tolist() == [-1.0, -2.0] and found.topk_logprobs[1, 0] == -50.0
    asked = answering.asked[0]
    assert asked["prompt_logprobs_last_n"] == 3 and asked["target_prompt_logprobs"].shape == [4, 2]
    assert asked["target_prompt_logprobs"].data[-6:] == CANDIDATES.flatten().tolist()


@pytest.mark.parametrize(
    ("answer", "signal", "message"),
    [
        (
            {"prompt_logprobs_np": None},
            Sampled(),
            "completion 1 of 1 do not match its 5 tokens",
        ),
        ({"prompt_logprobs_np": np.zeros(4)}, Sampled(), "do not match its 5 tokens"),
        ({"prompt_logprobs_np": np.full(5, np.nan)}, Sampled(), "hold NaN or numbers above 0"),
        ({"prompt_logprobs_np": np.full(5, 0.5)}, Sampled(), "hold NaN or numbers above 0"),
        ({}, TopK(k=2, support="teacher"), "lack the requested top 2 tokens"),
        (
            {"topk_prompt_logprobs_np": table([[1, 9]] * 3, [[-1.0, -2.0]] * 3)},
            TopK(k=2, support="teacher"),
            "token 9 is not in the vocabulary of 7",
        ),
        (
            {"topk_prompt_logprobs_np": table([[1, 1]] * 3, [[-1.0, -2.0]] * 3)},
            TopK(k=2, support="teacher"),
            "a candidate is listed twice",
        ),
        (
            {"topk_prompt_logprobs_np": table([[1, 2]] * 3, [[-0.1, -0.2]] * 3)},
            TopK(k=2, support="teacher"),
            "weigh 1.7.* together",
        ),
        (
            {"target_prompt_logprobs": named(torch.zeros(3, 2))},
            TopK(k=2),
            "do not have the shape of the candidates",
        ),
    ],
)
def test_an_answer_that_cannot_be_right_is_refused(
    answer: dict[str, Any], signal: Signal, message: str
) -> None:
    with pytest.raises(TeacherError, match=f"http://localhost: the scores of .*{message}"):
        scored(Answering(**answer), signal)
