"""GAD by enumeration (2511.10643): the best discriminator, and the gradient of a policy that learns from it."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from practicum.losses import build_token_batch, compute_coefficients, compute_term_values
from practicum.methods.gad.discriminator import Config, build
from practicum.objective import Objective, TeacherDistribution
from practicum.ports.scoring import ScorerContext
from practicum.types import Datum, Judgement, Rollout, TeacherSignal
from tests.papers.worlds import answer

SYMBOLS, LENGTH = 3, 2
ANSWERS = list(itertools.product(range(SYMBOLS), repeat=LENGTH))
STATES = {beginning: place for place, beginning in enumerate([(), (0,), (1,), (2,)])}
TEACHER, STUDENT = [1, 4, 2, 3, 1, 1, 5, 2, 1], [2, 1, 3, 1, 4, 1, 1, 2, 5]
"""The count of each answer per writer: two distributions over all answers, without zeros."""


class Table:
    """Stores one number per answer, in place of a model, and the slopes that it receives."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers
        self.slopes = torch.zeros_like(numbers)

    def predict(self, texts: Sequence[Any]) -> list[Tensor]:
        return [self.numbers[self._find(text)][None].clone() for text in texts]

    def fit(self, texts: Sequence[Any], slopes: Sequence[Tensor], params: Any) -> dict[str, float]:
        for text, slope in zip(texts, slopes, strict=True):
            self.slopes[self._find(text)] += slope[0]
        return {}

    def _find(self, text: Any) -> int:
        return ANSWERS.index(text.prompt_tokens[1:])


def compute_slopes(
    numbers: Tensor, teacher: Sequence[int] = TEACHER, student: Sequence[int] = STUDENT
) -> tuple[Tensor, dict[str, float]]:
    """Return the derivatives of the discriminator's loss in the number of each answer, and its report."""
    table = Table(numbers)
    context: Any = ScorerContext(
        "d", *[None] * 2, 0, lambda config: table, lambda config: None, lambda: table
    )  # type: ignore[arg-type, return-value]
    rollouts = [
        answer(torch.tensor(ids), torch.zeros(LENGTH), source=source)
        for source, counts in (("teacher", teacher), ("student", student))
        for ids, count in zip(ANSWERS, counts, strict=True)
        for _ in range(count)
    ]
    metrics = build(Config(), context).fit(rollouts)
    return table.slopes, metrics


def test_the_best_discriminator_is_the_log_ratio_and_a_constant() -> None:
    """Its loss is convex in the numbers of the answers, so it is minimal where the slopes vanish."""
    best = (torch.tensor(TEACHER).double() / torch.tensor(STUDENT)).log()
    slopes, at_best = compute_slopes(best + 0.7)
    assert slopes.abs().max() < 1e-12
    elsewhere, beside = compute_slopes(best * 0.9)
    assert elsewhere.abs().max() > 1e-3
    assert beside["loss"] > at_best["loss"]
    equal = sum(ours * theirs for ours, theirs in zip(TEACHER, STUDENT, strict=True))
    assert at_best["pairs"] == sum(TEACHER) * sum(STUDENT) - equal


def expected_gradient(
    choice: dict[str, Any], table: Tensor, judge: Callable[[int], float], n: int = 1
) -> Tensor:
    """Return the library's gradient in the student's table, over every group of n student answers."""
    leaf = table.clone().requires_grad_()
    objective = Objective.model_validate({"aggregate": "seq_mean_token_sum", **choice})
    total = torch.zeros((), dtype=torch.float64)
    for group in itertools.product(range(len(ANSWERS)), repeat=n):
        rollouts: list[Rollout] = []
        paths: list[int] = []
        for sample, number in enumerate(group):
            ids = torch.tensor(ANSWERS[number])
            path = [STATES[ANSWERS[number][:length]] for length in range(LENGTH)]
            drawn = table.log_softmax(-1)[path, ids]
            rollout = answer(ids, drawn, reward=0.0, sample=sample)
            rollouts.append(replace(rollout, judgements={"d": Judgement(judge(number))}))
            paths += path
        batch = build_token_batch([Datum(row, TeacherSignal()) for row in rollouts], objective)
        student = leaf[paths].log_softmax(-1)
        (values,) = compute_term_values(student, TeacherDistribution(), batch, objective)
        shares = compute_coefficients(objective.losses[0], values.detach(), batch)
        chance = sum((row.sampling_logprobs.sum() for row in rollouts), torch.zeros(())).exp()
        total = total + chance * (shares * values.loss_value).sum()
    return torch.autograd.grad(total, leaf)[0]


def make_student() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(len(STATES), SYMBOLS, generator=generator, dtype=torch.float64)


RATIOS = [(number * 5 % 9 - 4) / 8 for number in range(len(ANSWERS))]
"""log T - log S of each answer and a constant: eighths, which float32 holds exactly."""


def compute_sequence_gradient(table: Tensor, ratios: Sequence[float] = RATIOS) -> Tensor:
    """Return the gradient of KL(S || T) between whole answers, where T is S times exp(ratios), normalised."""
    leaf = table.clone().requires_grad_()
    logprobs = []
    for ids in ANSWERS:
        path = [STATES[ids[:length]] for length in range(LENGTH)]
        logprobs.append(leaf.log_softmax(-1)[path, torch.tensor(ids)].sum())
    own = torch.stack(logprobs)
    teacher = (own.detach() + torch.tensor(ratios, dtype=torch.float64)).log_softmax(0)
    return torch.autograd.grad((own.exp() * (own - teacher)).sum(), leaf)[0]


@pytest.mark.parametrize(
    ("advantage", "n", "share"),
    [("none", 1, 1.0), ("leave_one_out", 2, 1.0), ("group_mean", 2, 0.5)],
)
def test_learning_from_the_best_discriminator_is_reverse_kl_of_whole_answers(
    advantage: str, n: int, share: float
) -> None:
    """The mean of a group of n contains the answer itself, which leaves (n - 1) / n of the gradient."""
    table = make_student()
    choice = {"signal": f"score({advantage})", "scorer": "d"}
    ours = expected_gradient(choice, table, lambda number: RATIOS[number] + 0.5, n)
    theirs = share * compute_sequence_gradient(table)
    assert theirs.abs().max() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_a_groups_division_by_its_spread_is_the_gradient_of_something_else() -> None:
    """Check that GRPO, as in the paper, follows the sign of a difference and ignores its size."""
    table = make_student()
    # One answer that the teacher writes far more often, and small differences between the remaining answers.
    skewed = [3.0, *RATIOS[1:]]
    gradients = [
        expected_gradient(
            {"signal": f"score({name})", "scorer": "d"}, table, lambda row: skewed[row], 2
        )
        for name in ("leave_one_out", "group_normalized")
    ]
    exact = compute_sequence_gradient(table, skewed)
    torch.testing.assert_close(gradients[0], exact, rtol=0, atol=1e-9)
    cosine = torch.nn.functional.cosine_similarity(gradients[1].flatten(), exact.flatten(), dim=0)
    assert 0.5 < cosine < 0.97


def test_a_discriminator_of_equal_writers_orders_half_of_the_pairs() -> None:
    """Check a student that equals the teacher: no number is better than chance, and nothing is learned."""
    numbers = torch.randn(len(ANSWERS), dtype=torch.float64)
    _, metrics = compute_slopes(numbers, STUDENT, STUDENT)
    assert metrics["accuracy"] == 0.5
    slopes, _ = compute_slopes(torch.zeros(len(ANSWERS), dtype=torch.float64), STUDENT, STUDENT)
    assert slopes.abs().max() < 1e-15
