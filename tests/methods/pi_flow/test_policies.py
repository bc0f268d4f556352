"""Laws of the policies: exact where the policy is, and equal to integrals over the noise."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from practicum.methods.pi_flow.policies import (
    Gaussians,
    compute_velocity,
    follow,
    interpolate,
    predict_by_gaussians,
    predict_by_mixture,
    weigh,
)

SEEDS = range(5)


def draw(seed: int, dimension: int = 2, count: int = 3) -> tuple[Gaussians, torch.Generator]:
    """Return a mixture with unequal weights and scales, and the stream it was drawn from."""
    stream = torch.Generator().manual_seed(seed)
    numbers = {"generator": stream, "dtype": torch.float64}
    logits, means = torch.randn(count, **numbers), 2 * torch.randn(count, dimension, **numbers)
    return Gaussians(logits, means, 0.2 + torch.rand(count, **numbers)), stream


def randn(stream: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=stream, dtype=torch.float64)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_exact_velocity_is_an_integral_over_the_end_points(seed: int) -> None:
    mixture, stream = draw(seed, dimension=1)
    time, state = torch.tensor(0.1 + 0.2 * seed), randn(stream, 4, 1)
    ends = torch.linspace(-12, 12, 20001, dtype=torch.float64)
    density = torch.softmax(mixture.logits, -1) / mixture.scales
    gaps = (ends[:, None] - mixture.means[:, 0]) / mixture.scales
    prior = (density * (-gaps.square() / 2).exp()).sum(-1)
    # The noise that leads from an end point to the state has a standard Gaussian density.
    noise = (state - (1 - time) * ends) / time
    weights = prior * (-noise.square() / 2).exp()
    velocity = (weights * (noise - ends)).sum(-1) / weights.sum(-1)
    found = compute_velocity(predict_by_mixture(mixture, state, time), state, time)
    torch.testing.assert_close(found[:, 0], velocity, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_gaussians_with_the_true_posterior_have_the_exact_velocity_later(seed: int) -> None:
    mixture, stream = draw(seed, dimension=3)
    start, now = torch.tensor([0.95, 0.7]), torch.tensor([0.6, 0.1])
    before, state = randn(stream, 2, 3), randn(stream, 2, 3)
    posterior = mixture.multiply(*weigh(before, start))
    found = predict_by_gaussians(posterior, (before, start), (state, now))
    torch.testing.assert_close(found, predict_by_mixture(mixture, state, now))
    same = predict_by_gaussians(posterior, (before, start), (before, start))
    torch.testing.assert_close(same, posterior.compute_mean())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_product_with_a_gaussian_is_the_product_of_densities(seed: int) -> None:
    mixture, stream = draw(seed)
    precision, linear = torch.tensor(0.3 + seed, dtype=torch.float64), randn(stream, 2)
    places = randn(stream, 50, 2)

    def log_density(parts: Gaussians) -> Tensor:
        gaps = (places[:, None] - parts.means) / parts.scales[:, None]
        exponents = -gaps.square().sum(-1) / 2 - 2 * parts.scales.log()
        return torch.logsumexp(parts.logits + exponents, -1)

    factor = -precision / 2 * places.square().sum(-1) + places @ linear
    difference = log_density(mixture) + factor - log_density(mixture.multiply(precision, linear))
    torch.testing.assert_close(difference, difference[:1].expand(50))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_grid_is_reproduced_at_its_points_and_linear_between(count: int) -> None:
    grid = randn(torch.Generator().manual_seed(count), 4, count, 3)
    for number in range(count):
        place = torch.tensor(number / max(count - 1, 1))
        torch.testing.assert_close(interpolate(grid, place), grid[:, number])
    for number in range(count - 1):
        middle = torch.tensor((number + 0.25) / (count - 1))
        expected = 0.75 * grid[:, number] + 0.25 * grid[:, number + 1]
        torch.testing.assert_close(interpolate(grid, middle), expected, rtol=1e-5, atol=1e-6)


def test_many_exact_steps_lead_from_noise_to_the_mixture() -> None:
    mixture, stream = draw(1)
    ends = follow(partial(predict_by_mixture, mixture), randn(stream, 4000, 2), (1.0, 0.0), 100)
    expected = torch.softmax(mixture.logits, -1) @ mixture.means
    assert (ends.mean(0) - expected).abs().max() < 4 * ends.std(0).max() / math.sqrt(len(ends))
