"""Both sides of every kind of objective against a slow reference, and laws that hold for any objective."""

from dataclasses import replace

import pytest
import torch

from practicum.functional.divergences import DIVERGENCES
from practicum.losses import (
    TermValues,
    build_token_batch,
    compute_coefficients,
    compute_term_values,
)
from practicum.objective import Objective, TeacherDistribution
from practicum.types import AUTHORS, Datum, Prompt, Rollout, TeacherSignal

from .slow_twin import slow_loss

VOCABULARY = 11


def rollout(group: str, mask: list[bool], reward: float | None, seed: int) -> Rollout:
    generator = torch.Generator().manual_seed(seed)
    count = len(mask)
    sampling = -3 * torch.rand(count, generator=generator, dtype=torch.float64)
    return Rollout(
        prompt=Prompt(id=group, messages=()),
        prompt_tokens=(1, 2),
        tokens=torch.randint(VOCABULARY, (count,), generator=generator),
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        sampling_logprobs=sampling,
        policy_logprobs=sampling,
        policy_version=0,
        stop_reason="stop",
        text="",
        reward=reward,
    )


def batch() -> list[Datum]:
    """Return two groups and a single answer; holes in masks, an empty mask, rewards right, wrong, partial and missing."""
    rollouts = [
        rollout("a", [True, False, True, True], 1.0, 1),
        rollout("a", [True], 0.0, 2),
        rollout("b", [False, False], 1.0, 3),
        rollout("b", [True, True, True, True, False], None, 4),
        rollout("a", [False, True, True], 0.5, 5),
        rollout("c", [True, True], 1.0, 6),
    ]
    return [Datum(rollout, TeacherSignal()) for rollout in rollouts]


