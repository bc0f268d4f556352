"""Objectives that must be equal: pools, estimators in exact expectation, targets, rewards, silence and splits."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from backends.tiny import hidden_signal, rollout, rollouts, tiny
from hypothesis import given
from hypothesis import strategies as st
from toy import in_check

from practicum.backends.local.trainer import LocalTrainer, TrainerLimits
from practicum.objective import Objective
from practicum.training.loop import split_data
from practicum.types import Datum, PooledSignal, TeacherSignal

from .worlds import (
    SYMBOLS,
    RolloutBatch,
    answer,
    close,
    coefficients,
    expected_formula,
    expected_gradient,
    formula_gradient,
    gradient,
    loss,
    policies,
    random_batch,
    sequence_gradient,
)

# Pools, through the trainer.


def trained(data, choice, limits=None):
    """Return the gradient of an objective in every parameter of a tiny student, as one vector."""
    student = tiny()
    student.model.requires_grad_(True)
    LocalTrainer(student, limits).forward_backward(data, Objective.model_validate(choice), 0)
    found = [
        torch.zeros_like(value) if value.grad is None else value.grad
        for _, value in sorted(student.trainable_parameters().items())
    ]
    return torch.cat([value.flatten() for value in found])


def near(found, expected, relative=1e-5):
    """Assert equality up to the rounding of float32."""
    assert expected.norm() > 0
    assert (found - expected).norm() <= relative * expected.norm()


def pooled(kind, weights):
    """Return the rollouts of the backend's tests, each read by two teachers."""
    teachers = (tiny(seed=1), tiny(seed=2))
    return [
        Datum(
            item,
            TeacherSignal(
                pool=PooledSignal(
                    kind, weights, tuple(hidden_signal(one, item) for one in teachers)
                )
            ),
        )
        for item in rollouts()
    ]


@pytest.mark.parametrize("limits", [None, TrainerLimits(1, 2)], ids=["whole", "cut"])
@pytest.mark.parametrize(
    ("divergence", "kind"), [("reverse_kl", "geometric"), ("forward_kl", "arithmetic")]
)
def test_a_sum_of_kls_is_the_kl_to_a_pool_times_the_sum_of_the_weights(divergence, kind, limits):
    weights = (0.9, 0.4)
    total = sum(weights)
    summed = trained(pooled("sum", weights), {"divergence": divergence}, limits)
    one_target = trained(
        pooled(kind, tuple(weight / total for weight in weights)),
        {"divergence": divergence},
        limits,
    )
    near(summed, total * one_target)


def test_the_other_pool_is_another_target():
    """Check that the identity does not hold because all pools are equal."""
    shares = (0.7, 0.3)
    for divergence, kind in (("reverse_kl", "arithmetic"), ("forward_kl", "geometric")):
        summed, other = (
            trained(pooled(how, shares), {"divergence": divergence}) for how in ("sum", kind)
        )
        assert (summed - other).norm() > 0.01 * summed.norm()


def test_a_sum_is_each_teachers_own_loss_by_its_weight():
    choice = {"divergence": "jsd(0.3)", "aggregate": "seq_mean_token_mean"}
    alone = [
        trained([Datum(item, hidden_signal(teacher, item)) for item in rollouts()], choice)
        for teacher in (tiny(seed=1), tiny(seed=2))
    ]
    near(trained(pooled("sum", (0.9, 0.4)), choice), 0.9 * alone[0] + 0.4 * alone[1])


@pytest.mark.parametrize("kind", ["geometric", "arithmetic", "sum"])
def test_a_pool_of_one_teacher_is_that_teacher(kind):
    alone = [Datum(item, hidden_signal(tiny(seed=1), item)) for item in rollouts()]
    pool = [
        Datum(datum.rollout, TeacherSignal(pool=PooledSignal(kind, (1.0,), (datum.signal,))))
        for datum in alone
    ]
    for choice in ({}, {"signal": "sampled"}, {"divergence": "jsd(0.3)"}):
        near(trained(pool, choice), trained(alone, choice))


# Estimators, in exact expectation over answers.


