"""Losses of given tokens: numbers worked out by hand, and the gradients of the corrections inside them."""

import math

import pytest
import torch

from practicum import functional as F

LEARNER = torch.tensor(
    [math.log(0.5), math.log(0.3), math.log(0.1), math.log(0.9)], dtype=torch.float64
)
SAMPLER = torch.tensor(
    [math.log(0.25), math.log(0.4), math.log(0.4), math.log(0.85)], dtype=torch.float64
)
ADVANTAGES = torch.tensor([2.0, -1.0, -2.0, 0.5], dtype=torch.float64)
RATIOS = [2.0, 0.75, 0.25, 0.9 / 0.85]


def gradient(loss, *inputs, **parameters):
    logprobs = LEARNER.clone().requires_grad_()
    loss(logprobs, *inputs, **parameters).sum().backward()
    return logprobs.grad


def test_cross_entropy_by_hand():
    weights = torch.tensor([1.0, 0.0, -2.0, 0.5])
    expected = [-math.log(0.5), 0.0, 2 * math.log(0.1), -0.5 * math.log(0.9)]
    assert F.cross_entropy(LEARNER, weights).tolist() == pytest.approx(expected)


def test_importance_sampling_by_hand():
    expected = [
        -ratio * advantage for ratio, advantage in zip(RATIOS, ADVANTAGES.tolist(), strict=True)
    ]
    assert F.importance_sampling(LEARNER, SAMPLER, ADVANTAGES).tolist() == pytest.approx(expected)


def test_ppo_by_hand():
    # ratio 2 with A = 2: clipped at 1.2; ratio 0.75 with A = -1 and 0.25 with A = -2: clipped at 0.8; the last is inside.
    expected = [-2.4, 0.8, 1.6, -RATIOS[3] * 0.5]
    assert F.ppo(LEARNER, SAMPLER, ADVANTAGES).tolist() == pytest.approx(expected)


def test_cispo_by_hand():
    expected = [
        -1.2 * 2 * math.log(0.5),
        0.8 * math.log(0.3),
        1.6 * math.log(0.1),
        -RATIOS[3] * 0.5 * math.log(0.9),
    ]
    assert F.cispo(LEARNER, SAMPLER, ADVANTAGES).tolist() == pytest.approx(expected)


def test_dro_by_hand():
    pairs = zip(LEARNER.tolist(), SAMPLER.tolist(), ADVANTAGES.tolist(), strict=True)
    expected = [-(s * a - 0.05 * (s - q) ** 2) for s, q, a in pairs]
    assert F.dro(LEARNER, SAMPLER, ADVANTAGES, beta=0.1).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.1, 0.4)])
def test_the_gradient_of_ppo_is_the_one_sided_clip(low, high):
    factor = F.CORRECTIONS["ratio_clip"].function(LEARNER - SAMPLER, ADVANTAGES, low, high)
    found = gradient(
        F.ppo, SAMPLER, ADVANTAGES, clip_low_threshold=1 - low, clip_high_threshold=1 + high
    )
    assert torch.allclose(found, -factor * ADVANTAGES)


def test_the_gradient_of_importance_sampling_is_the_ratio():
    factor = F.CORRECTIONS["ratio"].function(LEARNER - SAMPLER, ADVANTAGES)
    assert torch.allclose(
        gradient(F.importance_sampling, SAMPLER, ADVANTAGES), -factor * ADVANTAGES
    )


def test_the_gradient_of_cispo_below_its_upper_threshold_is_the_truncated_ratio():
    factor = F.CORRECTIONS["ratio_truncate"].function(LEARNER - SAMPLER, ADVANTAGES, 1.2)
    found = gradient(F.cispo, SAMPLER, ADVANTAGES, clip_low_threshold=0.0, clip_high_threshold=1.2)
    assert torch.allclose(found, -factor * ADVANTAGES)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo"])
def test_on_policy_all_losses_have_the_policy_gradient(name):
    assert torch.allclose(
        gradient(F.POLICY_LOSSES[name].function, LEARNER, ADVANTAGES), -ADVANTAGES
    )


def test_any_loss_is_a_cross_entropy_with_minus_its_gradient_as_weights():
    weights = -gradient(F.dro, SAMPLER, ADVANTAGES)
    assert torch.allclose(gradient(F.cross_entropy, weights), gradient(F.dro, SAMPLER, ADVANTAGES))


def slow_gspo(learner, sampler, advantages, mask, low, high):
    """Compute GSPO-token as equations 13 to 15 of 2507.18071, token by token: loss and derivative by log S."""
    marked = [index for index, chosen in enumerate(mask) if chosen]
    ratio = math.exp(sum(learner[index] - sampler[index] for index in marked) / len(marked))
    clipped = min(max(ratio, low), high)
    losses, slopes = [], []
    for advantage in advantages:
        inside = ratio * advantage <= clipped * advantage
        losses.append(-min(ratio * advantage, clipped * advantage))
        slopes.append(-ratio * advantage if inside else 0.0)
    return losses, slopes


@pytest.mark.parametrize("mask", [[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
@pytest.mark.parametrize(("low", "high"), [(1 - 3e-4, 1 + 4e-4), (0.5, 3.0)])
def test_gspo_is_that_of_its_equations(mask, low, high):
    marks = torch.tensor(mask)
    losses, slopes = slow_gspo(
        LEARNER.tolist(), SAMPLER.tolist(), ADVANTAGES.tolist(), mask, low, high
    )
    found = F.gspo(LEARNER, SAMPLER, ADVANTAGES, marks, low, high)
    assert found.tolist() == pytest.approx(losses)
    assert gradient(
        F.gspo, SAMPLER, ADVANTAGES, marks, clip_low_threshold=low, clip_high_threshold=high
    ).tolist() == (pytest.approx(slopes))
