"""Each law is shown to fail, on an entry with the fault that the law should find."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from practicum import functional as F
from practicum.functional.laws import check_laws
from practicum.functional.laws.checking import LAWS, judge_law
from practicum.functional.registry import TABLES


def divergence(term: Callable[..., Any], **facts: Any) -> F.Divergence:
    return F.Divergence("mine", term, None, "", "", **facts)


def chi(s: Any, t: Any, _: float) -> Any:
    return (s.exp() - t.exp()).square() / t.exp().clamp(min=1e-6)


def masked(function: Callable[..., Any], **facts: Any) -> F.Weight:
    return F.Weight("mine", lambda x: x.loss_mask.float() * function(x), "", **facts)


def correction(function: Callable[..., Any]) -> F.Correction:
    return F.Correction("mine", function, "")


WRONG: dict[str, tuple[str, Any, str, str]] = {
    "a wrong sign": (
        "divergence",
        divergence(lambda s, t, _: s.exp() * (t - s)),
        "non_negative",
        "the value is -",
    ),
    "not zero at equality": (
        "divergence",
        divergence(lambda s, t, _: s.exp() * (s - t) + 0.1 * s.exp()),
        "zero_at_equality",
        "the value at equality is 0.1",
    ),
    "a missing constant": (
        "divergence",
        # alpha without its constant: 1 is missing in 1 - sum sqrt(S T).
        divergence(lambda s, t, _: -((s + t) / 2).exp()),
        "zero_at_equality",
        "the value at equality is -1",
    ),
    "a factor that is held constant": (
        "divergence",
        divergence(lambda s, t, _: s.exp().detach() * (s - t)),
        "gradient_is_of_the_value",
        "detach nothing",
    ),
    "no gradient at all": (
        "divergence",
        divergence(lambda s, t, _: (s.exp() * (s - t)).detach()),
        "zero_at_equality",
        "the value has no gradient in the student",
    ),
    "the first token counts more": (
        "divergence",
        divergence(
            lambda s, t, _: chi(s, t, _) * torch.linspace(1, 2, s.shape[-1], dtype=s.dtype),
            pointwise=False,
        ),
        "order_of_the_vocabulary",
        "with the tokens in the order [",
    ),
    "the mean of the batch": (
        "divergence",
        divergence(lambda s, t, _: chi(s, t, _) / s.exp().sum(-1).numel(), pointwise=False),
        "sum_over_positions",
        "one position at a time the value is",
    ),
    "an exponential that overflows": (
        "divergence",
        divergence(lambda s, t, _: t.exp() * (2 * (t - s)).exp() - t.exp()),
        "sharp_stays_finite",
        "with 60 times these logits",
    ),
    "a division by nothing": (
        "divergence",
        divergence(lambda s, t, _: (s.exp() - t.exp()).square() / t.exp()),
        "impossible_stays_finite",
        "with impossible tokens",
    ),
    "called pointwise, with a sampled tail": (
        "divergence",
        divergence(lambda s, t, _: chi(s, t, _) * s.exp().square().sum(-1, keepdim=True)),
        "head_and_sampled_tail",
        "with a sampled tail it is",
    ),
    "rounded to half precision": (
        "divergence",
        divergence(lambda s, t, _: s.exp() * (s - t).half().to(s.dtype)),
        "advantage_in_float32",
        "the advantage at equality is",
    ),
    "a mean over the candidates": (
        "divergence",
        divergence(lambda s, t, _: chi(s, t, _) / s.shape[-1], pointwise=False),
        "all_candidates_equal_the_full_form",
        "tail=bucket the value is",
    ),
    "called pointwise": (
        "divergence",
        divergence(lambda s, t, _: chi(s, t, _) * s.exp().square().sum(-1, keepdim=True)),
        "sampled_expectation",
        "the gradient of the sampled form is",
    ),
    "called an f-divergence": (
        "divergence",
        divergence(lambda s, t, _: (s.exp() - t.exp()).square()),
        "bucket_is_a_lower_bound",
        "with one bucket",
    ),
    "a slope of another divergence": (
        "divergence",
        divergence(chi, slope=F.DIVERGENCES["reverse_kl"].slope),
        "slope_is_the_derivative",
        "the slope's value is",
    ),
    "a gradient that leaks": (
        "weight",
        masked(lambda x: x.student_entropy, needs=("student_entropy",)),
        "weight_is_a_factor",
        "it carries a gradient; detach",
    ),
    "a negative weight": ("weight", masked(lambda x: -1.0), "weight_is_a_factor", "it is -1"),
    "a weight outside the mask": (
        "weight",
        F.Weight("mine", lambda x: torch.ones(len(x.loss_mask)), ""),
        "weight_is_a_factor",
        "tokens outside the mask",
    ),
    "a mask of bools": (
        "weight",
        F.Weight("mine", lambda x: x.loss_mask * (x.positions >= 0), "", needs=("positions",)),
        "weight_is_a_factor",
        "it is torch.bool; return float32",
    ),
    "an identity that is none": (
        "weight",
        F.Weight(
            "mine",
            lambda x, size=2.0: x.loss_mask.float() * (1 + size),
            "",
            identity={"size": 1.0},
        ),
        "weight_has_an_identity",
        "at {'size': 1.0} the supervised tokens weigh",
    ),
    "called a weight that drops nothing": (
        "weight",
        masked(lambda x: (x.positions > 0).float(), needs=("positions",), drops=False),
        "weight_drops_tokens",
        "although drops is False",
    ),
    "a need that is not stated": (
        "weight",
        masked(lambda x: (x.positions > 0).float()),
        "weight_reads_what_it_needs",
        "it raises TypeError",
    ),
    "called pointwise, with the batch's largest": (
        "weight",
        masked(
            lambda x: (x.logprobs / x.logprobs.min()).detach(), needs=("logprobs",), pointwise=True
        ),
        "weight_is_pointwise",
        "computed separately the tokens weigh",
    ),
    "not one on policy": (
        "correction",
        correction(lambda log_ratio, _: log_ratio.detach().float().exp() / 2),
        "correction_is_one_on_policy",
        "on policy it is 0.5",
    ),
    "a correction with a gradient": (
        "correction",
        correction(lambda log_ratio, _: log_ratio.float().exp()),
        "correction_is_a_factor",
        "it carries a gradient",
    ),
    "a place in the group": (
        "sample weight",
        F.SampleWeight("mine", lambda x: [1.0, *[0.0] * (len(x.kept) - 1)], ""),
        "sample_weight_is_a_factor",
        "in the order",
    ),
    "a completion without a weight": (
        "sample weight",
        F.SampleWeight("mine", lambda x: [1.0 for kept in x.kept if kept], ""),
        "sample_weight_is_a_factor",
        "weights",
    ),
    "an undeclared reading": (
        "sample weight",
        F.SampleWeight("mine", lambda x: [float(r or 0) for r in x.rewards] or [0.5], ""),
        "sample_weight_reads_what_it_needs",
        "with needs=[] only, it is [0.5]",
    ),
    "a division by the spread": (
        "advantage",
        F.Advantage(
            "mine", lambda rewards: [x / (max(rewards) - min(rewards)) for x in rewards], ""
        ),
        "advantage_of_each_reward",
        "ZeroDivisionError",
    ),
    "an exponential of the teacher's": (
        "reward",
        F.RewardRule("mine", lambda teacher, reward, gap: reward * (3 * gap).exp(), ""),
        "reward_rule_is_an_advantage",
        "the advantages are ",
    ),
}


def judge(wrong: str) -> str | None:
    kind, entry, name, _ = WRONG[wrong]
    (law,) = [law for law in LAWS[kind] if law.__name__ == name]
    return judge_law(law, entry, {}).counterexample


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_entry_breaks_its_law_with_a_counterexample(wrong: str) -> None:
    counterexample = judge(wrong)
    assert counterexample is not None and WRONG[wrong][-1] in counterexample


def test_every_law_is_seen_to_fail() -> None:
    seen = {(kind, law) for kind, _, law, _ in WRONG.values()}
    assert seen == {(kind, law.__name__) for kind, laws in LAWS.items() for law in laws}


def test_a_counterexample_is_the_smallest() -> None:
    counterexample = judge("a wrong sign")
    # One position and two tokens.
    assert counterexample is not None
    assert counterexample.startswith("at S = [0.") and counterexample.count(",") == 3


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, (_, table) in TABLES.items() for name in table if kind != "divergence"],
)
def test_what_the_command_checks_holds_for_practicums_own(kind: str, name: str) -> None:
    table = TABLES[kind][1]
    assert [verdict for verdict in check_laws(kind, table[name], {}) if not verdict.holds] == []


@pytest.mark.parametrize("name", ["adaptive_kl", "ce"])
def test_and_for_its_divergences(name: str) -> None:
    verdicts = check_laws("divergence", F.DIVERGENCES[name], {})
    assert [verdict for verdict in verdicts if not verdict.holds] == []
