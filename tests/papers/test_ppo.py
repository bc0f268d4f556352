"""PPO's advantages by enumeration (1506.02438): GAE's estimate with the exact values, and with other values."""

import itertools

import pytest
import torch
from torch import Tensor

from practicum.functional import generalized_advantages

SYMBOLS, LENGTH = 3, 3
ANSWERS = list(itertools.product(range(SYMBOLS), repeat=LENGTH))
STATES = {
    beginning: place
    for place, beginning in enumerate(
        beginning
        for length in range(LENGTH)
        for beginning in itertools.product(range(SYMBOLS), repeat=length)
    )
}
"""The beginnings of answers; a token is chosen at each."""


def make_world() -> tuple[Tensor, Tensor]:
    """Return logits [states, symbols] and a reward for each answer, without symmetries."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(STATES), SYMBOLS, generator=generator, dtype=torch.float64)
    return logits, torch.rand(len(ANSWERS), generator=generator, dtype=torch.float64)


def compute_values(logits: Tensor, rewards: Tensor) -> Tensor:
    """Return the expected reward after each beginning."""
    values = torch.zeros(len(STATES), dtype=torch.float64)
    for beginning, state in STATES.items():
        for answer, reward in zip(ANSWERS, rewards, strict=True):
            if answer[: len(beginning)] == beginning:
                rest = compute_logprobs(logits, answer)[len(beginning) :]
                values[state] += rest.sum().exp().detach() * reward
    return values


def compute_logprobs(logits: Tensor, answer: tuple[int, ...]) -> Tensor:
    """Return the log-probability of each token of an answer."""
    table = torch.log_softmax(logits, -1)
    return torch.stack([table[STATES[answer[:place]], answer[place]] for place in range(LENGTH)])


def judge(answer: tuple[int, ...], reward: Tensor, values: Tensor, gae_lambda: float) -> Tensor:
    """Return the advantage of each token; the last token receives the reward."""
    rewards = torch.zeros(LENGTH, dtype=torch.float64)
    rewards[-1] = reward
    states = [STATES[answer[:place]] for place in range(LENGTH)]
    return generalized_advantages(rewards, values[states], 1.0, gae_lambda)


def compute_expected_gradient(
    logits: Tensor, rewards: Tensor, values: Tensor, lam: float
) -> Tensor:
    """Return the expectation over all answers of the policy gradient with GAE's advantages."""
    leaf = logits.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for answer, reward in zip(ANSWERS, rewards, strict=True):
        logprobs = compute_logprobs(leaf, answer)
        probability = logprobs.sum().exp().detach()
        total = total + probability * (judge(answer, reward, values, lam) * logprobs).sum()
    return torch.autograd.grad(total, leaf)[0]


def compute_exact_gradient(logits: Tensor, rewards: Tensor) -> Tensor:
    """Return the gradient of the expected reward."""
    leaf = logits.clone().requires_grad_()
    total = torch.stack(
        [
            compute_logprobs(leaf, answer).sum().exp() * reward
            for answer, reward in zip(ANSWERS, rewards, strict=True)
        ]
    ).sum()
    return torch.autograd.grad(total, leaf)[0]


@pytest.mark.parametrize("lam", [0.0, 0.7, 0.95, 1.0])
def test_with_the_exact_values_every_lambda_is_unbiased(lam: float) -> None:
    logits, rewards = make_world()
    gradient = compute_expected_gradient(logits, rewards, compute_values(logits, rewards), lam)
    torch.testing.assert_close(
        gradient, compute_exact_gradient(logits, rewards), rtol=1e-9, atol=1e-12
    )


def test_with_wrong_values_lambda_1_alone_is_unbiased() -> None:
    logits, rewards = make_world()
    wrong = compute_values(logits, rewards) + torch.linspace(-0.5, 0.8, len(STATES)).double()
    exact = compute_exact_gradient(logits, rewards)
    unbiased = compute_expected_gradient(logits, rewards, wrong, 1.0)
    torch.testing.assert_close(unbiased, exact, rtol=1e-9, atol=1e-12)
    assert (compute_expected_gradient(logits, rewards, wrong, 0.7) - exact).abs().max() > 1e-3


def test_lambda_1_is_the_reward_minus_the_value() -> None:
    logits, rewards = make_world()
    values = compute_values(logits, rewards) + 0.3
    for answer, reward in zip(ANSWERS, rewards, strict=True):
        states = [STATES[answer[:place]] for place in range(LENGTH)]
        advantages = judge(answer, reward, values, 1.0)
        torch.testing.assert_close(advantages, reward - values[states], rtol=1e-12, atol=1e-12)


def test_the_exact_values_lower_the_variance() -> None:
    """Check the purpose of a critic: the same expectation from advantages with less variance."""
    logits, rewards = make_world()
    values = compute_values(logits, rewards)

    def spread(values: Tensor, lam: float) -> float:
        weights = torch.stack([compute_logprobs(logits, answer).sum().exp() for answer in ANSWERS])
        rows = torch.stack(
            [
                judge(answer, reward, values, lam)
                for answer, reward in zip(ANSWERS, rewards, strict=True)
            ]
        )
        return float((weights[:, None] * rows.square()).sum())

    assert spread(values, 0.7) < spread(values, 1.0) < spread(torch.zeros_like(values), 1.0)
