"""Laws of token weights, for every entry of the table."""

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum import functional as F
from practicum.functional.laws import WEIGHT_LAWS
from practicum.functional.weights import MEASURES, soft_or_score

EVERY = pytest.mark.parametrize("weight", list(F.WEIGHTS.values()), ids=lambda entry: entry.name)


def statistics(seed=0, length=12, boolean=True, **fields):
    generator = torch.Generator().manual_seed(seed)

    def positive():
        return torch.rand(length, generator=generator).requires_grad_()

    mask = torch.rand(length, generator=generator) < 0.7
    return F.TokenStatistics(
        **{
            "student_entropy": positive(),
            "teacher_entropy": positive(),
            "divergence": positive(),
            "logprobs": -positive(),
            "teacher_logprobs": -positive(),
            "reference_logprobs": -positive(),
            "positions": torch.arange(length),
            "rows": torch.arange(length) // 4,
            "sampled_rank": (20 * positive()).long(),
            "greedy_rank": (20 * positive()).long(),
            "drafted_rank": (20 * positive()).long(),
            "special": positive() > 1.0,
            "turns": torch.arange(length) % 4 // 2,
            "loss_mask": mask if boolean else mask.float(),
            **fields,
        }
    )


@EVERY
@pytest.mark.parametrize("law", WEIGHT_LAWS, ids=lambda law: law.__name__)
@given(st.integers(0, 10**6), st.integers(0, 20))
def test_laws(weight, law, seed, length):
    law(weight, weight.defaults, seed, length)


@EVERY
@given(st.integers(0, 10**6), st.integers(1, 20))
def test_completions_without_a_loss_before_the_others_change_nothing(weight, seed, length):
    first = statistics(seed, length)
    later = replace(first, rows=first.rows + 100)
    assert weight.function(later, **weight.defaults).equal(
        weight.function(first, **weight.defaults)
    )


CALLS = [
    *((name, dict(entry.defaults)) for name, entry in F.WEIGHTS.items()),
    *(
        (name, {**F.WEIGHTS[name].defaults, "model": "student"})
        for name in ("entropy_top", "certain")
    ),
    ("entropy_top", {"fraction": 0.2, "model": "teacher"}),
    ("accepted", {"k": 5, "of": "greedy", "rejected": 0.3}),
    ("accepted", {"k": 5, "of": "drafted", "rejected": 0.3}),
    *(("threshold", {**F.WEIGHTS["threshold"].defaults, "statistic": of}) for of in MEASURES),
]
CALL = pytest.mark.parametrize(("name", "parameters"), CALLS, ids=str)


@CALL
def test_a_weight_reads_exactly_what_it_needs(name, parameters):
    weight, known = F.WEIGHTS[name], statistics()
    needed = weight.needed(parameters)
    others = {
        field.name: None
        for field in fields(F.TokenStatistics)
        if field.name not in {"loss_mask", *needed}
    }
    values = weight.function(statistics(**others), **parameters)
    assert torch.equal(values, weight.function(known, **parameters))
    for need in needed:
        with pytest.raises(
            ValueError, match=f"needs {need}, which the signal of this term does not give"
        ):
            weight.function(statistics(**{need: None}), **parameters)


@CALL
@given(st.integers(0, 10**6))
def test_a_pointwise_weight_of_a_token_does_not_depend_on_others(name, parameters, seed):
    weight, known = F.WEIGHTS[name], statistics(seed)
    values = weight.function(known, **parameters)
    tokens = [torch.tensor([place]) for place in range(len(values))]
    alone = [
        F.TokenStatistics(
            **{field.name: getattr(known, field.name)[token] for field in fields(F.TokenStatistics)}
        )
        for token in tokens
    ]
    if weight.pointwise:
        assert torch.equal(torch.cat([weight.function(one, **parameters) for one in alone]), values)


@pytest.mark.parametrize(
    ("one", "other"),
    [("trust", "distrust"), ("accepted", "rejected"), ("positive_advantage", "negative_advantage")],
)
@given(st.integers(0, 10**6))
def test_complements_share_the_mask(one, other, seed):
    given_statistics = statistics(seed)
    halves = [F.WEIGHTS[name].function(given_statistics) for name in (one, other)]
    assert torch.allclose(sum(halves), given_statistics.loss_mask.float())


@given(st.integers(0, 10**6), st.floats(0.1, 3.0))
def test_importance_falls_along_each_completion_from_at_most_one_plus_gamma_to_one(seed, gamma):
    given_statistics = statistics(seed, length=12, loss_mask=torch.ones(12, dtype=torch.bool))
    values = F.WEIGHTS["importance"].function(given_statistics, gamma)
    for row in values.split(4):
        assert (row.diff() <= 1e-5).all()
        assert row[-1].item() == pytest.approx(1.0, abs=1e-5)
        assert row[0] <= 1 + gamma


