"""An objective is data: it can be read back from its own text, and an invalid one gives the reason."""

import pytest
import torch
from pydantic import ValidationError

from practicum.functional.divergences import DIVERGENCES
from practicum.functional.estimators import CORRECTIONS
from practicum.functional.samples import SAMPLE_WEIGHTS
from practicum.functional.sequence import AGGREGATES
from practicum.functional.weights import WEIGHTS
from practicum.objective import (
    Full,
    Objective,
    Pathwise,
    Sampled,
    ScoreFunction,
    Term,
    TopK,
)
from practicum.objective.targets.log_linear import Config as LogLinear
from practicum.objective.targets.mixture import Config as Mixture
from practicum.objective.targets.teacher import Config as TeacherTarget


def one(**choices) -> Term:
    (term,) = Objective.model_validate(choices).losses
    return term


def test_one_term_needs_no_list():
    short = Objective.model_validate({"divergence": "jsd(0.3)", "aggregate": "seq_mean_token_mean"})
    long = Objective.model_validate(
        {"losses": [{"divergence": "jsd(0.3)"}], "aggregate": "seq_mean_token_mean"}
    )
    assert short == long
    assert Objective.model_validate({}) == Objective() == Objective.model_validate({"losses": [{}]})


def test_the_default_is_pathwise_reverse_kl_to_the_whole_teacher():
    term = Objective().losses[0]
    assert (term.signal, term.target, term.divergence.name, term.gradient) == (
        Full(),
        TeacherTarget(),
        "reverse_kl",
        Pathwise(),
    )
    assert one(signal="sampled").gradient == ScoreFunction()


