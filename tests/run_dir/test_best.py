"""The best step of a run: the rule over random scores, and steps that can never be the best."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.run_dir import BestMetric, BestTracker
from practicum.run_dir.best import METRICS

SIGN: dict[BestMetric, int] = {"accuracy": 1, "reverse_kl": -1}
READING: dict[BestMetric, str] = {
    "accuracy": "heldout_accuracy",
    "reverse_kl": "heldout_reverse_kl",
}


def evaluated(metric: BestMetric, score: float | None, *, collapsed: bool = False) -> dict:
    return {READING[metric]: score, "heldout_collapsed": float(collapsed)}


SCORES = st.lists(
    st.tuples(
        st.one_of(st.none(), st.just(math.nan), st.just(math.inf), st.floats(0, 5)), st.booleans()
    ),
    max_size=8,
)


@given(st.sampled_from(METRICS), SCORES)
def test_the_best_step_is_the_first_with_the_best_finite_score_of_a_sound_student(
    metric: BestMetric, scores: list[tuple[float | None, bool]]
) -> None:
    tracker = BestTracker(metric)
    for step, (score, collapsed) in enumerate(scores, start=1):
        tracker.update(step, evaluated(metric, score, collapsed=collapsed))
    able = [
        (SIGN[metric] * score, -step)
        for step, (score, collapsed) in enumerate(scores, start=1)
        if score is not None and math.isfinite(score) and not collapsed
    ]
    best = max(able, default=None)
    assert tracker.step == (None if best is None else -best[1])
    assert tracker.score == (None if best is None else SIGN[metric] * best[0])


@given(st.sampled_from(METRICS), SCORES, st.integers(0, 8))
def test_a_summary_of_the_first_part_can_stand_for_it(
    metric: BestMetric, scores: list[tuple[float | None, bool]], cut: int
) -> None:
    whole, first = BestTracker(metric), BestTracker(metric)
    for step, (score, collapsed) in enumerate(scores, start=1):
        whole.update(step, evaluated(metric, score, collapsed=collapsed))
        if step <= cut:
            first.update(step, evaluated(metric, score, collapsed=collapsed))
    second = BestTracker(metric)
    second.merge(first.summarize({}))
    for step, (score, collapsed) in list(enumerate(scores, start=1))[cut:]:
        second.update(step, evaluated(metric, score, collapsed=collapsed))
    assert (second.step, second.score) == (whole.step, whole.score)


@pytest.mark.parametrize("metrics", [{}, {"reward": 0.3}, {"heldout_reverse_kl": 0.1}])
def test_a_step_without_the_measure_is_never_the_best(metrics: dict[str, Any]) -> None:
    tracker = BestTracker("accuracy")
    assert not tracker.update(1, metrics) and tracker.step is None
    assert not BestTracker(None).update(1, {"heldout_accuracy": 1.0})


def test_an_estimate_stands_for_the_divergence_where_that_is_unknown() -> None:
    tracker = BestTracker("reverse_kl")
    assert tracker.update(1, {"heldout_reverse_kl_estimate": 0.4})
    assert not tracker.update(2, {"heldout_reverse_kl_estimate": 0.5})
    assert tracker.summarize({"heldout_reverse_kl_estimate": 0.5}) == {
        "metric": "reverse_kl",
        "step": 1,
        "score": 0.4,
        "last": 0.5,
    }
