"""Policies of a rectified flow, x_t = (1 - t) x_0 + t noise, as functions without a network.

A policy predicts x_0 at any state of an interval; the velocity is the mean of noise - x_0 given
x_t, which is (x_t - x_0) / t. Axes: K Gaussians, G grid points, D dimensions.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gaussians:
    """A mixture of isotropic Gaussians; the logits need not be normalised."""

    logits: Float[Tensor, "... K"]
    means: Float[Tensor, "... K D"]
    scales: Float[Tensor, "... K"]

    def multiply(
        self, precision: Float[Tensor, "..."], linear: Float[Tensor, "... D"]
    ) -> "Gaussians":
        """Return the normalised product with exp(-precision / 2 |x|^2 + linear . x)."""
        variance, dimension = self.scales.square(), self.means.shape[-1]
        precision, linear = precision[..., None], linear[..., None, :]
        shrinkage = 1 / (1 + variance * precision)
        exponent = (self.means * linear).sum(dim=-1)
        exponent = exponent - precision / 2 * self.means.square().sum(dim=-1)
        exponent = exponent + variance / 2 * linear.square().sum(dim=-1)
        logits = self.logits + dimension / 2 * shrinkage.log() + exponent * shrinkage
        means = (self.means + variance[..., None] * linear) * shrinkage[..., None]
        return Gaussians(logits, means, self.scales * shrinkage.sqrt())

    def draw(self, count: int, stream: torch.Generator) -> Float[Tensor, "N D"]:
        """Return points of one mixture."""
        weights = torch.softmax(self.logits, dim=-1)
        numbers = torch.multinomial(weights, count, replacement=True, generator=stream)
        noise = torch.randn(count, self.means.shape[-1], generator=stream)
        return self.means[numbers] + self.scales[numbers, None] * noise

    def compute_mean(self) -> Float[Tensor, "... D"]:
        """Return the mean of the mixture."""
        return (torch.softmax(self.logits, dim=-1)[..., None] * self.means).sum(dim=-2)


def weigh(
    state: Float[Tensor, "... D"], time: Float[Tensor, "..."]
) -> tuple[Float[Tensor, "..."], Float[Tensor, "... D"]]:
    """Return precision and linear factor of the likelihood of x_t as a function of x_0."""
    keep = 1 - time
    return (keep / time).square(), (keep / time.square())[..., None] * state


def compute_velocity(
    predicted: Float[Tensor, "... D"], state: Float[Tensor, "... D"], time: Float[Tensor, "..."]
) -> Float[Tensor, "... D"]:
    """Return the velocity at x_t of a prediction of x_0."""
    return (state - predicted) / time[..., None]


def interpolate(
    grid: Float[Tensor, "... G D"], place: Float[Tensor, "..."]
) -> Float[Tensor, "... D"]:
    """Return the DX policy's x_0: linear between the grid points, at a `place` from 0 to 1."""
    last = grid.shape[-2] - 1
    distance = (place[..., None] * last - torch.arange(last + 1, device=grid.device)).abs()
    return ((1 - distance).clamp(min=0)[..., None] * grid).sum(dim=-2)


def predict_by_gaussians(
    posterior: Gaussians,
    start: tuple[Float[Tensor, "... D"], Float[Tensor, "..."]],
    later: tuple[Float[Tensor, "... D"], Float[Tensor, "..."]],
) -> Float[Tensor, "... D"]:
    """Return the GMFlow policy's x_0 at a later state (arXiv 2504.05304).

    `posterior` is the distribution of x_0 at the `start` of the interval; `start` and
    `later` are states with their times. If the posterior is exact, so is the prediction.
    """
    (old_precision, old_linear), (precision, linear) = weigh(*start), weigh(*later)
    return posterior.multiply(precision - old_precision, linear - old_linear).compute_mean()


def predict_by_mixture(
    mixture: Gaussians, state: Float[Tensor, "... D"], time: Float[Tensor, "..."]
) -> Float[Tensor, "... D"]:
    """Return the mean of x_0 given x_t, for x_0 from a mixture."""
    return mixture.multiply(*weigh(state, time)).compute_mean()


Predictor = Callable[[Tensor, Tensor], Tensor]
"""Returns the mean of x_0 at states [..., D] with times [...]."""


def follow(
    predict: Predictor, state: Float[Tensor, "... D"], span: tuple[float, float], steps: int
) -> Float[Tensor, "... D"]:
    """Return the state after Euler's steps along a velocity, between two times."""
    start, end = span
    for number in range(steps):
        time = torch.tensor(start + (end - start) * number / steps)
        velocity = compute_velocity(predict(state, time), state, time)
        state = state + (end - start) / steps * velocity
    return state
