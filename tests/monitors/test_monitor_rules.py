"""Each monitor raises an alarm when its rule is broken, and is silent for the numbers of a healthy run."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.monitors import MONITORS, MonitorSettings, Watch
from practicum.recipe import load_recipe, resolve_recipe

HEALTHY = {
    "rollouts": 16.0,
    "tokens": 64.0,
    "length": 20.0,
    "truncated": 0.3,
    "grad_norm": 1.0,
    "skipped": 0.0,
    "empty_updates": 0.0,
    "empty": 0.1,
    "reverse_kl": 0.5,
    "student_entropy": 1.0,
    "teacher_entropy": 1.0,
    "student_entropy_at_0": 1.0,
    "student_entropy_at_64": 1.0,
    "overlap": 0.7,
    "overlap_mass": 0.98,
    "entropy_gap": 0.3,
    "repetition": 0.0,
    "repeated_tokens": 0.02,
    "repeated_gap": -0.1,
    "repeated_gap_error": 0.02,
    "stop_gap_p90": -0.5,
    "far_gaps": 0.001,
    "concentration": 0.1,
    "trap_rate": 0.1,
    "probability_error": 1.0,
    "effective_share": 1.0,
    "chi_squared": 0.0,
    "importance_mean": 1.0,
    "staleness_p95": 0.0,
    "unanswered": 0.0,
    "constant_teacher": 0.0,
    "unique_answers": 0.9,
    "distinct_2": 0.8,
    "signal_share": 1.0,
    "heldout_gain": 0.1,
    "heldout_gain_high": 0.2,
    "heldout_overconfidence": 0.15,
    "heldout_surer": 0.02,
    "heldout_surer_low": -0.05,
    "teacher_share/a": 0.5,
    "teacher_share/b": 0.5,
    "weightless": 0.2,
    "settled_prompts": 0.5,
    "wrong_before": 0.2,
    "wrong_after": 0.25,
    "turns_after_wrong": 40.0,
    "reward": 0.3,
    "scorer-critic/gap": 0.1,
    "calls_surplus": 0.2,
    "scorer-critic/agreement": 0.8,
}

TROUBLE: dict[str, dict[str, Any]] = {
    "M1": {"nonfinite": 2.0},
    "M3": {"grad_norm": 0.05},
    "M4": {"truncated": 0.6},
    "M5": {"repetition": 0.11},
    "M6": {"length": 32.0},
    "M7": {"repeated_gap": 0.2, "repeated_tokens": 0.2},
    "M8": {"stop_gap_p90": -20.0},
    "M10": {"overlap_mass": 0.8},
    "M12": {"student_entropy": 0.3},
    "M13": {"student_entropy_at_64": 4.5},
    "M14": {"trap_rate": 0.6},
    "M16": {"probability_error": 1.08},
    "M17": {"effective_share": 0.2},
    "M19": {"unanswered": 0.05},
    "M20": {"unique_answers": 0.4, "student_entropy": 0.3},
    "M21": {"heldout_gain_high": -0.1, "heldout_gain": -0.3},
    "M22": {"signal_share": 0.0},
    "M23": {"weightless": 0.7},
    "M24": {"settled_prompts": 0.95},
    "M29": {"reverse_kl": 2.6},
    "M30": {"heldout_overconfidence": 0.4, "heldout_surer": 0.27, "heldout_surer_low": 0.1},
    "M26": {"teacher_share/a": 0.9, "teacher_share/b": 0.1},
    "M32": {"empty_updates": 1.0},
    "M33": {"empty": 0.8},
    "M34": {"wrong_after": 0.6},
    "M35": {"constant_teacher": 1.0},
    "M36": {"scorer-critic/gap": 0.6, "scorer-critic/agreement": 0.5},
    "M37": {"calls_surplus": 2.0},
    "M38": {"scorer-critic/skipped": 2.0},
    "M39": {"heldout_reverse_kl": 0.8, "heldout_reverse_kl_rise": 0.55},
    "M40": {"heldout_reverse_kl": 0.8, "heldout_reverse_kl_rise": 0.55},
}

RECIPE = resolve_recipe(load_recipe("smoke/toy"))
REWARDED = resolve_recipe(load_recipe("papers/kdrl"))
SCORED = resolve_recipe(load_recipe("papers/ppo"))
OURS = {"M24": REWARDED, "M36": SCORED, "M38": SCORED, "M40": REWARDED}


def watch(recipe: dict[str, Any] = RECIPE, **settings: MonitorSettings) -> Watch:
    return Watch(recipe, settings)


def rows(*parts: tuple[int, dict[str, float]]) -> list[dict[str, Any]]:
    """Return this many rows of each kind, numbered from 1; a part lists the differences from a healthy step."""
    changes = [part for count, part in parts for _ in range(count)]
    return [{"step": number, **HEALTHY, **change} for number, change in enumerate(changes, start=1)]


def test_a_healthy_run_is_quiet():
    for recipe in (RECIPE, REWARDED):
        alarms = watch(recipe).replay(rows((100, {})))
        assert {alarm.id for alarm in alarms} <= {"M9"}, (
            "numbers that never move are stalled, and nothing else"
        )


@pytest.mark.parametrize(
    ("before", "after", "is_alarm"),
    [
        (0.368, 5.656, True),
        (0.368, 1.2, True),
        (0.368, 1.0, False),
        (0.02, 0.15, False),
        (0.02, 0.23, True),
        (3.0, 3.5, False),
        (-0.01, 0.25, True),
    ],
)
@pytest.mark.parametrize(("recipe", "name"), [(RECIPE, "M39"), (REWARDED, "M40")])
def test_one_evaluation_far_from_the_teacher_is_enough(
    before: float, after: float, is_alarm: bool, recipe: dict[str, Any], name: str
) -> None:
    """Three times as far and 0.2 nats per token farther; no baseline of steps is needed."""
    readings = {"heldout_reverse_kl": after, "heldout_reverse_kl_rise": after - before}
    alarms = watch(recipe).replay([{"step": 1, **HEALTHY, **readings}])
    assert {alarm.id for alarm in alarms} & {"M39", "M40"} == ({name} if is_alarm else set())
    assert [alarm.action for alarm in alarms if alarm.id == name] == is_alarm * [
        "stop" if name == "M39" else "warn"
    ]


@pytest.mark.parametrize("recipe", [RECIPE, REWARDED])
def test_twenty_steps_without_a_right_completion_are_told_once(recipe: dict[str, Any]):
    def count(*parts: tuple[int, dict[str, float]]) -> list[int]:
        alarms = watch(recipe).replay(rows(*parts))
        return [alarm.step for alarm in alarms if alarm.id == "M41"]

    wrong = {"reward": 0.0}
    assert count((40, wrong)) == [20]
    assert count((19, wrong), (1, {"reward": 0.02}), (19, wrong)) == []
    assert count((5, {}), (30, wrong)) == [25]


def test_a_task_without_a_verifier_has_no_right_completions_to_miss():
    unrewarded = {name: value for name, value in HEALTHY.items() if name != "reward"}
    alarms = watch().replay([{"step": step, **unrewarded} for step in range(1, 60)])
    assert "M41" not in {alarm.id for alarm in alarms}


@pytest.mark.parametrize("name", TROUBLE)
def test_trouble_is_told_after_as_many_steps_as_the_table_says(name: str):
    alarms = watch(OURS.get(name, RECIPE)).replay(rows((20, {}), (14, TROUBLE[name])))
    (alarm,) = [alarm for alarm in alarms if alarm.id == name][:1]
    monitor = MONITORS[name]
    assert 20 + monitor.persistence <= alarm.step <= 20 + monitor.persistence + 4
    assert alarm.action == monitor.action or alarm.action == (monitor.escalation or ("", ""))[1]
    assert alarm.describe().startswith(
        f"{name} {monitor.name} ({alarm.action}) at step {alarm.step}: {alarm.reading} "
    )
    assert alarm.n == 16 and alarm.patch


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        ({}, True),
        ({"reward": 0.4}, False),
        ({"scorer-critic/agreement": 0.7}, False),
        ({"scorer-critic/gap": 0.2}, False),
    ],
)
def test_m36_needs_a_gap_without_a_reward_or_agreement(change: dict[str, float], is_told: bool):
    trouble = {**TROUBLE["M36"], **change}
    ids = {alarm.id for alarm in watch(OURS["M36"]).replay(rows((20, {}), (8, trouble)))}
    assert ("M36" in ids) == is_told
    assert "M36" not in {alarm.id for alarm in watch().replay(rows((20, {}), (8, trouble)))}, (
        "this recipe learns from no scorer"
    )


def test_m9_needs_a_flat_divergence_too():
    assert "M9" in {alarm.id for alarm in watch().replay(rows((40, {})))}
    falling = [row | {"reverse_kl": 0.5 * 0.99 ** row["step"]} for row in rows((40, {}))]
    assert "M9" not in {alarm.id for alarm in watch().replay(falling)}


def test_m11_rises_over_six_spans():
    rising = [
        row | {"entropy_gap": 0.3 + 0.01 * max(row["step"] - 60, 0)} for row in rows((95, {}))
    ]
    assert "M11" in {alarm.id for alarm in watch().replay(rising)}


def test_m12_and_m20_are_quiet_where_the_teacher_is_as_sure():
    sure = {"student_entropy": 0.3, "teacher_entropy": 0.3, "unique_answers": 0.3}
    assert not {"M12", "M20"} & {alarm.id for alarm in watch().replay(rows((20, {}), (9, sure)))}


def test_m12_and_m20_are_quiet_where_the_teacher_is_nearly_certain_itself():
    """Medians of the 135M model's healthy runs after ten steps: 0.04 and 0.13 nats, and 1.3 at the start."""
    both = {"teacher_entropy": 1.0, "student_entropy": 1.3}
    alike = {"student_entropy": 0.04, "unique_answers": 0.3}
    certain, collapsed = alike | {"teacher_entropy": 0.13}, alike | {"teacher_entropy": 0.6}
    for end, alarms in ((certain, set()), (collapsed, {"M12", "M20"})):
        assert {"M12", "M20"} & {
            alarm.id for alarm in watch().replay(rows((20, both), (9, end)))
        } == alarms


