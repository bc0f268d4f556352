"""Signal and noise of gradients that are drawn with known values."""

import pytest
import torch

from laboratory.measures.gradient import Moments


def moments(mean: float, count: int, seed: int) -> Moments:
    """Draw `count` gradients of 100 numbers, each `mean` with noise of variance 1: signal 100 mean^2, noise 100."""
    generator = torch.Generator().manual_seed(seed)
    found = Moments()
    for _ in range(count):
        found.add(mean + torch.randn(100, generator=generator))
    return found


@pytest.mark.parametrize("count", [4, 64])
def test_the_ratio_is_that_of_the_distribution_however_few_the_batches(count):
    ratios = [moments(0.5, count, seed).compute_ratio() for seed in range(200)]
    assert sum(ratios) / len(ratios) == pytest.approx(0.25, rel=0.05), (
        "the bias of the mean's own noise is taken off"
    )


def test_pure_noise_has_hardly_any_signal_and_none_below_zero():
    ratios = [moments(0.0, 16, seed).compute_ratio() for seed in range(50)]
    assert min(ratios) == 0.0
    assert sum(ratios) / len(ratios) < 0.01


def test_the_mean_is_that_of_what_was_added():
    found = Moments()
    for gradient in (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0])):
        found.add(gradient)
    assert found.mean.tolist() == [2.0, 1.0]
