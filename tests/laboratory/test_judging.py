"""Verdicts are computed: from numbers written by hand here, and always from all seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laboratory import Results
from laboratory.judging import combine_answers, judge_claim, judge_test
from laboratory.results import read_results, write_results
from laboratory.study import Better, Claim, Cost, Ratio, Reaches, Rises, Robust, Tie, Warned
from practicum.errors import DataError
from practicum.studies.compare import Point


def results(**arms: list[float]) -> Results:
    """Return arms with one accuracy per seed, on a straight line over ten steps of 100 operations each."""
    curves = {
        arm: {
            seed: [Point({"steps": 0.0, "flops": 0.0}, 0.0)]
            + [
                Point({"steps": float(step), "flops": 100.0 * step}, value * step / 10)
                for step in range(1, 11)
            ]
            for seed, value in enumerate(values)
        }
        for arm, values in arms.items()
    }
    readings = {arm: {"accuracy": dict(enumerate(values))} for arm, values in arms.items()}
    return Results("hand", "full", [0, 1, 2], readings, curves)


CLOSE = {"one": [0.80, 0.82, 0.81], "other": [0.70, 0.71, 0.70]}


@pytest.mark.parametrize(
    ("test", "arms", "answer", "shown"),
    [
        (
            Better(better="one", than="other"),
            CLOSE,
            "yes",
            "one - other, accuracy: +0.107 [+0.092, +0.121]",
        ),
        (Better(better="one", than="other", by=0.2), CLOSE, "no", "+0.107"),
        (Better(better="other", than="one"), CLOSE, "contrary", "-0.107"),
        (
            Better(better="one", than="other"),
            {"one": [0.5, 0.9, 0.7], "other": [0.6] * 3},
            "unresolved",
            "+0.100",
        ),
        (
            Better(better="one", than="other"),
            {"one": [0.5], "other": [0.2]},
            "unresolved",
            "+0.300 (one seed)",
        ),
        (
            Better(better="one", than="other"),
            {"one": [0.5, 0.5], "other": [0.25, 0.25]},
            "unresolved",
            "+0.250 (two equal seeds)",
        ),
        (Better(better="one", than="gone"), CLOSE, "missing", "not run"),
        (Better(better="one", than="other", at=5), CLOSE, "yes", "accuracy at step 5: +0.053"),
        (
            Better(better="one", than="other", at="equal_flops"),
            CLOSE,
            "yes",
            "accuracy at equal FLOPs: +0.107",
        ),
        (Tie(tie=("one", "other"), within=0.2), CLOSE, "yes", "+0.107"),
        (Tie(tie=("one", "other"), within=0.05), CLOSE, "no", "+0.107"),
        (Tie(tie=("one", "other"), within=0.11), CLOSE, "unresolved", "+0.107"),
        (Reaches(reaches="one", least=0.7), CLOSE, "yes", "one, accuracy: 0.81 [0.785, 0.835]"),
        (Reaches(reaches="one", least=0.8), CLOSE, "unresolved", "0.81 [0.785, 0.835]"),
        (Tie(tie=("one", "other"), within=0.5), CLOSE, "unresolved", "+0.107"),
        (Reaches(reaches="one", least=0.9), CLOSE, "no", "0.81"),
        (Reaches(reaches="one", most=0.5), CLOSE, "no", "0.81"),
        (Rises(rises="one", by=0.5), CLOSE, "yes", "one, accuracy from start to end: +0.810"),
        (
            Ratio(ratio="one", over="other", measure="accuracy", least=1.1),
            CLOSE,
            "yes",
            "1.15 [1.13, 1.17]",
        ),
        (Ratio(ratio="one", over="other", measure="accuracy", most=1.1), CLOSE, "no", "1.15"),
        (Ratio(ratio="one", over="one", measure="accuracy", least=0.9), CLOSE, "yes", "1 [1, 1]"),
        (Ratio(ratio="one", over="one", measure="accuracy", least=1.1), CLOSE, "no", "1 [1, 1]"),
        (Ratio(ratio="one", over="other", measure="accuracy", least=2), CLOSE, "no", "1.15"),
    ],
)
def test_a_test_answers_with_its_number(test, arms, answer, shown):
    found = judge_test(test, results(**arms))
    assert (found.answer, shown in found.text) == (answer, True), found


def test_the_doctors_word_is_what_it_was_before_the_run():
    said = {"one": {"verdict": "NO-GO", "because": ["P10 capability gap", "P12 pass rates"]}}
    found = replace(results(**CLOSE), doctor=said)
    answer = judge_test(Warned(warned="one"), found)
    assert (answer.answer, answer.text) == (
        "yes",
        "the doctor, before one: NO-GO, P10 capability gap; P12 pass rates",
    )
    assert judge_test(Warned(warned="one", verdict="GO"), found).answer == "no"
    assert judge_test(Warned(warned="other"), found).text == "the doctor, before other: not asked"


def test_costs_are_read_where_a_level_is_first_reached():
    fast, slow = [1.0, 1.0], [0.5, 0.5]
    found = judge_test(
        Cost(cost="slow", over="fast", level=0.4, factor=2), results(fast=fast, slow=slow)
    )
    assert found.answer == "yes"
    assert "2.0 to 2.0" in found.text
    assert (
        judge_test(
            Cost(cost="slow", over="fast", level=0.4, factor=3), results(fast=fast, slow=slow)
        ).answer
        == "no"
    )
    assert (
        judge_test(
            Cost(cost="slow", over="fast", level=0.4, most=2), results(fast=fast, slow=slow)
        ).answer
        == "yes"
    )
    assert (
        judge_test(
            Cost(cost="slow", over="fast", level=0.4, most=1), results(fast=fast, slow=slow)
        ).answer
        == "no"
    )


def test_an_arm_that_never_arrives_gives_a_lower_bound():
    found = judge_test(
        Cost(cost="never", over="fast", level=0.4, factor=2),
        results(fast=[1.0] * 2, never=[0.2] * 2),
    )
    assert found.answer == "yes"
    assert found.text.endswith("2.5 to 2.5, at least, as never does not arrive in 2 of 2 seeds")
    far = judge_test(
        Cost(cost="never", over="fast", level=0.4, factor=10),
        results(fast=[1.0] * 2, never=[0.2] * 2),
    )
    assert far.answer == "unresolved", "a lower bound denies nothing"
    assert judge_test(
        Cost(cost="fast", over="never", level=0.4, factor=1), results(fast=[1.0], never=[0.2])
    ).answer == ("unresolved")


@pytest.mark.parametrize("level", [0.4, 0.9])
@pytest.mark.parametrize("arm", ["fast", "slow"])
def test_a_student_that_begins_at_the_level_costs_nothing_and_decides_nothing(level, arm):
    found = results(fast=[1.0] * 2, slow=[0.95] * 2)
    curve = found.curves[arm][1]
    curve[0] = replace(curve[0], accuracy=level)
    for factor in (0.001, 1000):
        judged = judge_test(Cost(cost="slow", over="fast", level=level, factor=factor), found)
        assert judged.answer == "unresolved"
        assert judged.text.endswith(f"{arm} begins there in 1 of 2 seeds")


def try_rates(scores: Mapping[float, Sequence[float | None]]) -> Results:
    """Return the results of a sweep from the accuracies of each seed; None is a failed run."""
    rows = []
    for rate, values in scores.items():
        by_seed = {str(seed): value for seed, value in enumerate(values) if value is not None}
        mean = fmean(by_seed.values()) if by_seed else None
        rows.append({"arm": "one", "learning_rate": rate, "accuracy": mean, "by_seed": by_seed})
    return Results("hand", "full", [0], {}, tried=rows)


def test_a_robust_arm_loses_little_near_its_best_learning_rate():
    scores = {1e-3: (0.9, 0.8), 3e-3: (0.86, 0.77), 1e-2: (0.0, 0.0), 5e-4: (0.88, 0.79)}
    test = Robust(robust="one")
    found = judge_test(test, try_rates(scores))
    assert found.answer == "yes" and "0.81 to 0.85, best at 0.001" in found.text
    edge = judge_test(test, try_rates({rate: scores[rate] for rate in (1e-3, 3e-3)}))
    assert edge.answer == "unresolved" and "no lower rate was tried" in edge.text
    # A failed run is a zero, also at the rate that is best without it.
    failed = judge_test(test, try_rates(scores | {1e-3: (0.99, None)}))
    assert "best at 0.0005" in failed.text
    # Every seed decides: the mean loses the same, and one seed loses nothing.
    assert judge_test(test, try_rates(scores | {3e-3: (0.5, 0.4)})).answer == "no"
    assert judge_test(test, try_rates(scores | {3e-3: (0.1, 0.8)})).answer == "unresolved"
    assert judge_test(test, try_rates(scores | {3e-3: (None, None)})).answer == "no"
    one_seed = {rate: values[:1] for rate, values in scores.items()}
    assert judge_test(test, try_rates(one_seed)).answer == "unresolved"


def divide_flops(found: Results, arm: str, by: float) -> None:
    for curve in found.curves[arm].values():
        curve[:] = [
            Point({**point.spent, "flops": point.spent["flops"] / by}, point.accuracy)
            for point in curve
        ]


def test_a_comparison_after_equal_steps_is_also_made_at_equal_operations():
    arms = results(one=[0.80, 0.82, 0.81], cheap=[0.60, 0.61, 0.60])
    divide_flops(arms, "cheap", 2)
    claim = Claim(claim="c", paper="1", theirs="t", tests=(Better(better="one", than="cheap"),))
    verdict, judgements = judge_claim(claim, arms)
    assert [judgement.answer for judgement in judgements] == ["yes", "contrary"]
    assert verdict == "holds in part" and "at equal FLOPs: -0.198" in judgements[1].text
    both = (*claim.tests, Better(better="one", than="cheap", at="equal_flops"))
    assert len(judge_claim(claim.model_copy(update={"tests": both}), arms)[1]) == 2


def test_an_untrained_arm_is_not_compared_at_its_operations():
    arms = results(one=[0.80, 0.82, 0.81], merged=[0.60, 0.61, 0.60])
    divide_flops(arms, "merged", 1000)
    claim = Claim(claim="c", paper="1", theirs="t", tests=(Better(better="one", than="merged"),))
    verdict, judgements = judge_claim(claim, arms)
    assert verdict == "holds" and len(judgements) == 1


def test_equal_seeds_have_no_p():
    found = judge_test(Better(better="one", than="other"), results(one=[0.5] * 3, other=[0.25] * 3))
    assert found.p is None and found.answer == "yes"
    close = judge_test(Better(better="one", than="other"), results(**CLOSE))
    assert close.p is not None and close.p < 0.01


def test_a_claim_holds_where_all_of_its_tests_do():
    assert combine_answers(["yes", "yes"]) == "holds"
    assert (
        combine_answers(["yes", "no"]) == combine_answers(["yes", "unresolved"]) == "holds in part"
    )
    assert combine_answers(["no", "yes"]) == "does not hold here", "the first test decides"
    assert combine_answers(["contrary", "yes"]) == "the contrary holds here"
    assert (
        combine_answers(["unresolved", "yes"]) == combine_answers(["missing", "yes"])
    ) and combine_answers(["unresolved"]) == "not resolved"
    assert combine_answers(["missing", "missing"]) == "not run"


@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=5),
    st.lists(st.floats(0, 1), min_size=2, max_size=5),
)
def test_better_and_worse_are_never_both_true(one, other):
    found = results(one=one, other=other)
    answers = {
        judge_test(Better(better="one", than="other"), found).answer,
        judge_test(Better(better="other", than="one"), found).answer,
    }
    assert answers != {"yes"}


def test_results_read_back_to_the_same_verdicts(tmp_path):
    written = results(**CLOSE)
    write_results(tmp_path / "results.json", written)
    read = read_results(tmp_path / "results.json")
    claim = Claim(
        claim="c", paper="p", theirs="t", tests=(Better(better="one", than="other", at=5),)
    )
    assert judge_claim(claim, read) == judge_claim(claim, written)


def test_a_measure_that_is_only_known_at_the_end_says_so(tmp_path):
    readings = {"one": {"length": {0: 4.0}, "accuracy/a": {0: 0.5}, "before/accuracy/a": {0: 0.75}}}
    found = Results("hand", "full", [0], readings)
    with pytest.raises(
        DataError, match="length is only measured at the end of a run; set `at: end`"
    ):
        found.get_values("one", "length", 5)
    with pytest.raises(
        DataError,
        match="accuracy/a is only measured at a run's start and end; set `at: start` or `at: end`",
    ):
        found.get_values("one", "accuracy/a", 5)
    assert found.get_values("gone", "length", "start") == {}
    (tmp_path / "results.json").write_text('{"name": "x"}')
    with pytest.raises(
        DataError, match=r"not the results of a reproduction .*run python -m laboratory again"
    ):
        read_results(tmp_path / "results.json")


def test_what_a_domain_lost_and_won_back_is_read_from_both_ends_of_its_runs():
    found = Results(
        "hand",
        "full",
        [0, 1, 2],
        {
            "recovered": {
                "accuracy/old": {0: 0.8, 1: 0.9, 2: 0.85},
                "before/accuracy/old": {0: 0.1, 1: 0.2, 2: 0.15},
            },
            "teacher": {"accuracy/old": {0: 0.9, 1: 1.0, 2: 0.95}},
        },
    )
    fall = judge_test(
        Better(better="teacher", than="recovered", measure="accuracy/old", at="start", by=0.5),
        found,
    )
    assert (fall.answer, fall.text) == (
        "yes",
        "teacher - recovered, accuracy/old at the start: +0.800 [+0.800, +0.800]",
    )
    rise = judge_test(Rises(rises="recovered", measure="accuracy/old", by=0.5), found)
    assert (rise.answer, rise.text) == (
        "yes",
        "recovered, accuracy/old from start to end: +0.700 [+0.700, +0.700]",
    )