def test_m12_leaves_answers_without_text_to_m33():
    silent = rows((20, {}), (9, {"student_entropy": 0.1, "empty": 0.9}))
    assert {"M12", "M33"} & {alarm.id for alarm in watch().replay(silent)} == {"M33"}


def test_m32_leaves_numbers_that_are_not_finite_to_m1():
    broken = rows((20, {}), (5, {"empty_updates": 1.0, "nonfinite": 2.0}))
    assert {"M1", "M32"} & {alarm.id for alarm in watch().replay(broken)} == {"M1"}


@pytest.mark.parametrize(("name", "patch"), [("papers/scope", None), ("papers/grpo", "rollout.n")])
def test_m32_proposes_to_learn_from_every_answer_where_a_filter_left_none(
    name: str, patch: str | None
):
    recipe = resolve_recipe(load_recipe(name))
    filtered = [
        place for place, term in enumerate(recipe["objective"]["losses"]) if term["filter"] != "all"
    ]
    (alarm,) = [
        alarm
        for alarm in watch(recipe).replay(rows((20, {}), (4, TROUBLE["M32"])))
        if alarm.id == "M32"
    ]
    assert (patch or f"objective.losses.{filtered[0]}.filter=all") in " ".join(alarm.patch)


def test_m20_is_quiet_where_answers_became_right():
    alike, right = {"unique_answers": 0.3, "student_entropy": 0.2}, {"pass_at_n": 0.9}
    history = [row | {"pass_at_n": 0.5} for row in rows((20, {}))]
    better = [{"step": 20 + n, **HEALTHY, **alike, **right} for n in range(1, 9)]
    assert "M20" not in {alarm.id for alarm in watch().replay([*history, *better])}
    worse = [row | {"pass_at_n": 0.3} for row in better]
    assert "M20" in {alarm.id for alarm in watch().replay([*history, *worse])}