@pytest.mark.parametrize(
    "divergence", ["reverse_kl", "forward_kl", "jsd(0.3)", "skew_forward_kl(0.1)", "alpha(0.5)"]
)
def test_score_function_at_gamma_0_is_the_divergence_of_every_state(divergence):
    world = policies()
    choice = {"signal": "sampled", "divergence": divergence}
    close(
        expected_gradient(choice, world), expected_gradient({"divergence": divergence}, world), 1e-5
    )


def test_score_function_at_gamma_1_is_the_gradient_between_whole_answers():
    world = policies()
    close(
        expected_gradient({"signal": "sampled", "estimator": "score_function(1)"}, world),
        sequence_gradient(world),
    )


def test_minillms_decomposition_is_the_gradient_between_whole_answers():
    """2306.08543, equation 5: the exact step of each state, and a return that begins at the next token."""
    world = policies()
    later = {"signal": "sampled", "estimator": "score_function(gamma=1, start=1)"}
    close(expected_gradient({"losses": [{}, later]}, world), sequence_gradient(world))


def test_a_return_that_begins_at_this_token_would_count_it_twice():
    """Released code of MiniLLM adds such a return to the exact step."""
    world = policies()
    twice = expected_gradient(
        {"losses": [{}, {"signal": "sampled", "estimator": "score_function(gamma=1)"}]}, world
    )
    exact = sequence_gradient(world)
    assert (twice - exact).norm() > 0.3 * exact.norm()


@pytest.mark.parametrize("signal", ["full", "topk(2)"])
@pytest.mark.parametrize("rest", ["", "start=1", "start=1, length=mean"])
@pytest.mark.parametrize("gamma", in_check([0, 0.5, 1], 0.5))
def test_a_baseline_of_the_state_leaves_the_expected_gradient_as_it_is(gamma, rest, signal):
    """Check returns with later tokens too: the subtracted baseline then only belongs to this state."""
    world = policies()
    bare, centred = (
        expected_gradient(
            {"signal": signal, "estimator": f"score_function({gamma}, {baseline}, {rest})"}, world
        )
        for baseline in ("none", "kl")
    )
    close(centred, bare, 1e-10)


def test_gamma_counts_beside_a_baseline():
    """Check that the law above does not hold because all gammas are equal."""
    world = policies()
    choices = ({"signal": "full", "estimator": f"score_function({gamma}, kl)"} for gamma in (0, 1))
    near, far = (expected_gradient(choice, world) for choice in choices)
    assert (near - far).norm() > 0.1 * far.norm()


def test_a_mean_over_what_remains_divides_each_return_by_its_length():
    """2306.08543, section 2.2: R_(t+1) over the number of tokens after t."""
    batch = random_batch()

    def formula(here):
        total = torch.zeros((), dtype=torch.float64)
        own, gap = here.of(here.S), (here.of(here.T) - here.of(here.S)).detach()
        for row in range(len(here.answers)):
            places = (here.rows == row).nonzero()[:, 0].tolist()
            for number, place in enumerate(places[:-1]):
                later = places[number + 1 :]
                total = total - gap[later].mean() * own[place]
        return total / len(own)

    choice = {"signal": "sampled", "estimator": "score_function(gamma=1, start=1, length=mean)"}
    close(gradient(choice, batch), formula_gradient(formula, batch))


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd(0.3)"])
def test_over_all_candidates_the_score_function_is_the_whole_gradient(divergence):
    batch = random_batch()
    choice = {
        "signal": "topk(7)",
        "estimator": "score_function(over=candidates)",
        "divergence": divergence,
    }
    close(gradient(choice, batch), gradient({"divergence": divergence}, batch))


def test_over_few_candidates_each_counts_its_renormalised_probability():
    """2604.13016: minus the sum over k of p_k (log T_k - log S_k) log S_k, p_k detached and renormalised."""
    batch = random_batch()

    def formula(here):
        total = torch.zeros((), dtype=torch.float64)
        for own, teacher in zip(here.S, here.T, strict=True):
            best = own.argsort(descending=True)[:3]
            p = torch.softmax(own[best], -1).detach()
            total = total - (p * (teacher[best] - own[best].detach()) * own[best]).sum()
        return total / len(here.ids)

    choice = {"signal": "topk(3)", "estimator": "score_function(over=candidates)"}
    close(gradient(choice, batch), formula_gradient(formula, batch))


