"""One sampled token, by enumeration of every token; one sampled sequence, by enumeration of every sequence."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum import functional as F
from practicum.functional.laws import ADVANTAGE_LAWS, CORRECTION_LAWS

from .divergence_laws import close, gradient, logp, random_logits

VOCABULARY, LENGTH = 3, 4
PREFIXES = [p for n in range(LENGTH) for p in itertools.product(range(VOCABULARY), repeat=n)]
ROW = {prefix: row for row, prefix in enumerate(PREFIXES)}
SEQUENCES = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
STATES = torch.tensor([[ROW[y[:t]] for t in range(LENGTH)] for y in SEQUENCES])
TOKENS = torch.tensor(SEQUENCES)


@given(st.integers(0, 10**6))
def test_values_of_k1_k2_k3(seed):
    student, teacher = (logp(logits) for logits in random_logits(seed))
    mean = {k.__name__: (student.exp() * k(student, teacher)).sum(-1) for k in (F.k1, F.k2, F.k3)}
    torch.testing.assert_close(mean["k1"], F.reverse_kl(student, teacher))
    torch.testing.assert_close(mean["k3"], F.reverse_kl(student, teacher))
    assert (F.k2(student, teacher) >= 0).all()
    assert (F.k3(student, teacher) >= 0).all()


@given(st.integers(0, 10**6))
def test_gradients_of_k1_k2_k3(seed):
    """The promise of each docstring, as loss and as detached reward."""
    student, teacher = random_logits(seed)
    p, t = logp(student).exp(), logp(teacher)
    reverse = gradient(lambda s: F.reverse_kl(s, t), student)
    forward = gradient(lambda s: F.forward_kl(s, t), student)

    def as_loss(k):
        return gradient(lambda s: (p * k(s, t)).sum(-1), student)

    def as_reward(k):
        return gradient(lambda s: (p * k(logp(student), t) * s).sum(-1), student)

    assert as_loss(F.k1).abs().max() < 1e-12
    close(as_loss(F.k2), reverse)
    close(as_loss(F.k3), forward)
    close(as_reward(F.k1), reverse)
    close(as_reward(F.k3), reverse - forward, rel=1e-11)


@given(st.integers(0, 10**6))
def test_any_baseline_of_the_state_keeps_the_mean(seed):
    student, teacher = random_logits(seed)
    s, t = logp(student), logp(teacher)
    value = -F.reverse_kl(s, t)
    plain = gradient(lambda x: -(s.exp() * (t - s) * x).sum(-1), student)
    close(gradient(lambda x: -(s.exp() * (t - s - value[:, None]) * x).sum(-1), student), plain)


def tables(seed, count=2):
    return random_logits(
        seed, positions=len(PREFIXES), vocabulary=VOCABULARY, count=count, scale=1.0
    )


def per_token(table):
    """Return the log-probability of every token of every sequence, [sequences, LENGTH]."""
    return logp(table)[STATES, TOKENS]


def gradient_of(loss, table):
    table = table.clone().requires_grad_()
    return torch.autograd.grad(loss(table), table)[0]


def sequence_gradient(student, teacher):
    """Return the gradient of KL between the distributions of whole sequences."""

    def loss(table):
        log_student, log_teacher = per_token(table).sum(-1), per_token(teacher).sum(-1)
        return (log_student.exp() * (log_student - log_teacher)).sum()

    return gradient_of(loss, student)


def visited_gradient(student, teacher):
    """Return the gradient of the full-vocabulary KL at the states the student visits, the visits held fixed."""
    visits = per_token(student).sum(-1).exp()

    def loss(table):
        return (visits[:, None] * F.reverse_kl(logp(table), logp(teacher))[STATES]).sum()

    return gradient_of(loss, student)


def score_gradient(student, sampler, returns):
    """Return -E_sampler[sum_t return_t grad log S_t]."""
    weight = per_token(sampler).sum(-1).exp()[:, None] * returns
    return gradient_of(lambda table: -(weight * per_token(table)).sum(), student)


def returns_of(student, teacher, gamma, baseline=None):
    advantage = per_token(teacher) - per_token(student)
    rows = [F.score_function_returns(row, gamma) for row in advantage]
    return torch.stack(rows) if baseline is None else torch.stack(rows) - baseline


@pytest.mark.parametrize("seed", [0, 1])
def test_no_discounting_is_the_gradient_at_the_visited_states(seed):
    student, teacher = tables(seed)
    close(
        score_gradient(student, student, returns_of(student, teacher, 0.0)),
        visited_gradient(student, teacher),
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_full_returns_are_the_sequence_gradient(seed):
    student, teacher = tables(seed)
    exact = sequence_gradient(student, teacher)
    returns = returns_of(student, teacher, 1.0)
    close(score_gradient(student, student, returns), exact)
    value = -F.reverse_kl(logp(student), logp(teacher))[STATES]
    close(score_gradient(student, student, returns - value), exact)
    # MiniLLM's decomposition: the exact step, and the returns of the *later* steps only.
    later = returns - returns_of(student, teacher, 0.0)
    close(visited_gradient(student, teacher) + score_gradient(student, student, later), exact)
    # Without them the gradient differs, so the two tests above distinguish the two.
    assert (visited_gradient(student, teacher) - exact).norm() / exact.norm() > 0.1


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_prefix_ratio_is_exact_for_a_stale_sampler(gamma):
    student, teacher, noise = tables(2, count=3)
    sampler = student + 0.4 * noise
    log_ratio = per_token(student) - per_token(sampler)
    returns = returns_of(student, teacher, gamma)
    factors = torch.stack(
        [
            F.CORRECTIONS["prefix_ratio"].function(*pair)
            for pair in zip(log_ratio, returns, strict=True)
        ]
    )
    token = torch.stack(
        [F.CORRECTIONS["ratio"].function(*pair) for pair in zip(log_ratio, returns, strict=True)]
    )
    exact = visited_gradient(student, teacher)
    if gamma == 0.0:
        close(score_gradient(student, sampler, factors * returns), exact)
        # The pathwise value at a state is weighted by the tokens before it: the prefix without the token itself.
        weight = per_token(sampler).sum(-1).exp()[:, None] * factors / token
        value = gradient_of(
            lambda x: (weight * F.reverse_kl(logp(x), logp(teacher))[STATES]).sum(), student
        )
        close(value, exact)
        off = score_gradient(student, sampler, token * returns) - exact
        assert off.norm() / exact.norm() > 0.05
    else:
        # Returns include later tokens, so each later advantage needs the ratios up to itself.
        advantage = returns_of(student, teacher, 0.0)
        weighted = torch.stack([F.reward_to_go(row, 1.0) for row in factors * advantage])
        close(score_gradient(student, sampler, weighted), sequence_gradient(student, teacher))


def test_corrections_by_hand():
    log_ratio = torch.tensor([0.0, 0.5, -0.5, 0.5, -0.5, 1.0])
    advantage = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 1.0])
    up, down, far = math.exp(0.5), math.exp(-0.5), math.exp(1.0)
    expected = {
        "none": [1.0] * 6,
        "ratio": [1.0, up, down, up, down, far],
        "ratio_clip": [1.0, 0.0, down, up, 0.0, 0.0],
        "ratio_mask": [1.0, up, down, up, down, 0.0],
        "ratio_truncate": [1.0, up, down, up, down, 2.0],
        "prefix_ratio": [1.0, up, 1.0, up, 1.0, far],
        "ratio_anchor": [1.0, 0.0, down, up, 0.0, 0.0],
        "shaping": [p * 0.1 / (p + 0.1) ** 2 for p in (1.0, up, down, up, down, far)],
    }
    assert set(expected) == set(F.CORRECTIONS)
    for name, values in expected.items():
        assert F.CORRECTIONS[name].function(log_ratio, advantage).tolist() == pytest.approx(values)
    tight = F.CORRECTIONS["ratio_mask"].function(log_ratio, advantage, low=0.9, high=1.1)
    assert tight.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("correction", list(F.CORRECTIONS.values()), ids=lambda entry: entry.name)
@pytest.mark.parametrize("law", CORRECTION_LAWS, ids=lambda law: law.__name__)
@given(st.integers(0, 10**6), st.integers(0, 9))
def test_laws_of_corrections(correction, law, seed, length):
    law(correction, correction.defaults, seed, length)


@pytest.mark.parametrize("advantage", list(F.ADVANTAGES.values()), ids=lambda entry: entry.name)
@pytest.mark.parametrize("law", ADVANTAGE_LAWS, ids=lambda law: law.__name__)
@given(st.integers(0, 10**6), st.integers(0, 9))
def test_laws_of_advantages(advantage, law, seed, length):
    law(advantage, {}, seed, length)


@given(st.integers(0, 10**6), st.integers(0, 9), st.sampled_from([0.0, 0.3, 0.9, 1.0]))
def test_reward_to_go_and_its_twin(seed, length, gamma):
    values = torch.randn(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    twin = [
        sum(gamma ** (u - t) * values[u].item() for u in range(t, length)) for t in range(length)
    ]
    assert F.reward_to_go(values, gamma).tolist() == pytest.approx(twin)
    if gamma == 0.0:
        assert torch.equal(F.score_function_returns(values, gamma), values)


def test_returns_are_detached_and_take_a_baseline():
    advantage = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    returns = F.score_function_returns(advantage, 0.5, advantage)
    assert not returns.requires_grad
    assert returns.tolist() == [2.0, 2.0, 0.0]
    assert F.score_function_returns(advantage, 1.0, 1.0).tolist() == [6.0, 5.0, 3.0]


@pytest.mark.parametrize("gamma", [-0.1, 1.1])
def test_gamma_is_checked(gamma):
    with pytest.raises(ValueError, match=rf"gamma must be in \[0, 1\], got {gamma}"):
        F.reward_to_go(torch.zeros(2), gamma)


def test_advantages():
    assert F.group_centre([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]
    assert F.group_centre([3.0]) == [0.0]
    assert F.group_centre([]) == []
    advantage = torch.tensor([-3.0, 0.5, 3.0], requires_grad=True)
    assert F.add_reward(advantage, 2.0, 0.5).tolist() == [-2.0, 1.5, 4.0]
    assert F.clip(advantage, -1.0, 2.0).tolist() == [-1.0, 0.5, 2.0]
    assert not F.clip(advantage, -1.0, 2.0).requires_grad
    assert not F.add_reward(advantage, 2.0, 0.5).requires_grad
    with pytest.raises(ValueError, match=r"clip needs low <= high, got low 2\.0 and high 1\.0"):
        F.clip(advantage, 2.0, 1.0)


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.9, 0.7), (1.0, 1.0), (0.8, 0.0), (1.0, 0.95)])
def test_generalized_advantages_are_the_discounted_sum_of_differences(gamma, gae_lambda):
    """Check 1506.02438, equation 16, in two loops; with lambda 1 the return minus the value."""
    generator = torch.Generator().manual_seed(4)
    rewards, values = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    later = [*values[1:].tolist(), 0.0]
    differences = [
        rewards[t].item() + gamma * later[t] - values[t].item() for t in range(len(values))
    ]
    expected = [
        sum((gamma * gae_lambda) ** (s - t) * differences[s] for s in range(t, len(values)))
        for t in range(len(values))
    ]
    found = F.generalized_advantages(rewards, values, gamma, gae_lambda)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    if gae_lambda == 1.0:
        assert torch.allclose(found, F.reward_to_go(rewards, gamma) - values)
