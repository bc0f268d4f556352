"""Named losses that must be exact: each as its paper writes it, on random float64 tensors or in exact expectation."""

import itertools
from statistics import mean, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum import functional as F
from practicum.functional.samples import SAMPLE_WEIGHTS, SampleStatistics
from practicum.functional.weights import soft_or_score

from .worlds import (
    close,
    coefficients,
    expected_gradient,
    formula_gradient,
    gradient,
    policies,
    random_batch,
)

SEEDS = pytest.mark.parametrize("seed", range(3))


def normalized_rewards(batch):
    """Return GRPO's advantage of each token's answer."""
    groups = [row.prompt.id for row in batch.answers]
    found = []
    for row in batch.answers:
        rewards = [
            other.reward
            for other, group in zip(batch.answers, groups, strict=True)
            if group == row.prompt.id
        ]
        found.append((row.reward - mean(rewards)) / (stdev(rewards) + 1e-6))
    return torch.tensor(found, dtype=torch.float64)[batch.rows]


def lengths(batch):
    """Return the length of each token's answer."""
    return torch.bincount(batch.rows)[batch.rows]


def clipped(value, advantage, low=0.2, high=0.2):
    """Return PPO's loss."""
    return -torch.minimum(value * advantage, value.clamp(1 - low, 1 + high) * advantage)


@SEEDS
def test_mopd_is_a_masked_ratio_times_teacher_and_outcome_advantage(seed):
    """2601.02780, section 4.4."""
    batch = random_batch(seed)

    def formula(here):
        own, drawn = here.of(here.S), here.sampler
        w = (own - drawn).exp().detach()
        w = torch.where((w >= 0.7) & (w <= 1.5), w, 0.0)
        advantage = (here.of(here.T) - own).detach() + 0.3 * normalized_rewards(here)
        return -(w * advantage * own / lengths(here)).sum() / len(here.answers)

    choice = {
        "signal": "sampled",
        "correction": "ratio_mask(0.7, 1.5)",
        "reward": "add_advantage(0.3)",
        "aggregate": "seq_mean_token_mean",
    }
    close(gradient(choice, batch), formula_gradient(formula, batch))


@pytest.mark.parametrize("signal", ["sampled", "full"])
def test_g_opd_with_a_reward_scale_of_1_is_plain_distillation_bit_for_bit(signal):
    """2602.12125, section 3.2: lambda 1 drops the reference."""
    batch = random_batch()
    plain = gradient({"signal": signal}, batch)
    assert torch.equal(
        gradient({"signal": signal, "target": "log_linear(teacher=1, reference=0)"}, batch), plain
    )
    assert plain.abs().max() > 0


@SEEDS
@pytest.mark.parametrize("scale", [0.5, 1.25])
def test_g_opd_is_the_scaled_reward_minus_the_leash(seed, scale):
    """2602.12125: A = lambda (log T - log R) - (log S - log R), and in full the KL to R^(1 - lambda) T^lambda / Z."""
    batch = random_batch(seed)
    target = f"log_linear(teacher={scale}, reference={1 - scale})"

    def sampled(here):
        own, teacher, reference = here.of(here.S), here.of(here.T), here.of(here.R)
        advantage = scale * (teacher - reference) - (own - reference)
        return -(advantage.detach() * own).mean()

    def full(here):
        pool = torch.log_softmax(scale * here.T + (1 - scale) * here.R, -1)
        return (here.S.exp() * (here.S - pool)).sum(-1).mean()

    close(
        gradient({"signal": "sampled", "target": target}, batch), formula_gradient(sampled, batch)
    )
    close(gradient({"signal": "full", "target": target}, batch), formula_gradient(full, batch))


def test_the_two_signals_of_g_opd_agree_in_expectation():
    world, target = policies(), "log_linear(teacher=1.25, reference=-0.25)"
    sampled, full = (
        expected_gradient({"signal": signal, "target": target}, world)
        for signal in ("sampled", "full")
    )
    close(sampled, full)