@given(st.integers(0, 10**6), st.sampled_from([0.1, 0.3, 0.7]), st.sampled_from([0.2, 0.5, 0.8]))
def test_by_context_shares_a_completion_between_its_highest_tokens_and_the_others(
    seed, fraction, share
):
    given_statistics = statistics(seed, 23, rows=torch.arange(23) // 8)
    weights = F.WEIGHTS["by_context"].function(given_statistics, fraction=fraction, share=share)
    gap = given_statistics.teacher_logprobs - given_statistics.reference_logprobs
    for row in range(3):
        inside = given_statistics.loss_mask & (given_statistics.rows == row)
        count = int(inside.sum())
        assert weights[inside].sum().item() == pytest.approx(count, rel=1e-5)
        high = math.ceil(fraction * count - 1e-9)
        if 0 < high < count:
            chosen = gap[inside].topk(high).indices
            assert weights[inside][chosen].sum().item() == pytest.approx(share * count, rel=1e-5)


def test_trust_is_the_probability_that_a_speculative_decoder_accepts():
    student, teacher = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.3, 0.5]).log()
    weights = F.WEIGHTS["trust"].function(
        statistics(length=3, loss_mask=torch.ones(3), logprobs=student, teacher_logprobs=teacher)
    )
    assert (student.exp() * weights).sum().item() == pytest.approx(
        1 - F.tvd(student, teacher).item()
    )


@pytest.mark.parametrize("name", ["entropy_top", "divergence_top", "soft_or"])
@given(st.integers(0, 10**6), st.sampled_from([0.1, 0.5, 0.9]))
def test_fractions_keep_their_count_of_the_highest(name, seed, fraction):
    given_statistics = statistics(seed, 30)
    mask = given_statistics.loss_mask
    kept = F.WEIGHTS[name].function(given_statistics, fraction=fraction) > 0
    assert int(kept.sum()) == math.ceil(fraction * int(mask.sum()) - 1e-9)
    score = {
        "entropy_top": given_statistics.student_entropy,
        "divergence_top": given_statistics.divergence,
        "soft_or": soft_or_score(given_statistics),
    }[name]
    if kept.any() and (mask & ~kept).any():
        assert score[kept].min() >= score[mask & ~kept].max()


@given(st.integers(0, 10**6))
def test_soft_or_score_is_a_probability_like_or(seed):
    score = soft_or_score(statistics(seed, 20))
    assert (score >= 0).all()
    assert (score <= 1).all()
    nothing = torch.zeros(3)
    flat = F.TokenStatistics(student_entropy=nothing, divergence=nothing, loss_mask=torch.ones(3))
    assert soft_or_score(flat).tolist() == [0.0] * 3


def test_by_hand():
    given_statistics = F.TokenStatistics(
        student_entropy=torch.tensor([1.0, 0.0, 0.5, 9.0]),
        teacher_entropy=torch.tensor([0.0, 1.0, 0.5, 9.0]),
        divergence=torch.tensor([0.0, 4.0, 1.0, 9.0]),
        positions=torch.tensor([0, 1, 0, 1]),
        turns=torch.tensor([0, 0, 2, 3]),
        loss_mask=torch.tensor([True, True, True, False]),
    )

    def kept(name, **parameters):
        return F.WEIGHTS[name].function(given_statistics, **parameters).tolist()

    assert kept("all") == [1.0, 1.0, 1.0, 0.0]
    assert kept("entropy_top", fraction=0.3) == [1.0, 0.0, 0.0, 0.0]
    assert kept("entropy_top", fraction=0.3, model="teacher") == [0.0, 1.0, 0.0, 0.0]
    assert kept("divergence_top", fraction=0.5) == [0.0, 1.0, 1.0, 0.0]
    assert soft_or_score(given_statistics).tolist() == [1.0, 1.0, 0.625, 0.0]
    assert kept("soft_or", fraction=0.6) == [1.0, 1.0, 0.0, 0.0]
    assert kept("prefix", length=1) == [1.0, 0.0, 1.0, 0.0]
    assert kept("turn", decay=0.5) == [1.0, 1.0, 0.25, 0.0]
    assert kept("certain", beta=2.0) == pytest.approx([1.0, math.exp(-2), math.exp(-1), 0.0])
    assert kept("certain", model="student") == pytest.approx(
        [math.exp(-1), 1.0, math.exp(-0.5), 0.0]
    )
    assert kept("threshold", above=0.2) == [0.0, 1.0, 1.0, 0.0]
    assert kept("threshold", above=0.5, statistic="divergence") == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "parameters", "text"),
    [
        ("entropy_top", {"fraction": 0.0}, r"fraction must be in \(0, 1\], got 0\.0"),
        ("certain", {"model": "judge"}, "certain: model must be student or teacher, got 'judge'"),
        ("certain", {"beta": -1.0}, r"certain: beta must not be negative, got -1\.0"),
        ("divergence_top", {"fraction": 1.2}, r"got 1\.2"),
        (
            "entropy_top",
            {"model": "judge"},
            "entropy_top: model must be student or teacher, got 'judge'",
        ),
        ("threshold", {"statistic": "mood"}, "threshold: no statistic named 'mood'"),
        ("prefix", {"length": -1}, "prefix: length must not be negative, got -1"),
    ],
)
def test_parameters_are_checked(name, parameters, text):
    with pytest.raises(ValueError, match=text):
        F.WEIGHTS[name].function(statistics(), **parameters)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("entropy_top", "student_entropy"),
        ("divergence_top", "divergence"),
        ("soft_or", "divergence"),
        ("prefix", "positions"),
        ("threshold", "teacher_entropy"),
    ],
)
def test_a_missing_statistic_is_named(name, missing):
    with pytest.raises(ValueError, match=f"{name} needs {missing}, which"):
        F.WEIGHTS[name].function(statistics(**{missing: None}))
