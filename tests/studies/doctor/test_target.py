"""The doctor measures the distance to the target of the objective, not to the plain teacher."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import candidates_only, sampled_only
from toy import toy_recipe

from practicum import functional as F
from practicum.errors import TeacherError
from practicum.losses.passes import build_score_requests
from practicum.objective import Full, TopK
from practicum.runs.assembly import assemble_run
from practicum.studies.doctor.evidence import Evidence, collect_evidence
from practicum.studies.doctor.signal import check_distance

Pair = tuple[torch.Tensor, torch.Tensor]


def renormalize(student: torch.Tensor, teacher: torch.Tensor) -> Pair:
    ids, valid = F.candidates(student, teacher, 3, "student")
    restricted = [F.restrict(logprobs, ids, valid, "renorm") for logprobs in (student, teacher)]
    return restricted[0], restricted[1]


TARGETS: dict[str, tuple[dict[str, object], Callable[[torch.Tensor, torch.Tensor], Pair]]] = {
    "teacher": ({}, lambda student, teacher: (student, teacher)),
    "sharpened": (
        {"target": "teacher(temperature=0.5)"},
        lambda student, teacher: (student, F.temper(teacher, 0.5)),
    ),
    "mixed": (
        {"target": "mixture(teacher=0.3)"},
        lambda student, teacher: (student, F.mixture([(0.3, teacher), (0.7, student)])),
    ),
    "extrapolated": (
        {"target": "log_linear(teacher=1.5, student=-0.5)"},
        lambda student, teacher: (student, F.log_linear([(1.5, teacher), (-0.5, student)])),
    ),
    "restricted": ({"signal": "topk(3, tail=renorm)"}, renormalize),
}


@pytest.mark.parametrize("name", TARGETS)
def test_the_distance_is_that_to_the_target(models: Path, tmp_path: Path, name: str) -> None:
    changes, build_pair = TARGETS[name]
    objective = {"signal": "full", "divergence": "reverse_kl", **changes}
    recipe = toy_recipe(models, {"objective": objective})
    components = assemble_run(recipe, tmp_path)
    evidence = collect_evidence(recipe, components, 3, 2)
    client, teacher = components.parts.sampler, components.parts.teacher
    student_signals = client.score(build_score_requests(evidence.rollouts), Full())
    teacher_signals = teacher.score(evidence.rollouts, Full())
    for row, *signals in zip(evidence.measurements, student_signals, teacher_signals, strict=True):
        student, plain = (signal.head.logprobs(signal.states) for signal in signals)
        expected = F.reverse_kl(*build_pair(student, plain))
        torch.testing.assert_close(row.divergence, expected.cpu(), rtol=1e-4, atol=1e-5)
        assert row.teacher_logprobs is not None, "the checks of the setup are about the teacher"
        sampled = F.gather_logprobs(plain, row.rollout.tokens)
        torch.testing.assert_close(row.teacher_logprobs, sampled, rtol=1e-4, atol=1e-5)


def _collect(
    models: Path, folder: Path, objective: object, wrap: Callable[..., object] = lambda inner: inner
) -> Evidence:
    recipe = toy_recipe(models, {"objective": objective})
    components = assemble_run(recipe, folder)
    parts = replace(components.parts, teacher=wrap(components.parts.teacher))
    return collect_evidence(recipe, replace(components, parts=parts), 3, 2)


def test_the_candidates_of_a_teacher_are_cut_as_the_loss_cuts_them(
    models: Path, tmp_path: Path
) -> None:
    objective = {"signal": "topk(3, support=teacher, tail=renorm)"}
    evidence = _collect(models, tmp_path, objective, candidates_only(3))
    whole = _collect(models, tmp_path / "whole", objective)
    for row, other in zip(evidence.measurements, whole.measurements, strict=True):
        assert torch.equal(row.rollout.tokens, other.rollout.tokens)
        torch.testing.assert_close(row.divergence, other.divergence, rtol=1e-4, atol=1e-5)


class _FailsTheLoss:
    """A teacher that answers the doctor's question and fails at the question of the loss."""

    def __init__(self, inner: Any) -> None:
        self.answers = candidates_only(8)(inner)
        self.capabilities = self.answers.capabilities

    def score(self, rollouts: Any, signal: Any) -> Any:
        if signal == TopK(k=3, support="teacher", tail="renorm"):
            raise TeacherError("the server says no")
        return self.answers.score(rollouts, signal)


def test_a_teacher_that_fails_at_the_question_of_the_loss_is_a_finding(
    models: Path, tmp_path: Path
) -> None:
    objective = {"signal": "topk(3, support=teacher, tail=renorm)"}
    evidence = _collect(models, tmp_path, objective, _FailsTheLoss)
    assert evidence.scoring_error == "the server says no"
    assert all(row.divergence is not None for row in evidence.measurements)


SENTENCES = {
    "the teacher": ({"signal": "full"}, None, "student and teacher are {} nats per token apart"),
    "a target": (
        {"signal": "full", "target": "mixture(teacher=0.3)"},
        None,
        "student and the target of the loss are {} nats per token apart",
    ),
    "candidates": (
        {"signal": "topk(3)"},
        None,
        "student and teacher are {} nats per token apart over the 3 candidates of the loss",
    ),
    "a bound": (
        {"signal": "sampled"},
        candidates_only(8),
        "student and teacher are at least {} nats per token apart",
    ),
    "an estimate": (
        {"signal": "sampled"},
        sampled_only(lambda rollout, logprobs: logprobs),
        "student and teacher are {} nats per token apart, estimated from the tokens of the answers",
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_the_sentence_says_what_was_measured(models: Path, tmp_path: Path, name: str) -> None:
    objective, wrap, sentence = SENTENCES[name]
    outcome = check_distance(_collect(models, tmp_path, objective, wrap or (lambda inner: inner)))
    assert outcome.value is not None
    assert outcome.sentence.startswith(sentence.format(f"{outcome.value.mean:.3g}"))
