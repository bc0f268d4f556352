"""The distance of action values: zeros, loops, finite differences, other vocabularies, and odd settings."""

import math

import pytest
import torch
from torch import Tensor

from practicum.errors import CapabilityError
from practicum.functional.divergences import DIVERGENCES
from practicum.methods.rpd.action import Config, compute_values, gaussian_kl, mean_square
from practicum.objective import Objective, TeacherDistribution
from practicum.objective.distribution import SignalComparison

BINS, OTHERS = 5, 4
DISTANCES = pytest.mark.parametrize("distance", ["mse", "gaussian"])


def draw(seed: int, rows: int = 6, size: int = BINS + OTHERS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(rows, size, generator=generator, dtype=torch.float64)).log_softmax(-1)


def compare(
    student: Tensor, teacher: Tensor, divergence: str = "forward_kl", **settings: object
) -> Tensor:
    config = Config.model_validate({"first": -BINS, "bins": BINS, **settings})
    tokens = torch.zeros(len(student), dtype=torch.long)
    signal = TeacherDistribution(teacher)
    return config.compare(SignalComparison(student, signal, tokens, DIVERGENCES[divergence]))


def loop(student: Tensor, teacher: Tensor, distance: str, scale: float) -> list[float]:
    """Return the value by loops over the vocabulary, in plain numbers."""
    numbers = []
    for row, target in zip(student.exp().tolist(), teacher.exp().tolist(), strict=True):
        mass, goal = sum(row[OTHERS:]), sum(target[OTHERS:])
        pairs = zip([*row[:OTHERS], mass], [*target[:OTHERS], goal], strict=True)
        total = sum(t * math.log(t / s) for s, t in pairs)
        values = [-0.8, -0.4, 0.0, 0.4, 0.8]
        moments = []
        for part, whole in ((row, mass), (target, goal)):
            mean = sum(p / whole * v for p, v in zip(part[OTHERS:], values, strict=True))
            square = sum(p / whole * v * v for p, v in zip(part[OTHERS:], values, strict=True))
            moments.append((mean, square - mean * mean + 0.01))
        (mean, variance), (other, spread) = moments
        gap = (mean - other) ** 2
        if distance == "gaussian":
            gap = math.log(math.sqrt(variance / spread)) + (spread + gap) / (2 * variance) - 0.5
        numbers.append(total + scale * goal * gap)
    return numbers


@DISTANCES
def test_it_is_the_sum_of_two_plain_loops(distance: str) -> None:
    student, teacher = draw(0), draw(1)
    found = compare(student, teacher, distance=distance, scale=3.0)
    slow = torch.tensor(loop(student, teacher, distance, 3.0), dtype=torch.float64)
    torch.testing.assert_close(found, slow)


@DISTANCES
def test_it_is_zero_at_equality_and_positive_elsewhere(distance: str) -> None:
    student, teacher = draw(2, rows=100), draw(3, rows=100)
    assert (compare(student, teacher, distance=distance) > 0).all()
    same = compare(teacher, teacher, distance=distance)
    torch.testing.assert_close(same, torch.zeros_like(same), atol=1e-12, rtol=0)


def test_only_the_mean_counts_in_mse_and_the_spread_too_in_the_gaussian() -> None:
    narrow = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0]]).clamp_min(1e-9).log()
    wide = torch.tensor([[0.5, 0.0, 0.0, 0.0, 0.5]]).clamp_min(1e-9).log()
    assert mean_square(narrow, wide).item() == pytest.approx(0, abs=1e-12)
    assert gaussian_kl(narrow, wide).item() > 1


def test_nearer_bins_cost_less() -> None:
    rows = torch.eye(BINS).clamp_min(1e-9).log()
    for compute in (mean_square, gaussian_kl):
        costs = compute(rows, rows[:1].expand_as(rows)).tolist()
        assert costs == sorted(costs) and costs[0] == pytest.approx(0, abs=1e-6)


@DISTANCES
def test_the_gradient_is_the_derivative_of_the_value(distance: str) -> None:
    logits, teacher = draw(4, rows=3).requires_grad_(), draw(5, rows=3)

    def value(logits: Tensor) -> Tensor:
        return compare(logits.log_softmax(-1), teacher, distance=distance)

    assert torch.autograd.gradcheck(value, (logits,))


@DISTANCES
def test_the_other_tokens_may_be_permuted_and_the_bins_mirrored(distance: str) -> None:
    student, teacher = draw(6), draw(7)
    order = [2, 0, 3, 1, *range(OTHERS, OTHERS + BINS)]
    mirrored = [*range(OTHERS), *reversed(range(OTHERS, OTHERS + BINS))]
    expected = compare(student, teacher, distance=distance)
    for other in (order, mirrored):
        found = compare(student[:, other], teacher[:, other], distance=distance)
        torch.testing.assert_close(found, expected)
    moved = [*range(OTHERS, OTHERS + BINS), *range(OTHERS)]
    found = compare(student[:, moved], teacher[:, moved], distance=distance, first=0)
    torch.testing.assert_close(found, expected)


def test_where_the_teacher_writes_no_action_its_value_does_not_count() -> None:
    teacher = draw(8)
    teacher[:, OTHERS:] = -torch.inf
    teacher = teacher.log_softmax(-1)
    student = draw(9).requires_grad_()
    plain, scaled = compare(student, teacher), compare(student, teacher, scale=100.0)
    torch.testing.assert_close(plain, scaled)
    plain.sum().backward()
    assert student.grad is not None and student.grad.isfinite().all()


def test_the_values_are_the_middles_of_256_bins() -> None:
    values = compute_values(256)
    assert values[0].item() == -1 + 1 / 256 and values[-1].item() == 1 - 1 / 256
    torch.testing.assert_close(values.diff(), torch.full((255,), 2 / 256))


def test_ids_outside_of_the_vocabulary_are_refused() -> None:
    with pytest.raises(
        CapabilityError, match="the vocabulary of 9 tokens has no such ids; set first"
    ):
        compare(draw(0), draw(1), first=5)


@pytest.mark.parametrize("extra", [{"estimator": "score_function"}, {"target": "log_linear(0.5)"}])
def test_only_the_derivative_is_possible(extra: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="leave out target and estimator"):
        Objective.model_validate({"signal": "action(-5, 5)", **extra})