def logits(seed: int) -> torch.Tensor:
    count = sum(int(datum.rollout.loss_mask.sum()) for datum in batch())
    return 2 * torch.randn(
        count, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def loss_of(
    objective: Objective, student: torch.Tensor, teacher: TeacherDistribution
) -> torch.Tensor:
    tokens = build_token_batch(batch(), objective)
    values = compute_term_values(torch.log_softmax(student, dim=-1), teacher, tokens, objective)
    shares = [
        compute_coefficients(term, value.detach(), tokens)
        for term, value in zip(objective.losses, values, strict=True)
    ]
    return sum(
        ((share * value.loss_value).sum() for share, value in zip(shares, values, strict=True)),
        torch.zeros(()),
    )


def loss_and_gradient(function, student: torch.Tensor):
    student = student.clone().requires_grad_()
    loss = function(student)
    return loss.detach(), torch.autograd.grad(loss, student)[0]


def whole(teacher: torch.Tensor) -> TeacherDistribution:
    return TeacherDistribution(full=torch.log_softmax(teacher, dim=-1))


PATHWISE = [
    {"divergence": divergence} for divergence in ("reverse_kl", "forward_kl", "jsd(0.3)")
] + [{"divergence": f"skew_{direction}_kl(0.2)"} for direction in ("forward", "reverse")]
TARGETS = [{"target": target} for target in ("teacher(2)", "log_linear(0.7, 0.3)", "mixture(0.6)")]
TOPK = [
    {"signal": f"topk(4, {support}, {tail})", "divergence": divergence}
    for support in ("student", "teacher", "union", "intersection")
    for tail in ("bucket", "renorm", "sampled")
    for divergence in ("reverse_kl", "jsd(0.3)")
    if not (tail == "sampled" and divergence != "reverse_kl")
    and not (support == "intersection" and tail == "renorm")
]
SCORE = [
    {"signal": signal, "estimator": f"score_function({gamma}, {baseline})"}
    for gamma in (0, 0.5, 1)
    for baseline in ("none", "kl", "group_mean")
    for signal in (["full"] if baseline == "kl" else ["full", "sampled"])
] + [
    {"signal": "sampled", "divergence": "forward_kl"},
    {"signal": "sampled", "advantage_logprob": "sampler"},
    {"signal": "full", "estimator": "k2_surrogate"},
    {"signal": "topk(3)", "estimator": "score_function(0, kl)"},
]
CORRECTIONS = [
    {"signal": signal, "correction": correction}
    for correction in (
        "none",
        "ratio",
        "ratio_clip(0.3, 0.1)",
        "ratio_mask(0.1, 8)",
        "ratio_truncate(1.1)",
        "prefix_ratio",
    )
    for signal in ("full", "sampled")
] + [
    {"estimator": f"score_function(0.7, {baseline})", "correction": "prefix_ratio"}
    for baseline in ("kl", "group_mean")
]
WEIGHTS = [
    {"weights": weights}
    for weights in (
        "all",
        "prefix(2)",
        "threshold(1.2)",
        "threshold(0.5, statistic=divergence)",
        "threshold(-2, statistic=logprobs)",
        "threshold(-2, statistic=teacher_logprobs)",
        "entropy_top(0.3)",
        "entropy_top(0.3, model=teacher)",
        "divergence_top(0.4)",
        "soft_or(0.4)",
        "accepted(2)",
        "accepted(2, of=greedy, rejected=0.3)",
    )
]
REST = [
    {"signal": "entropy", "coefficient": 0.3},
    {"filter": "correct"},
    {"filter": "incorrect"},
    {"coefficient": -0.5},
]
AGGREGATES = [
    {"aggregate": "seq_mean_token_mean"},
    {"aggregate": "seq_mean_token_sum", "signal": "sampled"},
    {"aggregate": "seq_mean_token_sum_norm", "aggregate_norm": 7},
]
TWO = [
    {
        "losses": [
            {"divergence": "jsd(0.3)", "filter": "correct", "weights": "prefix(3)"},
            {
                "signal": "sampled",
                "estimator": "score_function(1)",
                "coefficient": 0.1,
                "correction": "ratio",
            },
        ],
        "aggregate": "seq_mean_token_mean",
    }
]
ALL = [*PATHWISE, *TARGETS, *TOPK, *SCORE, *CORRECTIONS, *WEIGHTS, *REST, *AGGREGATES, *TWO]


@pytest.mark.parametrize("choice", ALL, ids=str)
def test_objective_equals_its_slow_twin(choice):
    objective = Objective.model_validate(choice)
    student, teacher = logits(1), logits(2)
    loss, gradient = loss_and_gradient(lambda x: loss_of(objective, x, whole(teacher)), student)
    slow, slow_gradient = loss_and_gradient(
        lambda x: slow_loss(x, teacher, batch(), objective), student
    )
    torch.testing.assert_close(loss.double(), slow, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradient, slow_gradient, rtol=1e-6, atol=1e-9)
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd(0.5)"])
def test_what_a_candidate_adds_over_the_clip_gives_no_gradient(name):
    objective = Objective.model_validate({"divergence": name, "clip": "entries(0.05)"})
    (term,) = objective.losses
    teacher = torch.log_softmax(logits(2), dim=-1)

    def clipped(student):
        parts = DIVERGENCES[term.divergence.name].contributions(
            torch.log_softmax(student, -1), teacher, term.parameter
        )
        return parts.clamp(max=0.05).sum(dim=-1).mean()

    loss, gradient = loss_and_gradient(
        lambda student: loss_of(objective, student, whole(teacher)), logits(1)
    )
    plain = Objective.model_validate({"divergence": name})
    unclipped, other = loss_and_gradient(
        lambda student: loss_of(plain, student, whole(teacher)), logits(1)
    )
    torch.testing.assert_close(gradient, loss_and_gradient(clipped, logits(1))[1])
    torch.testing.assert_close(loss, unclipped)
    assert not torch.allclose(gradient, other)


def test_k2_surrogate_has_the_gradient_of_half_the_squared_log_ratio():
    objective = Objective.model_validate({"signal": "sampled", "estimator": "k2_surrogate"})
    teacher, tokens = logits(2), build_token_batch(batch(), objective)
    sampled = torch.log_softmax(teacher, dim=-1).gather(1, tokens.tokens[:, None])[:, 0]

    def k2(x):
        learner = torch.log_softmax(x, dim=-1).gather(1, tokens.tokens[:, None])[:, 0]
        return (tokens.aggregate * (learner - sampled).square() / 2).sum()

    _, gradient = loss_and_gradient(
        lambda x: loss_of(objective, x, TeacherDistribution(logprobs=sampled)), logits(1)
    )
    torch.testing.assert_close(gradient, loss_and_gradient(k2, logits(1))[1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("signal", ["full", "topk(4)", "topk(4, union, renorm)"])
@pytest.mark.parametrize("name", [name for name in DIVERGENCES if name != "ce"])
def test_no_loss_and_no_gradient_where_student_is_teacher(name, signal):
    objective = Objective.model_validate({"divergence": name, "signal": signal})
    loss, gradient = loss_and_gradient(lambda x: loss_of(objective, x, whole(logits(1))), logits(1))
    assert abs(loss) < 1e-12
    assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize(
    "estimator", ["score_function", "score_function(1)", "score_function(0, kl)", "k2_surrogate"]
)
def test_no_gradient_of_score_functions_where_student_is_teacher(estimator):
    objective = Objective.model_validate({"estimator": estimator})
    _, gradient = loss_and_gradient(lambda x: loss_of(objective, x, whole(logits(1))), logits(1))
    assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize("tail", ["bucket", "renorm", "sampled"])
@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd(0.3)"])
def test_candidates_sent_by_a_teacher_equal_candidates_found_here(divergence, tail):
    objective = Objective.model_validate(
        {"signal": f"topk(4, teacher, {tail})", "divergence": divergence}
    )
    teacher = torch.log_softmax(logits(2), dim=-1)
    tokens = build_token_batch(batch(), objective)
    best = teacher.topk(4, dim=-1)
    sent = TeacherDistribution(
        None, best.indices, best.values, teacher.gather(1, tokens.tokens[:, None])[:, 0]
    )
    here = loss_and_gradient(
        lambda x: loss_of(objective, x, TeacherDistribution(full=teacher)), logits(1)
    )
    there = loss_and_gradient(lambda x: loss_of(objective, x, sent), logits(1))
    torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-15)


def test_candidates_marked_impossible_do_not_count():
    objective = Objective.model_validate({"signal": "topk(4, teacher, renorm)"})
    teacher = torch.log_softmax(logits(2), dim=-1)
    best = teacher.topk(3, dim=-1)
    more = TeacherDistribution(
        topk_ids=torch.nn.functional.pad(best.indices, (0, 2)),
        topk_logprobs=torch.nn.functional.pad(best.values, (0, 2), value=-torch.inf),
    )
    fewer = TeacherDistribution(topk_ids=best.indices, topk_logprobs=best.values)
    torch.testing.assert_close(
        loss_and_gradient(lambda x: loss_of(objective, x, more), logits(1)),
        loss_and_gradient(lambda x: loss_of(objective, x, fewer), logits(1)),
    )


def test_a_sampled_log_linear_target_keeps_the_expected_gradient():
    """Over all tokens the missing normaliser cancels: E_S[A grad log S] is the same with and without it."""
    objective = Objective.model_validate({"signal": "sampled", "target": "log_linear(0.7, 0.3)"})
    student, teacher = logits(1)[:1], logits(2)[:1]
    everything = replace(
        build_token_batch(batch(), objective)[torch.arange(VOCABULARY)],
        tokens=torch.arange(VOCABULARY),
    )
    logprobs = torch.log_softmax(student, dim=-1)
    signal = torch.log_softmax(teacher, dim=-1)[0]

    def expected(teacher_tokens):
        values = compute_term_values(
            logprobs.expand(VOCABULARY, -1), teacher_tokens, everything, objective
        )[0]
        advantage = values.teacher_logprobs - logprobs[0]
        probabilities = logprobs[0].exp()
        return probabilities * (advantage - (probabilities * advantage).sum())

    full = TeacherDistribution(full=signal.expand(VOCABULARY, -1))
    torch.testing.assert_close(expected(TeacherDistribution(logprobs=signal)), expected(full))


@pytest.mark.parametrize(
    ("choice", "counts"),
    [
        ({"signal": "sampled"}, [True, True, False, False]),
        ({"signal": "sampled", "against": "reference"}, [True, False, True, False]),
        ({"signal": "sampled", "target": "log_linear(1, 1, -1)"}, [True, False, False, False]),
        ({"signal": "score(group_mean)"}, [True, True, True, True]),
    ],
)
def test_the_mean_counts_the_rollouts_with_every_signal_that_a_term_needs(choice, counts):
    answer, silent = TeacherSignal(logprobs=torch.full((2,), -1.0)), TeacherSignal()
    signals = [(answer, answer), (answer, silent), (silent, answer), (silent, silent)]
    data = [
        Datum(rollout(name, [True, True], 1.0, 0), *pair)
        for name, pair in zip("abcd", signals, strict=True)
    ]
    shares = build_token_batch(data, Objective.model_validate(choice)).aggregate
    expected = [is_counted / (2 * sum(counts)) for is_counted in counts for _ in range(2)]
    torch.testing.assert_close(shares, torch.tensor(expected))


def test_the_yardstick_is_reverse_kl_to_the_teacher_whatever_the_objective():
    student, teacher = torch.log_softmax(logits(1), dim=-1), torch.log_softmax(logits(2), dim=-1)
    exact = (student.exp() * (student - teacher)).sum(-1)
    tokens = build_token_batch(batch(), Objective())
    for choice in ALL:
        for value in compute_term_values(
            student, TeacherDistribution(full=teacher), tokens, Objective.model_validate(choice)
        ):
            torch.testing.assert_close(value.reverse_kl, exact)


def test_the_yardstick_of_a_sampled_signal_is_against_the_teacher_and_not_the_target():
    objective = Objective.model_validate({"signal": "sampled", "target": "log_linear(0.7, 0.3)"})
    student = torch.log_softmax(logits(1), dim=-1)
    tokens = build_token_batch(batch(), objective)
    sampled = torch.log_softmax(logits(2), dim=-1).gather(1, tokens.tokens[:, None])[:, 0]
    (values,) = compute_term_values(
        student, TeacherDistribution(logprobs=sampled), tokens, objective
    )
    torch.testing.assert_close(
        values.reverse_kl, student.gather(1, tokens.tokens[:, None])[:, 0] - sampled
    )


def test_an_impossible_token_of_the_teacher_gives_finite_numbers():
    teacher = torch.log_softmax(logits(2), dim=-1).clone()
    teacher[:, 3] = -torch.inf
    for choice in [*PATHWISE, *TOPK, *SCORE]:
        objective = Objective.model_validate(choice)
        loss, gradient = loss_and_gradient(
            lambda x, o=objective: loss_of(o, x, TeacherDistribution(full=teacher)), logits(1)
        )
        assert torch.isfinite(loss), choice
        assert torch.isfinite(gradient).all(), choice


def test_a_statistic_that_one_chunk_lacks_is_unknown_there():
    student = torch.log_softmax(logits(1), dim=-1)
    objective = Objective.model_validate({"signal": "sampled"})
    tokens = build_token_batch(batch(), objective)
    known = compute_term_values(student, TeacherDistribution(full=student), tokens, objective)[0]
    sampled = compute_term_values(
        student, TeacherDistribution(logprobs=known.logprobs), tokens, objective
    )[0]
    joined = TermValues.join([known, sampled])
    count = len(tokens.tokens)
    assert joined.teacher_entropy is not None
    assert joined.teacher_entropy[:count].isfinite().all()
    assert joined.teacher_entropy[count:].isnan().all()
    assert TermValues.join([sampled, sampled]).teacher_entropy is None
    torch.testing.assert_close(joined.logprobs, torch.cat([known.logprobs, known.logprobs]))


def test_a_group_is_solved_by_the_students_own_completions():
    """Test five prompts: right, wrong, wrong next to a right teacher answer, and two without the student's own answers."""
    rows = [
        ("right", "student", 1.0),
        ("wrong", "student", 0.0),
        ("helped", "student", 0.0),
        ("helped", "teacher", 1.0),
        ("given", "dataset", 1.0),
        ("misled", "teacher", 0.0),
    ]
    data = [
        Datum(replace(rollout(group, [True], reward, seed), source=source), TeacherSignal())
        for seed, (group, source, reward) in enumerate(rows)
    ]
    counted = {}
    for outcome in ("solved_group", "failed_group"):
        objective = Objective.model_validate({"filter": outcome})
        batch = build_token_batch(data, objective)
        uniform = torch.full((len(rows), VOCABULARY), 1 / VOCABULARY, dtype=torch.float64).log()
        (values,) = compute_term_values(
            uniform, TeacherDistribution(full=uniform), batch, objective
        )
        share = compute_coefficients(objective.losses[0], values.detach(), batch)
        counted[outcome] = [
            group for (group, *_), value in zip(rows, share.tolist(), strict=True) if value
        ]
    assert counted == {
        "solved_group": ["right", "given"],
        "failed_group": ["wrong", "helped", "helped", "misled"],
    }


@pytest.mark.parametrize("source", ["student", "teacher", "dataset"])
@pytest.mark.parametrize(
    "data", [{"divergence": "jsd(0.3)"}, {"signal": "sampled"}, {"signal": "score(group_mean)"}]
)
def test_a_term_of_one_writer_learns_from_the_tokens_of_that_writer(source, data):
    """Gradients equal the plain term at the writer's tokens, and are zero at all other tokens."""
    mixed = [
        replace(
            datum,
            rollout=replace(
                datum.rollout,
                authors=torch.arange(len(datum.rollout.tokens), dtype=torch.uint8) % 3,
            ),
        )
        for datum in batch()
    ]
    teacher, student = whole(logits(2)), logits(1)

    def gradient(objective: Objective) -> torch.Tensor:
        tokens = build_token_batch(mixed, objective)
        learner = student.clone().requires_grad_()
        (values,) = compute_term_values(
            torch.log_softmax(learner, dim=-1), teacher, tokens, objective
        )
        share = compute_coefficients(objective.losses[0], values.detach(), tokens)
        return torch.autograd.grad((share * values.loss_value).sum(), learner)[0]

    written = build_token_batch(mixed, Objective()).authors == AUTHORS.index(source)
    plain, filtered = (
        gradient(Objective.model_validate(data)),
        gradient(Objective.model_validate(data | {"source": source})),
    )
    assert 0 < written.sum() < len(written)
    assert filtered[written].equal(plain[written]) and not filtered[~written].any()


def test_special_tokens_are_left_out_where_they_are_known():
    objective = Objective.model_validate({"divergence": "jsd(0.3)", "weights": "not_special"})
    special = {0, 3, 7}
    teacher, student = whole(logits(2)), logits(1).requires_grad_()
    tokens = build_token_batch(batch(), objective, special=special)
    (values,) = compute_term_values(torch.log_softmax(student, dim=-1), teacher, tokens, objective)
    share = compute_coefficients(objective.losses[0], values.detach(), tokens)
    (found,) = torch.autograd.grad((share * values.loss_value).sum(), student)
    masked = torch.tensor([token in special for token in tokens.tokens.tolist()])
    assert 0 < masked.sum() < len(masked)
    assert not found[masked].any() and found[~masked].any(dim=-1).all()
    plain = Objective.model_validate({"divergence": "jsd(0.3)"})
    _, unmasked = loss_and_gradient(lambda x: loss_of(plain, x, teacher), logits(1))
    torch.testing.assert_close(found[~masked], unmasked[~masked])
    with pytest.raises(ValueError, match="not_special needs special"):
        loss_of(objective, logits(1), teacher)


def test_a_mean_over_scored_tokens_leaves_out_tokens_that_the_teacher_lacks():
    data = {"divergence": "jsd(0.3)", "weights": "scored_mean", "aggregate": "seq_mean_token_mean"}
    objective = Objective.model_validate(data)
    tokens = build_token_batch(batch(), objective)
    unknown = torch.rand(len(tokens.rows), generator=torch.Generator().manual_seed(0)) < 0.4
    teacher = replace(whole(logits(2)), unknown=unknown)
    (values,) = compute_term_values(logits(1).log_softmax(-1), teacher, tokens, objective)
    shares = compute_coefficients(objective.losses[0], values.detach(), tokens)
    rows = tokens.rows.unique()
    assert 0 < unknown.sum() < len(unknown) and not shares[unknown].any()
    for row in rows:
        known = shares[(tokens.rows == row) & ~unknown]
        torch.testing.assert_close(
            known, torch.full_like(known, 1 / len(rows) / max(len(known), 1))
        )


def test_a_divergence_is_scaled_to_the_cross_entropy_of_the_same_completion():
    terms = [
        {"signal": "text", "divergence": "ce"},
        {"divergence": "jsd(0.3)", "weights": "ce_scale", "coefficient": 0.5},
    ]
    objective = Objective.model_validate({"losses": terms})
    tokens = build_token_batch(batch(), objective)
    unknown = torch.rand(len(tokens.rows), generator=torch.Generator().manual_seed(0)) < 0.4
    teacher = replace(whole(logits(2)), unknown=unknown)
    values = compute_term_values(logits(1).log_softmax(-1), teacher, tokens, objective)
    losses = [
        compute_coefficients(term, part.detach(), tokens) * part.loss_value.detach().nan_to_num()
        for term, part in zip(objective.losses, values, strict=True)
    ]
    compared = 0
    for row in tokens.rows.unique():
        here = tokens.rows == row
        entropy, scaled = (loss[here].sum() for loss in losses)
        # A completion without any token of the teacher has no divergence.
        torch.testing.assert_close(scaled, 0.5 * entropy * (here & ~unknown).any())
        compared += int((here & unknown).any() and (here & ~unknown).any())
    assert compared and not losses[1][unknown].any() and losses[0][unknown].all()