def test_over_candidates_the_clip_is_of_each_ones_advantage():
    """2603.10165: A_v = clip(log T_v - log S_v, -C, C) times p_v; a clipped one keeps its gradient."""
    batch = random_batch()

    def formula(here):
        total = torch.zeros((), dtype=torch.float64)
        for own, teacher in zip(here.S, here.T, strict=True):
            best = own.argsort(descending=True)[:4]
            gap = (teacher[best] - own[best].detach()).clamp(-0.3, 0.2)
            total = total - (torch.softmax(own[best], -1).detach() * gap * own[best]).sum()
        return total / len(here.ids)

    choice = {"signal": "topk(4)", "estimator": "score_function(over=candidates)"}
    clipped = gradient({**choice, "clip": "advantage(-0.3, 0.2)"}, batch)
    close(clipped, formula_gradient(formula, batch))
    assert not torch.allclose(clipped, gradient(choice, batch))


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
@pytest.mark.parametrize("k", [1, 2])
def test_drawn_tokens_give_the_whole_gradient_in_expectation(k, divergence):
    """2606.24143: every outcome of k draws at one state, each by its probability."""
    one = random_batch(rows=[("a", 1.0, 1)])
    p = one.S[0].exp()
    middles = p.cumsum(0) - p / 2  # a random number within each token's share of [0, 1]
    total = torch.zeros_like(one.logits)
    for outcome in torch.cartesian_prod(*[torch.arange(len(p))] * k).reshape(-1, k):
        choice = {"signal": f"mc({k})", "divergence": divergence}
        total += p[outcome].prod() * gradient(choice, one, draws=middles[outcome][None])
    close(total, gradient({"divergence": divergence}, one))


@pytest.mark.parametrize("k", [1, 3])
def test_spec_k_has_the_weight_of_the_chance_that_one_of_k_drafts_is_accepted(k):
    """2510.24021: V is 1 if the teacher accepts one of k drafts of the student with min(1, p / q), else beta."""
    one = random_batch(rows=[("a", 1.0, 1)])
    chance = 1 - (1 - float(torch.minimum(one.S[0], one.T[0]).exp().sum())) ** k
    choice = {"divergence": "forward_kl", "weights": f"accepted({k}, of=drafted, rejected=0.1)"}
    accepts, rejects = (
        gradient(choice, one, draws=torch.full((1, 1), uniform, dtype=torch.float64))
        for uniform in (chance - 1e-6, chance + 1e-6)
    )
    plain = gradient({"divergence": "forward_kl"}, one)
    close(accepts, plain)
    close(rejects, 0.1 * plain)


@pytest.mark.parametrize(
    ("choice", "columns"),
    [
        ({"signal": "mc(4)"}, 4),
        ({"weights": "accepted(3, of=drafted)"}, 1),
        ({"losses": [{"signal": "mc(4)"}, {"weights": "accepted(3, of=drafted)"}]}, 5),
    ],
)
def test_drawn_tokens_are_each_rollouts_own_and_change_with_the_seed(choice, columns):
    batch, objective = random_batch(), Objective.model_validate(choice)
    first, again, other = (batch.tokens(objective, seed).draws for seed in (0, 0, 1))
    assert first.shape == (len(batch.ids), columns)
    assert torch.equal(first, again)
    assert not (first == other).any()
    backwards = replace(batch, answers=batch.answers[::-1]).tokens(objective, 0).draws
    sizes = [len(row.tokens) for row in batch.answers]
    assert torch.equal(torch.cat(backwards.split(sizes[::-1])[::-1]), first)


# Targets.


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
def test_a_log_linear_target_is_the_renormalised_product(divergence):
    batch = random_batch()

    def formula(here):
        mix = 0.6 * here.T + 0.3 * here.S.detach() - 0.2 * here.R
        target = mix - torch.logsumexp(mix, -1, keepdim=True)
        p, q = (here.S, target) if divergence == "reverse_kl" else (target, here.S)
        return (p.exp() * (p - q)).sum(-1).mean()

    choice = {"target": "log_linear(0.6, 0.3, -0.2)", "divergence": divergence}
    close(gradient(choice, batch), formula_gradient(formula, batch))