def test_m18_needs_a_level():
    old = rows((5, {}), (4, {"staleness_p95": 9.0}))
    assert "M18" not in {alarm.id for alarm in watch().replay(old)}
    allowed = watch(M18=MonitorSettings(level=8.0)).replay(old)
    assert [(alarm.id, alarm.step) for alarm in allowed] == [("M18", 7)]


@pytest.mark.parametrize(
    "quiet",
    [
        {"heldout_surer": 0.05},
        {"heldout_overconfidence": 0.05, "heldout_surer": 0.3},
        {"heldout_surer_low": -0.01},
    ],
    ids=["it was so from the start", "it is no more than earned", "it may be chance"],
)
def test_m30_needs_a_level_a_change_and_more_than_chance(quiet: dict[str, float]):
    worse = rows((20, {}), (4, {**TROUBLE["M30"], **quiet}))
    assert "M30" not in {alarm.id for alarm in watch().replay(worse)}


def test_m30_counts_evaluations_and_not_steps():
    names = [name for name in HEALTHY if name.startswith("heldout_")]
    history = rows((40, TROUBLE["M30"]))
    sparse = [
        {k: v for k, v in row.items() if k not in names or row["step"] % 10 == 0} for row in history
    ]
    assert [(a.id, a.step, a.baseline) for a in watch().replay(sparse) if a.id == "M30"] == [
        ("M30", 20, 0.13)
    ]