@given(st.floats(0.01, 0.9), st.floats(1e-6, 1.0))
def test_luffys_weight_is_largest_where_p_is_gamma(gamma, p):
    """2504.14945: f(p) = p / (p + gamma), so the weight on log p is p gamma / (p + gamma)^2, at most 1/4."""

    def weight(probability):
        logprob = torch.tensor([probability], dtype=torch.float64).log()
        return F.CORRECTIONS["shaping"].function(logprob, torch.ones(1), gamma=gamma).item()

    variable = torch.tensor(p, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(variable / (variable + gamma), variable)
    assert weight(p) == pytest.approx(p * slope.item(), rel=1e-9)
    assert weight(gamma) == pytest.approx(0.25, rel=1e-12)
    assert weight(p) <= 0.25 + 1e-12


def test_luffys_loss_is_the_shaped_probability_without_a_ratio():
    batch = random_batch()

    def formula(here):
        p = here.of(here.S).exp()
        return -(normalized_rewards(here) * p / (p + 0.1)).mean()

    choice = {"signal": "score(group_normalized)", "correction": "shaping(0.1)"}
    close(gradient(choice, batch), formula_gradient(formula, batch))


@SEEDS
def test_sdpo_is_half_jsd_over_a_hundred_candidates_and_the_rest(seed):
    """2601.20802: the student's top 100 and a bucket for the tail, each token by its ratio up to 2."""
    batch = random_batch(seed, vocabulary=130)

    def formula(here):
        total = torch.zeros((), dtype=torch.float64)
        for place, (own, teacher) in enumerate(zip(here.S, here.T, strict=True)):
            best = own.argsort(descending=True)[:100]
            s, t = (
                torch.cat([row[best].exp(), (1 - row[best].exp().sum())[None]])
                for row in (own, teacher)
            )
            m = (s + t) / 2
            value = 0.5 * (t * (t / m).log()).sum() + 0.5 * (s * (s / m).log()).sum()
            ratio = (own[here.ids[place]] - here.sampler[place]).exp().detach()
            total = total + ratio.clamp(max=2) * value
        return total / len(here.ids)

    choice = {
        "signal": "topk(100, student, bucket)",
        "divergence": "jsd(0.5)",
        "correction": "ratio_truncate(2)",
    }
    close(gradient(choice, batch), formula_gradient(formula, batch))


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-30, 30)), min_size=1, max_size=8),
    st.floats(0, 1),
    st.floats(0, 0.99),
)
def test_rlsd_never_flips_the_sign_of_the_reward(tokens, strength, bound):
    """2604.03128: A ((1 - lambda) + lambda clip((T / S)^sign A, 1 - eps, 1 + eps)) stays within lambda eps of A."""
    reward, gap = torch.tensor(tokens, dtype=torch.float64).unbind(-1)
    led = F.modulate(reward, gap, strength, bound)
    assert (led.sign() == reward.sign()).all()
    low, high = (1 - strength * bound) * reward.abs(), (1 + strength * bound) * reward.abs()
    assert ((led.abs() >= low - 1e-12) & (led.abs() <= high + 1e-12)).all()


@SEEDS
def test_rlsd_is_grpo_with_the_teacher_in_its_size(seed):
    batch = random_batch(seed)

    def formula(here):
        advantage, own = normalized_rewards(here), here.of(here.S)
        leaning = (here.of(here.T) - own.detach()).mul(advantage.sign()).exp().clamp(0.8, 1.2)
        return clipped((own - here.sampler).exp(), advantage * (0.6 + 0.4 * leaning)).mean()

    choice = {
        "signal": "sampled",
        "reward": "modulate(0.4, 0.2)",
        "correction": "ratio_clip(0.2, 0.2)",
    }
    close(gradient(choice, batch), formula_gradient(formula, batch))


def test_rlad_with_alpha_1_is_grpo_bit_for_bit():
    """2602.22495: the teacher leaves the ratio."""
    batch = random_batch()
    anchored = {
        "signal": "sampled",
        "reward": "modulate(0)",
        "correction": "ratio_anchor(1, 0.2, 0.2)",
    }
    grpo = gradient(
        {"signal": "score(group_normalized)", "correction": "ratio_clip(0.2, 0.2)"}, batch
    )
    assert grpo.abs().max() > 0
    assert torch.equal(gradient(anchored, batch), grpo)


@SEEDS
@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_rlad_clips_the_mixed_ratio_and_with_alpha_0_that_to_the_teacher(seed, alpha):
    batch = random_batch(seed)

    def formula(here):
        own = here.of(here.S)
        ratio = (own - here.sampler).exp() ** alpha * (own - here.of(here.T)).exp() ** (1 - alpha)
        return clipped(ratio, normalized_rewards(here)).mean()

    choice = {
        "signal": "sampled",
        "reward": "modulate(0)",
        "correction": f"ratio_anchor({alpha}, 0.2, 0.2)",
    }
    close(gradient(choice, batch), formula_gradient(formula, batch))


