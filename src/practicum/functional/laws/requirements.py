"""Shared helpers of the laws: broken requirements, random inputs and gradients."""

from collections.abc import Callable

import torch
from torch import Tensor


class LawBroken(AssertionError):
    """Raised if an entry breaks a law; the message has the numbers that show it."""


def require(holds: bool | Tensor, text: str) -> None:
    """Raise LawBroken unless the condition holds, everywhere if it is a tensor."""
    if not bool(torch.as_tensor(holds).all()):
        raise LawBroken(text)


def require_close(value: Tensor, expected: Tensor, text: str, rel: float = 1e-12) -> None:
    """Raise LawBroken unless the tensors are equal up to a relative error of their norms."""
    error = (value - expected).norm() / expected.norm().clamp(min=1e-9)
    require(error <= rel, f"{text}: {show(value)} and not {show(expected)}")


def random_logits(
    seed: int, positions: int = 4, vocabulary: int = 6, scale: float = 1.5, count: int = 2
) -> list[Tensor]:
    """Return random logits [positions, vocabulary] in float64, `count` of them."""
    generator = torch.Generator().manual_seed(seed)
    return [
        scale * torch.randn(positions, vocabulary, generator=generator, dtype=torch.float64)
        for _ in range(count)
    ]


def normalize(logits: Tensor) -> Tensor:
    """Return the log-probabilities."""
    return torch.log_softmax(logits, dim=-1)


def differentiate(function: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    """Return the gradient in the logits of the sum of a function of their log-probabilities."""
    leaf = logits.detach().clone().requires_grad_()
    total = function(normalize(leaf)).sum()
    require(total.requires_grad, "the value has no gradient in the student")
    return torch.autograd.grad(total, leaf)[0]


def show(values: Tensor) -> str:
    """Return a tensor in a few digits, the first entries only."""
    flat = values.detach().double().flatten()
    digits = ", ".join(f"{number:.4g}" for number in flat[:8].tolist())
    return f"[{digits}{', ...' if len(flat) > 8 else ''}]" if len(flat) != 1 else digits