def test_veto_in_reverse_is_cross_entropy_and_less_entropy():
    """2601.07155: with T S^beta as target, detached, reverse KL is CE(S, T) - (1 - beta) H(S) in gradient."""
    world = policies()
    close(
        expected_gradient({"target": "log_linear(teacher=1, student=0.4)"}, world),
        expected_formula(
            lambda batch: (batch.S.exp() * (batch.S - batch.T - 0.4 * batch.S.detach())).sum(),
            world,
        ),
    )


@pytest.mark.parametrize("scale", [0.0, 2.0])
def test_contrast_divides_by_its_own_weight(scale):
    """2503.02832: softmax((1 + w) log T - w log R), the loss over w = scale TV + floor."""
    batch = random_batch()

    def formula(here):
        w = scale * 0.5 * (here.T.exp() - here.R.exp()).abs().sum(-1, keepdim=True) + 0.2
        target = torch.log_softmax((1 + w) * here.T - w * here.R, -1)
        return ((here.S.exp() * (here.S - target)).sum(-1) / w[:, 0]).mean()

    close(gradient({"target": f"contrast({scale}, 0.2)"}, batch), formula_gradient(formula, batch))


def test_a_mixture_of_the_teacher_alone_and_a_temperature_of_1_are_the_teacher():
    batch = random_batch()
    plain = gradient({}, batch)
    for target in ("mixture(1)", "teacher(1)", "log_linear(1, 0, 0)"):
        close(gradient({"target": target}, batch), plain, 1e-9)


@pytest.mark.parametrize("divergence", ["forward_kl", "ce"])
@pytest.mark.parametrize("k", [1, 3, 6, 7])
def test_a_renormalised_teacher_is_a_teacher_that_is_cut_to_its_candidates(k, divergence):
    """2603.07079, equation 10: the student keeps its whole distribution, so that mass elsewhere costs it."""
    batch = random_batch()
    inside = batch.T.argsort(-1, descending=True).argsort(-1) < k
    cut = replace(batch, T=batch.T.masked_fill(~inside, -torch.inf).log_softmax(-1))
    whole = gradient({"divergence": divergence}, cut)
    close(
        gradient(
            {"signal": f"topk({k}, teacher, renorm_teacher)", "divergence": divergence}, batch
        ),
        whole,
        1e-9,
    )
    both = gradient({"signal": f"topk({k}, teacher, renorm)", "divergence": divergence}, batch)
    assert torch.allclose(both, whole) == (k == 7)


@given(st.integers(0, 10**6), st.integers(1, 6))
def test_a_renormalised_teacher_pulls_with_its_whole_weight(seed, k):
    """The loss of the tokens outside uses the student's own mass there; a partial sum uses the candidates' share of it."""
    batch = random_batch(seed)
    best = batch.T.topk(k)
    outside = torch.ones_like(batch.T, dtype=torch.bool).scatter(-1, best.indices, False)
    for tail, weight in (
        ("renorm_teacher", torch.ones(1)),
        ("drop", best.values.exp().sum(-1, keepdim=True)),
    ):
        found = gradient(
            {"signal": f"topk({k}, teacher, {tail})", "divergence": "ce"}, batch
        ) * len(batch.ids)
        torch.testing.assert_close(
            found[outside], (weight * batch.S.exp())[outside], rtol=1e-6, atol=1e-9
        )


# Rewards.


def test_advantages_by_hand():
    """Two prompts: rewards 1, 0, 0 and 1, 1."""
    rows = [("a", 1.0, 1), ("a", 0.0, 1), ("a", 0.0, 1), ("b", 1.0, 1), ("b", 1.0, 1)]
    batch = random_batch(rows=rows)
    spread = (1 / 3) ** 0.5  # the sample standard deviation of 1, 0, 0
    expected = {
        "none": [1, 0, 0, 1, 1],
        "group_mean": [2 / 3, -1 / 3, -1 / 3, 0, 0],
        "leave_one_out": [1, -1 / 2, -1 / 2, 0, 0],
        "group_normalized": [2 / 3 / spread, -1 / 3 / spread, -1 / 3 / spread, 0, 0],
    }
    for name, advantages in expected.items():
        found = -5 * coefficients({"signal": f"score({name})"}, batch)  # token_mean of five tokens
        assert found.tolist() == pytest.approx(advantages, rel=1e-5)