def test_the_k2_part_of_kdrl_has_the_gradient_of_reverse_kl():
    """2506.02208, in exact expectation over answers."""
    world = policies()
    k2 = expected_gradient({"signal": "sampled", "estimator": "k2_surrogate"}, world)
    close(k2, expected_gradient({"signal": "full", "divergence": "reverse_kl"}, world))


@given(st.integers(0, 10**6), st.integers(1, 30))
def test_tips_score_is_h_plus_d_minus_their_product_in_0_to_1(seed, count):
    """2604.14084, with both in shares of their largest."""
    generator = torch.Generator().manual_seed(seed)
    entropy, divergence = torch.rand(2, count, generator=generator, dtype=torch.float64) * 5
    score = soft_or_score(
        F.TokenStatistics(
            loss_mask=torch.ones(count), student_entropy=entropy, divergence=divergence
        )
    )
    h, d = entropy / entropy.max(), divergence / divergence.max()
    torch.testing.assert_close(score, 1 - (1 - h) * (1 - d))
    assert ((score >= 0) & (score <= 1)).all()
    assert (score >= torch.maximum(h, d) - 1e-12).all()


@given(
    st.lists(st.tuples(st.booleans(), st.floats(0, 8)), min_size=1, max_size=8),
    st.sampled_from(["student", "teacher"]),
    st.floats(0.2, 5),
)
def test_scopes_weights_sum_to_1_over_the_answers_they_are_about(answers, of, temperature):
    """2604.10688: PPL_S^(1 / tau) for right answers, PPL_T^(-1 / tau) for wrong ones."""
    kept, nll = zip(*answers, strict=True)
    statistics = SampleStatistics(kept=kept, student_nll=nll, teacher_nll=nll)
    weights = SAMPLE_WEIGHTS["ppl_softmax"].function(statistics, of, temperature)
    power = (1 if of == "student" else -1) / temperature
    shares = [
        torch.tensor(value, dtype=torch.float64).exp().item() ** power * keep
        for keep, value in answers
    ]
    total = sum(shares)
    assert weights == pytest.approx([share / total if total else 0.0 for share in shares])
    assert sum(weights) == pytest.approx(float(any(kept)))


def test_scopes_loss_routes_by_outcome_and_weighs_within_each_group():
    batch = random_batch()

    def formula(here):
        total = torch.zeros((), dtype=torch.float64)
        own, teacher = here.of(here.S), here.of(here.T)
        kl = (here.S.exp() * (here.S - here.T)).sum(-1)
        for group in "abc":
            numbers = [n for n, row in enumerate(here.answers) if row.prompt.id == group]
            for right, logprob, sign, value in ((True, own, 1, -own), (False, teacher, -1, kl)):
                chosen = [n for n in numbers if (here.answers[n].reward == 1) == right]
                ppl = [(-logprob[here.rows == n].mean()).exp().detach() ** sign for n in chosen]
                for n, share in zip(chosen, ppl, strict=True):
                    total = total + share / sum(ppl) * value[here.rows == n].sum()
        return total / len(here.ids)

    choice = {
        "losses": [
            {
                "signal": "text",
                "divergence": "ce",
                "filter": "correct",
                "samples": "ppl_softmax(student)",
            },
            {"divergence": "reverse_kl", "filter": "incorrect", "samples": "ppl_softmax(teacher)"},
        ]
    }
    close(gradient(choice, batch), formula_gradient(formula, batch))


@given(st.lists(st.booleans(), min_size=1, max_size=10), st.floats(0.5, 3), st.floats(0.5, 3))
def test_paced_leaves_out_what_is_always_or_never_solved(right, a, b):
    """2603.11178: p^a (1 - p)^b, p the share of right answers."""
    statistics = SampleStatistics(
        kept=[True] * len(right), rewards=[float(value) for value in right]
    )
    p = mean(right)
    weights = SAMPLE_WEIGHTS["pass_rate"].function(statistics, a, b)
    assert weights == pytest.approx([p**a * (1 - p) ** b] * len(right))
    assert all(weights) == (0 < p < 1)


def test_paced_at_the_objective_weighs_each_prompt_by_its_pass_rate():
    batch = random_batch()
    plain, paced = gradient({}, batch), gradient({"samples": "pass_rate(1, 1)"}, batch)
    rates = {"a": 1 / 3, "b": 1.0, "c": 1 / 2}
    for place, number in enumerate(batch.rows.tolist()):
        p = rates[batch.answers[number].prompt.id]
        torch.testing.assert_close(paced[place], p * (1 - p) * plain[place], rtol=1e-6, atol=1e-12)