CHOICES = [
    *({"divergence": name} for name in DIVERGENCES),
    *({"correction": name, "signal": "sampled"} for name in CORRECTIONS),
    *({"weights": name} for name in WEIGHTS),
    *({"samples": name} for name in SAMPLE_WEIGHTS),
    *(
        {"aggregate": name, "aggregate_norm": 8 if name.endswith("norm") else None}
        for name in AGGREGATES
    ),
    *(
        {"signal": signal}
        for signal in (
            "full",
            "sampled",
            "topk",
            "topk(3, union, renorm)",
            {"type": "topk", "k": 5},
        )
    ),
    *(
        {"target": target}
        for target in ("teacher(2)", "log_linear(0.5, 0.5)", "mixture(0.1)", "teacher", "contrast")
    ),
    *({"signal": signal} for signal in ("mc(4)", "score", "score(leave_one_out)")),
    {
        "signal": "text",
        "divergence": "ce",
        "samples": "ppl_softmax(student, 2)",
        "source": "dataset",
    },
    {"signal": "sampled", "reward": "add_advantage(0.5)", "clip": "advantage(-2, 2)"},
    {"signal": "sampled", "reward": "modulate(0.3, 0.1, leave_one_out)"},
    {"signal": "topk(8)", "estimator": "score_function(over=candidates)", "against": "reference"},
    *(
        {"estimator": estimator}
        for estimator in ("pathwise", "score_function(0.5, kl)", "k2_surrogate", "auto")
    ),
    {"weights": "threshold(above=-inf, statistic=divergence)"},
    {"weights": {"type": "prefix", "length": 7}},
    {"divergence": "jsd(1e-05)"},
    {
        "losses": [
            {"filter": "correct"},
            {"signal": "sampled", "coefficient": -0.1, "filter": "incorrect"},
        ]
    },
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_an_objective_reads_back_from_its_own_text(choice):
    objective = Objective.model_validate(choice)
    assert Objective.model_validate_json(objective.model_dump_json()) == objective
    assert Objective.model_validate(objective.model_dump()) == objective
    assert Objective.model_validate(objective) == objective


def test_arguments_may_be_given_by_place_by_name_or_as_a_mapping():
    expected = TopK(k=20, support="teacher", tail="renorm")
    for signal in ("topk(20, teacher, renorm)", "topk(20, tail=renorm, support=teacher)", expected):
        assert one(signal=signal).signal == expected
    assert (
        one(signal={"type": "topk", "k": 20, "support": "teacher", "tail": "renorm"}).signal
        == expected
    )
    assert (
        one(divergence="jsd(0.3)")
        == one(divergence="jsd(beta=0.3)")
        == one(divergence={"type": "jsd", "beta": 0.3})
    )
    assert one(target="log_linear(0.7, 0.3)").target == LogLinear(teacher=0.7, student=0.3)
    assert one(target="mixture(0.5)").target == Mixture(teacher=0.5)
    assert one(estimator="k2_surrogate").gradient.name == "k2_surrogate"


def test_defaults_are_filled_in():
    assert one(divergence="jsd").divergence.arguments == {"beta": 0.5}
    assert one(weights="entropy_top(model=teacher)").weights.arguments == {
        "fraction": 0.2,
        "model": "teacher",
    }
    assert one(correction="ratio_clip(high=0.3)").correction.arguments == {"low": 0.2, "high": 0.3}


WRONG = [
    (
        {"divergence": "revers_kl"},
        r"no divergence named 'revers_kl'; did you mean 'reverse_kl'\? known: adaptive_kl",
    ),
    ({"divergence": "xyzzy"}, "no divergence named 'xyzzy'; known: adaptive_kl, alpha"),
    ({"divergence": "jsd(bata=0.1)"}, r"has no parameter 'bata'; did you mean 'beta'\?"),
    (
        {"divergence": {"type": "jsd", "bata": 0.1}},
        r"divergence 'jsd' has no parameter 'bata'; did you mean 'beta'\?",
    ),
    (
        {"divergence": "jsd(1)"},
        r"jsd: beta must be in \(0, 1\) \(weight of the teacher in the mixture\), got 1",
    ),
    (
        {"divergence": "jsd(nan)"},
        "divergence 'jsd': beta must be a number, for example 0.5, got nan",
    ),
    (
        {"divergence": "jsd(half)"},
        "divergence 'jsd': beta must be a number, for example 0.5, got 'half'",
    ),
    (
        {"divergence": "reverse_kl(1)"},
        "divergence 'reverse_kl' takes no arguments, but 1 values were given",
    ),
    ({"divergence": 3}, "a divergence is written as a name or a call, not as 3; known: forward_kl"),
    (
        {"divergence": {"name": "jsd"}},
        "a divergence is written as a name or a call, not as {'name': 'jsd'}",
    ),
    (
        {"signal": "samples"},
        r"no signal named 'samples'; did you mean 'sampled'\? known: "
        "action, chunks, dual_space, entropy, full, hybrid, logits, mc, pair, projected, sampled, score, skewed, sorted, "
        "span_token, text, topk, unlikely",
    ),
    ({"signal": {"type": "top"}}, r"no signal named 'top'; did you mean 'topk'\?"),
    (
        {"signal": "topk(suport=student)"},
        r"signal 'topk' has no parameter 'suport'; did you mean 'support'\?",
    ),
    ({"signal": "topk(0)"}, "greater than or equal to 1"),
    ({"signal": "topk(5, studnet)"}, "'student', 'teacher', 'union' or 'intersection'"),
    ({"target": "techer"}, r"no target named 'techer'; did you mean 'teacher'\?"),
    ({"target": "teacher(-1)"}, "greater than or equal to 0"),
    (
        {"divergence": "kl"},
        r"'kl' does not say which way; write forward_kl for KL\(T \|\| S\) or reverse_kl",
    ),
    (
        {"estimator": "k1"},
        "k1 back-propagated has an expected gradient of zero; write score_function",
    ),
    (
        {"estimator": "k3"},
        "k3 back-propagated has the gradient of forward KL; write score_function with divergence: f",
    ),
    (
        {"estimator": "value_as_reward"},
        "says nothing about the token that was sampled there; write score_function",
    ),
    (
        {"signal": "topk(4, tail=drop)"},
        r"a partial sum over candidates \(tail 'drop'\) is not a divergence: .* write tail=",
    ),
    (
        {"signal": "text"},
        "signal 'text' has one label per token, the token itself; set divergence: ce",
    ),
    (
        {"signal": "text", "divergence": "ce", "estimator": "score_function"},
        "leave out target and estimator",
    ),
    (
        {"signal": "score", "estimator": "pathwise"},
        "signal 'score' is a reward, .* set estimator: score_function",
    ),
    (
        {"signal": "score", "divergence": "forward_kl"},
        "signal 'score' asks no teacher; leave out target, divergence",
    ),
    (
        {"signal": "score", "reward": "add_advantage"},
        "signal 'score' is the reward itself; leave out reward",
    ),
    (
        {"signal": "score", "weights": "trust"},
        "weights 'trust' needs a teacher, and signal 'score' uses none",
    ),
    (
        {"signal": "score", "weights": "entropy_top(model=teacher)"},
        "weights 'entropy_top' needs a teacher",
    ),
    (
        {"signal": "score", "weights": "threshold"},
        "weights 'threshold' needs a teacher, and signal 'score' uses none",
    ),
    (
        {"signal": "text", "divergence": "ce", "samples": "ppl_softmax(teacher)"},
        "samples 'ppl_softmax' needs a teacher",
    ),
    (
        {"signal": "mc", "estimator": "pathwise"},
        "no exact divergence; set estimator: score_function",
    ),
    (
        {"estimator": "score_function(over=candidates)"},
        r"candidates of a topk signal; set signal: topk\(16\)",
    ),
    (
        {"signal": "topk", "estimator": "score_function(1, over=candidates)"},
        "one state at a time; leave out gamma",
    ),
    (
        {"reward": "add_advantage"},
        "reward 'add_advantage' is added to an advantage; set estimator: score_function",
    ),
    ({"signal": "sampled", "clip": "loss"}, r"for an advantage write clip: advantage\(-5, 5\)"),
    (
        {"signal": "text", "divergence": "ce", "clip": "loss"},
        "clip 'loss' is for a divergence that is differentiated",
    ),
    (
        {"signal": "mc(4)", "clip": "entries"},
        "clip 'entries' is for a divergence that is differentiated",
    ),
    ({"clip": "advantage"}, r"for a divergence write clip: loss\(0.05\)"),
    (
        {"signal": "topk(4, teacher, renorm_teacher)"},
        "set divergence: forward_kl with estimator: pathwise",
    ),
    (
        {
            "signal": "topk(4, teacher, renorm_teacher)",
            "divergence": "ce",
            "estimator": "score_function",
        },
        "set divergence: forward_kl with estimator: pathwise",
    ),
    ({"signal": "sampled", "clip": "advantage(1, 5)"}, "a band without 0 changes the sign of some"),
    (
        {"signal": "sampled", "clip": "advantage(1, -1)"},
        "clip 'advantage' needs low <= 0 <= high, got 1.0 and -1.0",
    ),
    (
        {"signal": "topk", "weights": "accepted"},
        "weights 'accepted' ranks the whole vocabulary; set signal: full",
    ),
    ({"samples": "pass_rat"}, r"no sample weight named 'pass_rat'; did you mean 'pass_rate'\?"),
    ({"samples": "ppl_softmax(temperature=0)"}, "temperature must be positive, got 0"),
    ({"samples": "ppl_softmax(model=nobody)"}, "model must be student or teacher, got 'nobody'"),
    ({"target": "teacher(inf)"}, "finite number"),
    ({"estimator": "path_wise"}, r"no estimator named 'path_wise'; did you mean 'pathwise'\?"),
    ({"estimator": "score_function(2)"}, "less than or equal to 1"),
    (
        {"correction": "ratio_clop"},
        r"no correction named 'ratio_clop'; did you mean 'ratio_clip'\?",
    ),
    (
        {"correction": "ratio_clip(low=small)"},
        "correction 'ratio_clip': low must be a number, for example 0.2",
    ),
    ({"weights": "entropy-top"}, "is not a name with arguments"),
    ({"weights": "entropy_top(2)"}, r"fraction must be in \(0, 1\], got 2"),
    ({"weights": "entropy_top(model=nobody)"}, "got 'nobody'|no statistic named 'nobody"),
    ({"weights": "threshold(statistic=entropy)"}, "no statistic named 'entropy'|got 'entropy'"),
    (
        {"weights": "prefix(1.5)"},
        "weight 'prefix': length must be a whole number, for example 1024, got 1.5",
    ),
    ({"weights": {"type": "prefix", "length": True}}, "length must be a whole number"),
    ({"weights": "threshold(nan)"}, "above must be a number"),
    ({"coefficient": float("nan")}, "finite number"),
    ({"losses": []}, "losses is empty; leave it out for the default, or write at least one term"),
    ({"divergance": "jsd"}, "Extra inputs are not permitted"),
    ({"aggregate": "seq_mean_token_sum_norm"}, "needs aggregate_norm, for example the token limit"),
    (
        {"aggregate_norm": 5},
        "is only used by aggregate 'seq_mean_token_sum_norm', not by 'token_mean'",
    ),
    ({"aggregate": "seq_mean_token_sum_norm", "aggregate_norm": 0}, "greater than 0"),
    (
        {"signal": "sampled", "estimator": "pathwise"},
        "with signal 'sampled' set estimator: score_function",
    ),
    (
        {"signal": "sampled", "divergence": "mse"},
        "divergence 'mse' has no sampled-token form; use signal full",
    ),
    (
        {"divergence": "adaptive_kl", "estimator": "score_function"},
        "'adaptive_kl' has no sampled-token form",
    ),
    (
        {"divergence": "jsd", "estimator": "k2_surrogate"},
        "is the gradient of reverse_kl only; set divergence",
    ),
    (
        {"signal": "topk", "target": "teacher(2)"},
        "target 'teacher' must be renormalised .* set signal: full",
    ),
    ({"signal": "topk", "target": "log_linear(1, 1)"}, "target 'log_linear' must be renormalised"),
    ({"signal": "sampled", "target": "mixture(0.5)"}, "target 'mixture' must be renormalised"),
    (
        {"signal": "sampled", "target": "log_linear(2)", "divergence": "forward_kl"},
        "target 'log_linear' must be",
    ),
    (
        {"signal": "sampled", "estimator": "score_function(0, kl)"},
        "baseline 'kl' needs signal full or topk",
    ),
    (
        {"signal": "sampled", "weights": "threshold"},
        "weights 'threshold' needs the teacher's entropy",
    ),
    ({"signal": "sampled", "weights": "certain"}, "weights 'certain' needs the teacher's entropy"),
    (
        {"signal": "sampled", "weights": "entropy_top(model=teacher)"},
        "weights 'entropy_top' needs the teacher's entropy",
    ),
]


@pytest.mark.parametrize(("choice", "message"), WRONG, ids=lambda value: str(value)[:60])
def test_what_cannot_be_right_is_refused_with_what_to_write(choice, message):
    with pytest.raises(ValidationError, match=message):
        Objective.model_validate(choice)


def test_a_richer_term_lets_a_sampled_one_read_the_teachers_entropy():
    losses = [{"signal": "full"}, {"signal": "sampled", "weights": "threshold"}]
    assert Objective.model_validate({"losses": losses}).signal == Full()


def test_the_signal_is_the_richest_that_a_term_asks_for():
    terms = {
        "sampled": {"signal": "sampled"},
        "topk": {"signal": "topk(3)"},
        "full": {"signal": "full"},
    }

    def signal(*names):
        return Objective.model_validate({"losses": [terms[name] for name in names]}).signal

    assert signal("sampled") == Sampled()
    assert signal("sampled", "topk") == signal("topk", "sampled") == TopK(k=3)
    assert signal("topk", "full", "sampled") == Full()
    assert Objective.model_validate(
        {"losses": [{"signal": "topk(3)"}, {"signal": "topk(9)"}]}
    ).signal == TopK(k=9)


@pytest.mark.parametrize(
    "weights", ["certain(model=student)", "threshold(1, logprobs)", "entropy_top", "prefix(3)"]
)
def test_weights_of_the_student_need_no_teacher(weights):
    assert not one(signal="score", weights=weights).weighs_by_teacher


def test_only_terms_with_a_view_of_other_tokens_need_sequences():
    alone = [
        {},
        {"weights": "prefix"},
        {"weights": "threshold"},
        {"signal": "sampled"},
        {"correction": "ratio_clip"},
    ]
    together = [
        {"signal": "sampled", "estimator": "score_function(0.5)"},
        {"estimator": "score_function(0, group_mean)"},
        {"correction": "prefix_ratio"},
        {"weights": "entropy_top"},
        {"weights": "divergence_top"},
        {"weights": "soft_or"},
        {"weights": "scored_mean"},
        {"weights": "ce_scale"},
        {"samples": "ppl_softmax"},
    ]
    assert [one(**choice).needs_sequences for choice in alone] == [False] * len(alone)
    assert [one(**choice).needs_sequences for choice in together] == [True] * len(together)
    assert Objective.model_validate({"losses": [alone[0], together[0]]}).needs_sequences


def test_an_objective_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Objective().aggregate = "token_mean"  # type: ignore[misc]


def test_checking_an_objective_leaves_the_random_numbers_alone():
    before = torch.get_rng_state()
    Objective.model_validate({"weights": "entropy_top"})
    assert torch.equal(before, torch.get_rng_state())