def test_a_reward_of_a_fraction_counts_and_a_missing_one_does_not():
    batch = random_batch(rows=[("a", 1.0, 1), ("a", 0.25, 1), ("a", 0.0, 1)])
    batch.answers[2] = replace(batch.answers[2], reward=None)
    found = -3 * coefficients({"signal": "score(group_mean)"}, batch)
    assert found.tolist() == pytest.approx([0.375, -0.375, 0.0])


@pytest.mark.parametrize("signal", ["sampled", "full"])
@pytest.mark.parametrize("estimator", ["score_function(0)", "score_function(0.7)"])
def test_no_reward_added_is_none(signal, estimator):
    batch = random_batch()
    plain = {"signal": signal, "estimator": estimator, "correction": "ratio_mask(0.5, 2)"}
    assert torch.equal(
        gradient({**plain, "reward": "add_advantage(0)"}, batch), gradient(plain, batch)
    )


def test_an_added_reward_is_the_reward_alone_beside_the_teacher_alone():
    batch = random_batch()
    both = gradient({"signal": "sampled", "reward": "add_advantage(0.4, leave_one_out)"}, batch)
    apart = {
        "losses": [{"signal": "sampled"}, {"signal": "score(leave_one_out)", "coefficient": 0.4}]
    }
    close(both, gradient(apart, batch))


def test_reward_to_the_whole_answer_is_the_gradient_of_the_expected_reward():
    """Check REINFORCE by enumeration: the reward is the number of symbols that equal the first one."""
    world = policies()

    def formula(batch: RolloutBatch):
        reward = float((batch.ids == 0).sum())
        return -reward * batch.of(batch.S).sum()

    def rewarded(batch: RolloutBatch):
        rows = [replace(row, reward=float((row.tokens == 0).sum())) for row in batch.answers]
        return loss(
            {"signal": "score(none)", "aggregate": "seq_mean_token_sum"},
            replace(batch, answers=rows),
        )

    close(expected_formula(rewarded, world), expected_formula(formula, world))


# Silence and splits, through the trainer.

RL = [
    {"signal": "score(group_normalized)", "correction": "ratio_clip(0.2, 0.2)"},
    {"signal": "score(leave_one_out)", "aggregate": "seq_mean_token_sum"},
    {"signal": "sampled", "reward": "add_advantage(0.5)", "correction": "ratio_mask(0.5, 2)"},
    {"signal": "sampled", "reward": "modulate(0.5)", "correction": "ratio_anchor(0.5)"},
    {"estimator": "score_function(0.9, group_mean)", "reward": "add_advantage(0.5)"},
    {
        "signal": "score(group_mean)",
        "correction": "prefix_ratio",
        "aggregate": "seq_mean_token_mean",
    },
    {
        "losses": [
            {"signal": "score", "filter": "solved_group"},
            {"divergence": "jsd(0.5)", "filter": "failed_group"},
        ]
    },
    {
        "losses": [
            {"signal": "score"},
            {"samples": "above_mean"},
            {"weights": "certain", "filter": "incorrect"},
        ]
    },
]

SPEAKING = [
    {},
    {"signal": "sampled", "correction": "ratio"},
    {"signal": "topk(5)", "divergence": "jsd(0.3)"},
    {"signal": "mc(3)"},
    {"estimator": "score_function(1)"},
    {"estimator": "score_function(0.5, group_mean)"},
    {"estimator": "score_function(0, kl)", "correction": "prefix_ratio"},
    {"weights": "entropy_top(0.5)"},
    {"weights": "soft_or(0.5)"},
    {"weights": "importance"},
    {"weights": "trust"},
    {"weights": "certain"},
    {"samples": "ppl_softmax(student)"},
    {"samples": "ppl_softmax(teacher)"},
]


def taught(items, silent=()):
    """Return a teacher's signals for all but some of the rollouts."""
    teacher = tiny(seed=1)
    return [
        Datum(item, TeacherSignal() if number in silent else hidden_signal(teacher, item))
        for number, item in enumerate(items)
    ]