def test_m27_looks_at_the_step_after_a_copy():
    teacher = {
        "type": "privileged",
        "teacher": {"type": "self", "weights": "periodic", "period": 4},
        "system": "ab",
    }
    recipe = RECIPE | {"teacher": teacher}
    shocked = [
        row | {"reverse_kl": 0.1 if (row["step"] - 1) % 4 == 0 else 0.5} for row in rows((12, {}))
    ]
    alarms = [alarm for alarm in watch(recipe).replay(shocked) if alarm.id == "M27"]
    assert [alarm.step for alarm in alarms] == [9], (
        "at the second copy in a row, and once while it continues"
    )
    assert alarms[0].baseline == 0.5 and alarms[0].patch == ["teacher.teacher.weights=ema"]
    assert "M27" not in {alarm.id for alarm in watch().replay(shocked)}, (
        "an ordinary teacher is not copied"
    )


def test_m21_counts_evaluations_and_ends_a_run_at_the_third():
    seen = watch(RECIPE)
    calls = []
    for step in range(1, 41):
        row = dict(HEALTHY)
        del row["heldout_gain_high"], row["heldout_gain"]
        if step % 8 == 0:
            row |= {"heldout_gain_high": -0.1, "heldout_gain": -0.3}
        calls += [
            (alarm.step, alarm.action) for alarm in seen.judge(step, row) if alarm.id == "M21"
        ]
    assert calls == [(16, "checkpoint"), (24, "stop")]


def evaluated(
    accuracies: list[float], every: int = 1, gain: float | None = None
) -> list[dict[str, Any]]:
    """Return rows with these held-out accuracies, one per `every` steps; `gain` is the first gain since the start."""
    found: list[dict[str, Any]] = [{"step": step} for step in range(1, len(accuracies) * every + 1)]
    for row, accuracy in zip(found[every - 1 :: every], accuracies, strict=True):
        row["heldout_accuracy"] = accuracy
        if gain is not None:
            row["heldout_gain"] = accuracy - accuracies[0] + gain
    return found


def plateaus(rows: list[dict[str, Any]], **settings: Any) -> list[int]:
    """Return the steps at which M31 asks to finish."""
    found = watch(M31=MonitorSettings(**{"action": "finish", **settings})).replay(rows)
    return [alarm.step for alarm in found if alarm.id == "M31"]


