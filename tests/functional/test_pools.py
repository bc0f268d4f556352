"""Pools of teachers: their identities with sums of divergences, the gate, and the measures of conflict."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum import functional as F

from .divergence_laws import close, gradient, logp, random_logits

SEEDS = st.integers(0, 10**6)
WEIGHTS = st.lists(st.floats(0.05, 2.0), min_size=2, max_size=4)


def logits_and_members(seed, count):
    """Draw logits of a student and another model, and the log-probabilities of some members."""
    student, other, *members = random_logits(seed, count=count + 2)
    return student, other, [logp(member) for member in members]


def normalised(weights):
    return [weight / sum(weights) for weight in weights]


@given(SEEDS, WEIGHTS)
def test_a_sum_of_reverse_kls_is_that_to_the_geometric_pool_up_to_a_constant(seed, weights):
    student, other, members = logits_and_members(seed, len(weights))
    pool = F.geometric(members, normalised(weights))

    def summed(s):
        return sum(w * F.reverse_kl(s, member) for w, member in zip(weights, members, strict=True))

    def pooled(s):
        return sum(weights) * F.reverse_kl(s, pool)

    close(
        summed(logp(student)) - summed(logp(other)),
        pooled(logp(student)) - pooled(logp(other)),
        rel=1e-9,
    )
    close(gradient(summed, student), gradient(pooled, student), rel=1e-9)


@given(SEEDS, WEIGHTS)
def test_a_sum_of_forward_kls_is_that_to_the_arithmetic_pool_up_to_a_constant(seed, weights):
    student, other, members = logits_and_members(seed, len(weights))
    pool = F.arithmetic(members, normalised(weights))

    def summed(s):
        return sum(w * F.forward_kl(s, member) for w, member in zip(weights, members, strict=True))

    def pooled(s):
        return sum(weights) * F.forward_kl(s, pool)

    close(
        summed(logp(student)) - summed(logp(other)),
        pooled(logp(student)) - pooled(logp(other)),
        rel=1e-9,
    )
    close(gradient(summed, student), gradient(pooled, student), rel=1e-9)


@given(SEEDS, WEIGHTS)
def test_pools_are_distributions_and_the_slow_twin_agrees(seed, weights):
    _, _, members = logits_and_members(seed, len(weights))
    geometric, arithmetic = (
        F.geometric(members, weights),
        F.arithmetic(members, normalised(weights)),
    )
    close(geometric.exp().sum(-1), torch.ones(4, dtype=torch.float64))
    close(arithmetic.exp().sum(-1), torch.ones(4, dtype=torch.float64))
    for row in range(4):
        product = [
            math.prod(m[row, v].exp().item() ** w for w, m in zip(weights, members, strict=True))
            for v in range(6)
        ]
        close(
            geometric[row].exp(),
            torch.tensor([p / sum(product) for p in product], dtype=torch.float64),
            rel=1e-9,
        )
        average = [
            sum(
                w * m[row, v].exp().item()
                for w, m in zip(normalised(weights), members, strict=True)
            )
            for v in range(6)
        ]
        close(arithmetic[row].exp(), torch.tensor(average, dtype=torch.float64), rel=1e-9)


@given(SEEDS)
def test_one_member_or_equal_members_are_their_own_pool(seed):
    _, _, (member, *_) = logits_and_members(seed, 1)
    for members, weights in (([member], [1.0]), ([member, member], [0.3, 0.7])):
        close(F.geometric(members, weights), member, rel=1e-9)
        close(F.arithmetic(members, weights), member, rel=1e-9)


@given(SEEDS, WEIGHTS, st.floats(0.2, 1.7))
def test_the_order_of_members_does_not_matter(seed, weights, gate):
    _, _, members = logits_and_members(seed, len(weights))
    for pool, given_weights in ((F.geometric, weights), (F.arithmetic, normalised(weights))):
        close(
            pool(members[::-1], given_weights[::-1], gate),
            pool(members, given_weights, gate),
            rel=1e-9,
        )


def test_weights_above_one_in_sum_sharpen_the_geometric_pool():
    (member,) = [logp(logits) for logits in random_logits(3, count=1)]
    close(F.geometric([member, member], [1.0, 0.5]), F.temper(member, 1 / 1.5))


def test_an_impossible_token_is_vetoed_by_the_geometric_pool_and_averaged_by_the_arithmetic():
    a = torch.tensor([0.5, 0.5, 0.0]).log()
    b = torch.tensor([0.2, 0.0, 0.8]).log()
    assert F.geometric([a, b], [0.5, 0.5]).exp().tolist() == pytest.approx([1.0, 0.0, 0.0])
    assert F.arithmetic([a, b], [0.25, 0.75]).exp().tolist() == pytest.approx([0.275, 0.125, 0.6])
    c = torch.tensor([0.1, 0.9, 0.0]).log()
    assert F.arithmetic([a, c], [0.5, 0.5])[2].item() == -math.inf


def test_members_that_share_no_token_still_make_a_distribution():
    a, b = torch.tensor([1.0, 0.0]).log(), torch.tensor([0.0, 1.0]).log()
    pool = F.geometric([a, b], [0.6, 0.4])
    assert pool.isfinite().any()
    assert pool.exp().sum().item() == pytest.approx(1.0)
    assert pool.argmax().item() == 0, "the member that weighs more wins"


FLAT, SHARP = torch.full((4,), 0.25).log(), torch.tensor([0.97, 0.01, 0.01, 0.01]).log()


def test_the_gate_leaves_out_who_is_uncertain_token_by_token():
    one = torch.stack([FLAT, SHARP, FLAT])
    other = torch.stack([SHARP, FLAT, FLAT])
    shares = F.member_weights([one, other], [0.5, 1.5], gate=1.0)
    assert shares[0].tolist() == pytest.approx([0.0, 2.0, 0.5]), (
        "where no member is certain, all count"
    )
    assert shares[1].tolist() == pytest.approx([2.0, 0.0, 1.5])
    pool = F.geometric([one, other], [0.25, 0.75], gate=1.0)
    torch.testing.assert_close(pool[:2], torch.stack([SHARP, SHARP]))
    torch.testing.assert_close(
        F.arithmetic([one, other], [0.25, 0.75], gate=1.0)[:2], torch.stack([SHARP, SHARP])
    )


def test_who_is_left_out_cannot_veto():
    certain = torch.tensor([0.0, 0.0, 1.0, 0.0]).log()
    uncertain = torch.tensor([0.5, 0.5, 0.0, 0.0]).log()
    assert F.geometric([uncertain, certain], [0.5, 0.5], gate=0.1)[2].item() == pytest.approx(
        0.0, abs=1e-6
    )
    mixed = F.arithmetic([uncertain, certain], [0.5, 0.5], gate=0.1)
    assert mixed.exp().tolist() == pytest.approx([0.0, 0.0, 1.0, 0.0])
    assert mixed[0].item() == -math.inf


@given(SEEDS, WEIGHTS, st.floats(0.0, 3.0))
def test_the_gate_keeps_the_sum_of_the_weights(seed, weights, gate):
    _, _, members = logits_and_members(seed, len(weights))
    total = sum(F.member_weights(members, weights, gate))
    close(total, torch.full((4,), sum(weights), dtype=torch.float64))
    for free, gated in zip(
        F.member_weights(members, weights), F.member_weights(members, weights, 100.0), strict=True
    ):
        close(gated, free)


@pytest.mark.parametrize(
    "weights", [[], [1.0], [1.0, 1.0, 1.0], [1.0, 0.0], [1.0, -1.0], [1.0, math.nan]]
)
def test_weights_that_make_no_pool_are_refused(weights):
    with pytest.raises(ValueError, match="weight"):
        F.geometric([FLAT, SHARP], weights)


def test_arithmetic_weights_sum_to_one():
    with pytest.raises(ValueError, match="must sum to 1"):
        F.arithmetic([FLAT, SHARP], [1.0, 1.0])


@given(SEEDS, st.integers(2, 4))
def test_conflict_is_symmetric_within_bounds_and_nothing_at_equality(seed, count):
    student, _, members = logits_and_members(seed, count)
    student = logp(student)
    for measure in (F.disagreement, F.top1_conflict, lambda m: F.conflict_cosine(student, m)):
        close(measure(members[::-1]), measure(members), rel=1e-9)
    assert ((F.disagreement(members) > 0) & (F.disagreement(members) <= 1)).all()
    assert (F.conflict_cosine(student, members).abs() <= 1 + 1e-9).all()
    equal = [members[0]] * count
    assert F.disagreement(equal).tolist() == [0.0] * 4
    assert F.top1_conflict(equal).tolist() == [0.0] * 4
    close(F.conflict_cosine(student, equal), torch.ones(4, dtype=torch.float64))


@given(SEEDS)
def test_the_cosine_is_that_of_the_gradients_of_reverse_kl(seed):
    student, _, members = logits_and_members(seed, 2)
    one, other = (gradient(lambda s, t=t: F.reverse_kl(s, t), student) for t in members)
    close(
        F.conflict_cosine(logp(student), members),
        torch.cosine_similarity(one, other, dim=-1),
        rel=1e-9,
    )


def test_members_that_pull_apart_and_a_member_that_pulls_nowhere():
    student = torch.full((2,), 0.5).log()
    left, right = torch.tensor([0.8, 0.2]).log(), torch.tensor([0.2, 0.8]).log()
    assert F.conflict_cosine(student, [left, right]).item() == pytest.approx(-1.0)
    assert F.conflict_cosine(student, [left, student]).item() == 0.0
    assert F.disagreement([left, right]).item() == pytest.approx(0.6)
    assert F.disagreement([left, right, left]).item() == pytest.approx(0.4)
    assert F.top1_conflict([left, right, left]).item() == pytest.approx(2 / 3)


def test_impossible_tokens_and_half_precision_stay_finite():
    a, b = (
        torch.tensor([0.5, 0.5, 0.0]).log().bfloat16(),
        torch.tensor([0.0, 0.5, 0.5]).log().bfloat16(),
    )
    student = torch.tensor([0.2, 0.3, 0.5]).log().bfloat16()
    for value in (
        F.conflict_cosine(student, [a, b]),
        F.disagreement([a, b]),
        F.top1_conflict([a, b]),
    ):
        assert value.isfinite().all()
        assert value.dtype == torch.float32
    assert F.geometric([a, b], [0.5, 0.5]).dtype == torch.float32


def test_conflict_needs_two():
    with pytest.raises(ValueError, match="at least two"):
        F.disagreement([FLAT])
