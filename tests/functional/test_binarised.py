"""Binarised divergences: the paper's formula, data processing, the limit of a large temperature, and their derivative."""

import math

import pytest
import torch

from practicum.functional.binarised import binarise, binarised
from practicum.functional.divergences import DIVERGENCES
from practicum.functional.precision import finite
from practicum.functional.sequence import share_spans, sum_spans

F_DIVERGENCES = [name for name, entry in DIVERGENCES.items() if entry.f_divergence]


def spans(seed: int, count: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = -4 * torch.rand(2, count, generator=generator, dtype=torch.float64)
    return student, teacher


@pytest.mark.parametrize("tau", [0.5, 1.0, 7.0])
def test_it_is_the_papers_formula(tau: float) -> None:
    student, teacher = spans(0)
    p, q = (teacher.exp() ** (1 / tau), student.exp() ** (1 / tau))
    forward = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    torch.testing.assert_close(
        binarised(DIVERGENCES["forward_kl"], student, teacher, tau), forward, rtol=1e-9, atol=1e-12
    )
    backward = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    torch.testing.assert_close(
        binarised(DIVERGENCES["reverse_kl"], student, teacher, tau), backward, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("name", F_DIVERGENCES)
def test_it_is_at_most_the_divergence_of_the_whole_distributions(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    student, teacher = (
        (2 * torch.randn(200, 9, generator=generator, dtype=torch.float64)).log_softmax(-1)
        for _ in range(2)
    )
    entry = DIVERGENCES[name]
    places = torch.randint(9, (200, 1), generator=generator)
    one, other = student.gather(-1, places)[:, 0], teacher.gather(-1, places)[:, 0]
    assert (binarised(entry, one, other) <= entry.value(student, teacher) + 1e-9).all()
    if entry.zero_at_equality:
        assert binarised(entry, one, one).abs().max() < 1e-12


def test_a_large_temperature_has_the_limit_that_the_paper_names() -> None:
    student, teacher = torch.tensor([-2.2, -5.0]).double(), torch.tensor([-1.3, -9.0]).double()
    limit = teacher - student + teacher * (student / teacher).log()
    scaled = 1e4 * binarised(DIVERGENCES["forward_kl"], student, teacher, 1e4)
    torch.testing.assert_close(scaled, limit, rtol=1e-3, atol=0.0)


def test_certain_and_impossible_spans_are_finite() -> None:
    edges = torch.tensor([0.0, -1e-12, -1e-3, -1e4, -math.inf])
    student, teacher = (part.flatten() for part in torch.meshgrid(edges, edges, indexing="ij"))
    for name in F_DIVERGENCES:
        for tau in (1.0, 100.0):
            leaf = student.clone().requires_grad_()
            value = binarised(DIVERGENCES[name], finite(leaf), teacher, tau)
            (gradient,) = torch.autograd.grad(value.sum(), leaf)
            assert torch.isfinite(value).all() and torch.isfinite(gradient).all(), name
    assert binarise(torch.zeros(1)).exp().sum() == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(ValueError, match="tau must be positive, got 0"):
        binarise(torch.zeros(1), 0.0)


def test_shares_add_up_to_the_spans_value() -> None:
    numbers = torch.tensor([1, 1, 2, 3, 3, 3])
    logprobs = torch.tensor([-1.0, -3.0, -0.5, 0.0, 0.0, 0.0])
    values = torch.tensor([2.0, 2.0, 5.0, 6.0, 6.0, 6.0])
    assert share_spans(values, logprobs, numbers, "even").tolist() == [1, 1, 5, 2, 2, 2]
    # A certain span has no surprise to divide.
    assert share_spans(values, logprobs, numbers, "surprise").tolist() == [0.5, 1.5, 5, 2, 2, 2]
    for share in ("even", "surprise"):
        summed = sum_spans(share_spans(values, logprobs, numbers, share), numbers)
        assert summed.equal(values)