@pytest.mark.parametrize(
    ("accuracies", "step"),
    [
        ([0.1, 0.2, 0.3, 0.4, 0.5], None),
        ([0.1, 0.5, 0.5, 0.5, 0.5], 5),
        ([0.1, 0.5, 0.4, 0.3, 0.2], 5),
        ([0.5, 0.5, 0.5, 0.53, 0.5, 0.5], None),
        ([0.5, 0.51, 0.52, 0.53, 0.54, 0.55, 0.56], None),
        ([0.5, 0.52, 0.52, 0.51], 4),
        ([0.0, 0.0, 0.0, 0.0, 0.0], None),
        ([1.0, 1.0, 1.0, 1.0], 4),
    ],
    ids=[
        "it rises",
        "it stands",
        "it falls",
        "it rises in time",
        "small rises count together",
        "a rise of just the change is none",
        "there is nothing yet",
        "there is no more",
    ],
)
def test_m31_is_patient_for_three_evaluations(accuracies: list[float], step: int | None):
    assert plateaus(evaluated(accuracies)) == ([] if step is None else [step])
    sparse = plateaus(evaluated(accuracies, every=30))
    assert sparse == ([] if step is None else [30 * step]), (
        "evaluations count, however far apart, and not steps"
    )


def test_m31_compares_the_first_evaluation_with_the_start():
    standing = [0.5, 0.5, 0.5]
    assert plateaus(evaluated(standing)) == [], "the first evaluation has nothing to compare with"
    assert plateaus(evaluated(standing, gain=0.0)) == [3]
    assert plateaus(evaluated(standing, gain=0.3)) == []


@given(st.lists(st.floats(0, 1, allow_nan=False), max_size=12), st.integers(1, 4))
def test_m31_finishes_where_the_last_rise_is_patience_ago(accuracies: list[float], patience: int):
    steps = plateaus(evaluated(accuracies), persistence=patience, level=-1.0)
    for step in steps:
        before, waited = accuracies[: step - patience], accuracies[step - patience : step]
        assert before and max(waited) <= max(before) + 0.02 + 1e-9
    if len(accuracies) > patience and max(accuracies) - min(accuracies) <= 0.02:
        assert steps == [patience + 1]


def test_m31_is_off_unless_it_is_asked_for():
    assert watch().replay(evaluated([0.5] * 9)) == []
    (alarm,) = watch(M31=MonitorSettings(action="finish")).replay(evaluated([0.5] * 9))
    assert alarm.describe() == (
        "M31 plateau (finish) at step 4: heldout_accuracy 0.5 (baseline 0.5); rule: over 0, and no more than 0.02 above "
        f"its last rise, in 3 evaluations in a row; try optimizer.learning_rate={RECIPE['optimizer']['learning_rate'] / 2}"
    )


def test_a_divergence_that_stays_where_it_began_is_stalled_and_one_that_falls_is_not() -> None:
    still = [{**row, "overlap": 0.5 + 0.02 * (row["step"] % 2)} for row in rows((50, {}))]
    assert "M9" in {alarm.id for alarm in watch().replay(still)}
    falling = [row | {"reverse_kl": 0.5 * 0.99 ** row["step"]} for row in still]
    assert "M9" not in {alarm.id for alarm in watch().replay(falling)}


@pytest.mark.parametrize(
    ("divergence", "patch"),
    [(0.5, "objective.losses.0.weights=trust"), (5.0, "optimizer.learning_rate=")],
)
def test_the_remedy_of_unlikely_stops_is_a_lower_rate_if_the_divergence_has_doubled(
    divergence: float, patch: str
) -> None:
    steps = rows((12, {}), (4, {"stop_gap_p90": -20.0, "reverse_kl": divergence}))
    (alarm,) = [
        alarm
        for alarm in Watch(RECIPE, {}, lambda overrides: True).replay(steps)
        if alarm.id == "M8"
    ]
    assert alarm.patch[0].startswith(patch)


@pytest.mark.parametrize(("end", "is_alarm"), [(0.5, True), (0.3, False)])
def test_a_loss_of_diversity_is_no_alarm_while_the_student_comes_nearer(
    end: float, is_alarm: bool
) -> None:
    trouble = {"unique_answers": 0.4, "pass_at_n": 0.2, "reverse_kl": end}
    steps = [
        row | {"pass_at_n": row.get("pass_at_n", 0.8)}
        for row in rows((12, {"pass_at_n": 0.8}), (8, trouble))
    ]
    assert ("M20" in {alarm.id for alarm in watch().replay(steps)}) == is_alarm