def group_of_items():
    """Return three prompts with several completions of unequal lengths, right and wrong."""
    sizes = [("a", 5), ("a", 2), ("a", 4), ("b", 6), ("b", 3), ("c", 4), ("c", 1)]
    return [
        rollout(3, length, seed, group=group) for seed, (group, length) in enumerate(sizes, start=1)
    ]


@pytest.mark.parametrize("choice", in_check(RL, RL[0]), ids=str)
def test_rewards_do_not_depend_on_how_the_batch_is_cut(choice):
    data = taught(group_of_items())
    whole = trained(data, choice, TrainerLimits(10**6, 10**6))
    for limits in (TrainerLimits(1, 10**6), TrainerLimits(10**6, 1), TrainerLimits(17, 3)):
        near(trained(data, choice, limits), whole)
    near(trained(data[::-1], choice), whole)


@pytest.mark.parametrize("choice", SPEAKING, ids=str)
@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(None, marks=pytest.mark.long, id="whole"),
        pytest.param(TrainerLimits(1, 2), id="cut"),
    ],
)
def test_answers_that_the_teacher_is_silent_about_are_as_if_they_were_not_there(choice, limits):
    items, silent = group_of_items(), {1, 3, 4}
    choice = {"aggregate": "seq_mean_token_sum", **choice}
    mixed = trained(taught(items, silent), choice, limits)
    alone = trained(
        taught([item for number, item in enumerate(items) if number not in silent]), choice, limits
    )
    near(mixed, alone)


def test_rewards_of_answers_that_the_teacher_is_silent_about_still_count_in_their_group():
    silent = {1, 3, 4}
    items, choice = (
        group_of_items(),
        {"signal": "sampled", "reward": "modulate(0)", "aggregate": "seq_mean_token_sum"},
    )
    reward_alone = {"signal": "score(group_normalized)", "aggregate": "seq_mean_token_sum"}
    only = {
        "losses": [{"signal": "score(group_normalized)", "source": "student"}],
        "aggregate": "seq_mean_token_sum",
    }
    heard = [
        item if number in silent else replace(item, source="teacher")
        for number, item in enumerate(items)
    ]
    # The first mean is over the answers with a teacher, the second over all.
    near(
        trained(taught(items, silent), choice) * (len(items) - len(silent)),
        (trained(taught(items), reward_alone) - trained(taught(heard), only)) * len(items),
    )


@pytest.mark.parametrize(
    "choice", [*SPEAKING, {"signal": "sampled", "reward": "modulate(0.5)"}], ids=str
)
def test_silence_about_all_answers_is_no_gradient(choice):
    data = taught(group_of_items(), silent=range(7))
    assert not trained(data, choice).any()


def test_what_needs_no_teacher_learns_in_silence():
    choice = {"losses": [{"signal": "score"}, {"divergence": "jsd(0.5)"}]}
    silent = trained(taught(group_of_items(), silent=range(7)), choice)
    near(silent, trained(taught(group_of_items()), {"signal": "score"}))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 12))
def test_updates_share_out_prompts_and_split_none(groups, updates):
    ids, drawn = torch.zeros(1, dtype=torch.long), torch.zeros(1)
    data = [
        Datum(answer(ids, drawn, group=str(group), sample=number), TeacherSignal())
        for number, group in enumerate(groups)
    ]
    parts = split_data(data, updates)
    assert sorted(datum.rollout.sample for part in parts for datum in part) == list(
        range(len(groups))
    )
    prompts = [{datum.rollout.prompt.id for datum in part} for part in parts]
    assert Counter(prompt for part in prompts for prompt in part).most_common(1)[0][1] == 1
    assert len(parts) == min(updates, len(set(groups)))
    assert max(map(len, prompts)) - min(map(len, prompts)) <= 1


def test_advantages_are_the_same_in_each_update_as_in_one():
    """A prompt's completions stay together, so each group is complete."""
    data = taught(group_of_items())
    choice = {"signal": "score(group_normalized)", "aggregate": "seq_mean_token_sum"}
    parts = split_data(data, 3)
    assert [len(part) for part in parts] == [3, 2, 2]
    total = sum(trained(part, choice) * len(part) for part in parts)
    near(total, trained(data, choice) * len(data))


def test_worlds_are_as_small_as_they_say():
    world = policies()
    assert world.student.shape == (1 + SYMBOLS + SYMBOLS**2, SYMBOLS)
