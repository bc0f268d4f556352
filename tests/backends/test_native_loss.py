"""The compiled reverse KL against its definition in float64."""

import pytest
import torch

from practicum.backends.local.native.library import load_library
from practicum.backends.local.native.loss import NativeReverseKL
from practicum.functional.divergences import floored
from practicum.functional.precision import IMPOSSIBLE

library = load_library()
pytestmark = pytest.mark.skipif(library is None, reason="no compiler, or other vectors")


def build_kernel() -> NativeReverseKL:
    assert library is not None
    return NativeReverseKL(library)


def draw_logits(columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw ordinary rows, one far apart, one with a token that is impossible for the teacher, two equal ones."""
    generator = torch.Generator().manual_seed(columns)
    student = 3 * torch.randn(5, columns, generator=generator)
    teacher = student + torch.randn(5, columns, generator=generator)
    teacher[1] *= 60
    teacher[2, columns // 2] = -torch.inf
    teacher[3] = student[3] + 2
    return student, teacher


@pytest.mark.parametrize("columns", [1, 7, 64, 1037, 4099])
def test_numbers_and_gradient_are_those_of_the_definition(columns: int) -> None:
    student, teacher = draw_logits(columns)
    coefficients = torch.linspace(-1.0, 2.0, 5)
    exact = student.double().requires_grad_()
    s, t = exact.log_softmax(-1), teacher.double().log_softmax(-1).clamp(min=IMPOSSIBLE)
    if columns == 1:
        t = torch.zeros_like(t)
        teacher[2] = 0.0
    divergence = (s.exp() * (s - floored(s, t))).sum(-1)
    (divergence * coefficients).sum().backward()
    highest = [logits.double().amax(-1) for logits in (student, teacher)]
    levels = [
        (logits.double() - peak[:, None]).logsumexp(-1)
        for logits, peak in zip((student, teacher), highest, strict=True)
    ]
    entropies = [-(p.exp() * p).sum(-1) for p in (s, t)]
    numbers = build_kernel().measure(student, teacher)
    expected = torch.stack([*highest, *levels, divergence, *entropies]).detach()
    assert torch.allclose(numbers.double(), expected, rtol=1e-5, atol=1e-5)
    build_kernel().differentiate(student, teacher, numbers, coefficients)
    assert exact.grad is not None
    assert torch.allclose(student.double(), exact.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_a_common_offset_of_all_logits_changes_nothing(offset: float) -> None:
    # Multiples of 1/64 are exact in float32 with and without the offset.
    student, teacher = (
        (64 * logits).round() / 64 for logits in draw_logits(1037) for logits in [logits[[0, 3]]]
    )
    gradients, numbers = [], []
    for shift in (0.0, offset):
        logits = student + shift, teacher + shift
        numbers.append(build_kernel().measure(*logits))
        build_kernel().differentiate(*logits, numbers[-1], torch.ones(2))
        gradients.append(logits[0])
    assert torch.equal(numbers[0][2:], numbers[1][2:])
    assert torch.equal(gradients[0], gradients[1])


def test_bits_depend_on_neither_threads_nor_other_rows() -> None:
    student, teacher = draw_logits(4099)
    numbers, threads = build_kernel().measure(student, teacher), torch.get_num_threads()
    alone = build_kernel().measure(student[3:4].clone(), teacher[3:4].clone())
    torch.set_num_threads(3)
    try:
        shared = build_kernel().measure(student, teacher)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(shared, numbers)
    assert torch.equal(alone[:, 0], numbers[:, 3])


@pytest.mark.parametrize("who", [0, 1])
def test_a_number_that_is_none_reaches_the_loss(who: int) -> None:
    logits = draw_logits(1037)
    logits[who][4, 1030] = torch.nan
    divergence = build_kernel().measure(*logits)[4]
    assert divergence[4].isnan()
    assert divergence[:4].isfinite().all()