@SEEDS
def test_acceptance_is_1_minus_tvd_of_a_simulated_speculative_decoder(seed):
    """2310.08461: drafts of two tokens, every draft and every outcome of its verification enumerated (2211.17192)."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = 4
    tables = 1.5 * torch.randn(
        2, 1 + vocabulary, vocabulary, generator=generator, dtype=torch.float64
    )
    draft, target = tables.softmax(-1)  # row 0: the first token; row 1 + v: the token after v
    accepted, first_written = (
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(vocabulary, dtype=torch.float64),
    )
    for one, two in itertools.product(range(vocabulary), repeat=2):
        proposed = draft[0, one] * draft[1 + one, two]
        keeps = [
            min(1.0, target[0, one] / draft[0, one]),
            min(1.0, target[1 + one, two] / draft[1 + one, two]),
        ]
        accepted += proposed * torch.tensor([keeps[0], keeps[0] * keeps[1]], dtype=torch.float64)
        rest = (target[0] - draft[0]).clamp(min=0)
        first_written[one] += proposed * keeps[0]
        first_written += proposed * (1 - keeps[0]) * rest / rest.sum()
    torch.testing.assert_close(
        first_written, target[0]
    )  # the decoder writes the target's distribution
    acceptance = 1 - F.tvd(draft.log(), target.log())
    torch.testing.assert_close(acceptance, torch.minimum(draft, target).sum(-1))
    torch.testing.assert_close(accepted[0], acceptance[0])
    kept = torch.minimum(draft[0], target[0])
    torch.testing.assert_close(accepted[1], (kept * acceptance[1:]).sum())
    expected = sum(
        draft[0, token] * coefficients_of_trust(draft[0], target[0], token).item()
        for token in range(vocabulary)
    )
    torch.testing.assert_close(expected, acceptance[0])


def coefficients_of_trust(draft, target, token):
    """Return the probability of acceptance that weights `trust` give a drawn token."""
    logprobs = [row[token].log()[None] for row in (draft, target)]
    statistics = F.TokenStatistics(
        loss_mask=torch.ones(1), logprobs=logprobs[0], teacher_logprobs=logprobs[1]
    )
    return F.WEIGHTS["trust"].function(statistics)


def test_tvd_falls_as_acceptance_rises():
    """Check that the gradient of the acceptance is minus the gradient of the tvd objective."""
    batch = random_batch()

    def acceptance(here):
        return -torch.minimum(here.S.exp(), here.T.exp()).sum(-1).mean()

    close(gradient({"divergence": "tvd"}, batch), formula_gradient(acceptance, batch))


def test_vopds_baseline_changes_no_mean():
    """2605.07865: the mean of (A - V) grad log S equals the mean of A grad log S, with V = -KL(S || T) at the state."""
    world = policies()
    plain, based = (
        expected_gradient({"signal": "full", "estimator": f"score_function(0, {baseline})"}, world)
        for baseline in ("none", "kl")
    )
    close(based, plain)


def test_vopds_advantage_is_the_log_ratio_plus_the_kl_of_the_state():
    batch = random_batch()
    kl = (batch.S.exp() * (batch.S - batch.T)).sum(-1)
    expected = -(batch.of(batch.T) - batch.of(batch.S) + kl) / len(batch.ids)
    found = coefficients({"signal": "full", "estimator": "score_function(0, kl)"}, batch)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)


@SEEDS
def test_vopds_cheap_baseline_is_the_kl_between_the_renormalised_top_tokens(seed):
    """`vopd-topk.yaml` of the released code: the log-ratio is whole, only the baseline is restricted."""
    batch = random_batch(seed)
    ids = batch.S.topk(3, dim=-1).indices
    student, teacher = (torch.log_softmax(row.gather(-1, ids), -1) for row in (batch.S, batch.T))
    kl = (student.exp() * (student - teacher)).sum(-1)
    expected = -(batch.of(batch.T) - batch.of(batch.S) + kl) / len(batch.ids)
    choice = {"signal": "topk(3, tail=renorm)", "estimator": "score_function(0, kl)"}
    torch.testing.assert_close(coefficients(choice, batch), expected, rtol=1e-6, atol=1e-12)
