"""The distance to a teacher: exact from whole distributions, else an estimate with its error."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
from service import LEFT_OPEN, serving
from toy import toy_recipe

from practicum.objective import Signal
from practicum.ports import (
    Capabilities,
    SamplingClient,
    Teacher,
)
from practicum.report.tables import build_comparison
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.statistics import estimate_mean
from practicum.statistics.heldout import Evaluation
from practicum.training.evaluation import evaluate
from practicum.types import (
    Rollout,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)

WARM = {"evaluation.temperature": 1.0, "evaluation.samples": 40}
SAMPLED = Capabilities(signals=frozenset({"sampled"}))


@dataclass
class SampledTeacher:
    """A teacher that only gives the log-probability of each token, as most servers do."""

    inner: Teacher

    @property
    def capabilities(self) -> Capabilities:
        return SAMPLED

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        return self.inner.score(rollouts, signal)


@dataclass
class SampledClient(SamplingClient):
    """A student at a service: its answers, and the log-probability of each token."""

    inner: SamplingClient

    @property
    def capabilities(self) -> Capabilities:
        return SAMPLED

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        return self.inner.sample(requests, params)

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        return self.inner.score(requests, signal)


def build(models: Path, folder: Path, **changes: object) -> RunComponents:
    settings = {"evaluation.prompts": 24, **changes}
    return assemble_run(toy_recipe(models, settings), folder)


def measure(
    run: RunComponents, *, local_student: bool = True, local_teacher: bool = True
) -> Evaluation:
    assert run.evaluation is not None
    parts = run.parts
    client = parts.sampler if local_student else SampledClient(parts.sampler)
    teacher = parts.teacher if local_teacher else SampledTeacher(parts.teacher)
    return evaluate(client, parts.renderer, parts.task, teacher, run.evaluation)  # type: ignore[arg-type]


def test_an_estimate_agrees_with_the_exact_number_within_its_error(
    models: Path, tmp_path: Path
) -> None:
    run = build(models, tmp_path, **WARM)
    exact, estimated = measure(run), measure(run, local_student=False, local_teacher=False)
    assert exact.reverse_kl_estimate is exact.student_entropy_estimate is None
    assert estimated.reverse_kl is estimated.student_entropy is None, "an estimate has its own name"
    for number, estimate in (
        (exact.reverse_kl, estimated.reverse_kl_estimate),
        (exact.student_entropy, estimated.student_entropy_estimate),
    ):
        assert number is not None and estimate is not None and estimate.se is not None
        assert abs(estimate.mean - number) < 3.5 * estimate.se < 0.25 * number


def test_greedy_answers_are_not_what_an_estimate_is_made_of(models: Path, tmp_path: Path) -> None:
    greedy, warm = (
        build(models, tmp_path, **changes) for changes in ({}, {"evaluation.temperature": 1.0})
    )
    exact, estimated_greedy = measure(greedy), measure(greedy, local_teacher=False)
    assert (
        estimated_greedy.reverse_kl_estimate
        == measure(warm, local_teacher=False).reverse_kl_estimate
    )
    assert estimated_greedy.student_entropy == pytest.approx(exact.student_entropy), (
        "the student is known here"
    )
    assert estimated_greedy.student_entropy_estimate is None
    assert [answer.text for answer in estimated_greedy.answers] == [
        answer.text for answer in exact.answers
    ]
    names = [row[0] for row in build_comparison(estimated_greedy, estimated_greedy, None)]
    assert "reverse KL to teacher / token, estimate" in names and "entropy / token" in names
    read_back = Evaluation.from_json(json.loads(json.dumps(asdict(estimated_greedy))))
    assert read_back == estimated_greedy


def test_a_standard_error_covers_the_mean_of_dependent_tokens() -> None:
    generator = torch.Generator().manual_seed(3)
    covered, trials = 0, 300
    for _ in range(trials):
        level = torch.randn(40, generator=generator)
        columns = [
            0.7 + level[index] + 0.3 * torch.randn(1 + index % 7, generator=generator)
            for index in range(40)
        ]
        estimate = estimate_mean(columns, [str(index) for index in range(40)])
        assert estimate is not None and estimate.se is not None
        covered += abs(estimate.mean - 0.7) < 1.96 * estimate.se
    assert 0.90 < covered / trials < 0.98


def test_one_prompt_has_no_standard_error_and_no_token_no_estimate() -> None:
    single = estimate_mean([torch.tensor([1.0, 3.0]), torch.tensor([2.0])], ["a", "a"])
    assert single is not None and (single.mean, single.se) == (2.0, None)
    assert str(single) == "2.000" and str(replace(single, se=0.5)) == "2.000 ± 0.500"
    assert estimate_mean([torch.zeros(0)], ["a"]) is None


@pytest.mark.long
@LEFT_OPEN
def test_a_served_teacher_has_the_distance_of_the_same_model_here(
    models: Path, tmp_path: Path
) -> None:
    local = measure(build(models, tmp_path / "here", **WARM))
    with serving(models, tmp_path / "served") as served:
        teacher = {"type": "tinker", "url": served.url, "model": "teacher", "retry_seconds": 20.0}
        remote = measure(
            build(
                models, tmp_path / "there", teacher=teacher, objective={"signal": "sampled"}, **WARM
            )
        )
    assert local.reverse_kl is not None and remote.reverse_kl_estimate is not None
    assert remote.reverse_kl is None and remote.reverse_kl_estimate.se is not None
    gap = abs(remote.reverse_kl_estimate.mean - local.reverse_kl)
    assert gap < 3.5 * remote.reverse_kl_estimate.se < 0.25 * local.reverse_kl
