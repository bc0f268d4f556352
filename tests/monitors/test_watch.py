"""The mechanics of alarms: persistence, hysteresis, escalation, changes, and that they only depend on the rows."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from practicum.cli.listing import list_names
from practicum.errors import RecipeError
from practicum.monitors import MONITORS, MonitorSettings, Watch, find_worst_alarm
from practicum.monitors.table import Monitor
from practicum.recipe import (
    Recipe,
    list_recipe_names,
    load_recipe,
    override,
    parse_recipe,
    resolve_recipe,
)
from practicum.runs import stages

RECIPE = resolve_recipe(load_recipe("smoke/toy"))


def looping(*shares: float) -> list[dict[str, Any]]:
    """Return rows with these shares of loops, after ten without any."""
    return [
        {"step": n, "repetition": value} for n, value in enumerate([*[0.0] * 10, *shares], start=1)
    ]


def told(rows: list[dict[str, Any]], **settings: Any) -> list[tuple[int, str]]:
    """Return step and action of the alarms of M5."""
    watch = Watch(RECIPE, {"M5": MonitorSettings(**settings)})
    return [(alarm.step, alarm.action) for alarm in watch.replay(rows) if alarm.id == "M5"]


def test_one_hit_is_no_alarm_and_two_in_a_row_are():
    assert told(looping(0.1, 0.0, 0.1, 0.0)) == []
    assert told(looping(0.1, 0.1)) == [(12, "checkpoint")]
    assert told(looping(0.1, 0.1), persistence=1) == [(11, "checkpoint")]


def test_an_alarm_is_told_again_only_after_the_trouble_was_over():
    assert told(looping(0.1, 0.1, 0.1, 0.09, 0.1, 0.1)) == [(12, "checkpoint")], (
        "0.09 is within the hysteresis of 0.1"
    )
    assert told(looping(0.1, 0.1, 0.079, 0.1, 0.1)) == [(12, "checkpoint"), (15, "checkpoint")]


def test_trouble_that_grows_calls_for_more():
    assert told(looping(0.1, 0.1, 0.3, 0.3, 0.3)) == [(12, "checkpoint"), (14, "stop")]
    assert told(looping(0.3, 0.3), action="warn") == [(12, "warn")], (
        "the action that was written is the only one"
    )


def test_thresholds_can_be_others():
    assert told(looping(0.1, 0.1), level=0.2) == []
    assert told(looping(0.1, 0.1), action="off") == []


def test_the_gravest_action_counts():
    watch = Watch(RECIPE, {})
    rows = [row | {"signal_share": 0.0} for row in looping(0.3, 0.3)]
    alarms = [alarm for alarm in watch.replay(rows) if alarm.step == 12]
    worst = find_worst_alarm(alarms)
    assert worst is not None and worst.id == "M5" and find_worst_alarm([]) is None


def test_changes_add_up_and_come_out_the_same_when_they_are_replayed():
    settings = {"M5": MonitorSettings.model_validate({"set": {"optimizer.learning_rate": "x0.5"}})}
    rows = looping(0.1, 0.1, 0.0, 0.1, 0.1)
    rate = RECIPE["optimizer"]["learning_rate"]
    whole = [alarm for alarm in Watch(RECIPE, settings).replay(rows) if alarm.id == "M5"]
    assert [alarm.set["optimizer.learning_rate"] for alarm in whole] == pytest.approx(
        [rate / 2, rate / 4]
    )
    resumed = Watch(RECIPE, settings)
    first = resumed.replay(rows[:13])
    assert [*first, *resumed.replay(rows[13:])] == whole
    assert "becomes" in whole[0].describe()


def test_a_row_that_was_written_judges_as_the_step_did():
    row = {"step": 11, "repetition": 0.1, "grad_norm": None}
    metrics = {"repetition": 0.1, "grad_norm": float("nan"), "seconds_sample": 3.0}
    one, other = Watch(RECIPE, {}), Watch(RECIPE, {})
    one.replay(looping()), other.replay(looping())
    assert one.replay([row, row | {"step": 12}]) == [
        *other.judge(11, metrics),
        *other.judge(12, metrics),
    ]


def test_an_alarm_is_a_row_of_json():
    watch = Watch(RECIPE, {}, lambda overrides: True)
    (alarm,) = [alarm for alarm in watch.replay(looping(0.1, 0.1)) if alarm.id == "M5"]
    assert json.loads(json.dumps(alarm.to_row(), allow_nan=False)) == {
        "step": 12,
        "id": "M5",
        "name": "repetition",
        "reading": "repetition",
        "value": 0.1,
        "baseline": 0.0,
        "n": 0,
        "rule": "0.1 above the baseline; 2 times that ends the run, in 2 steps in a row",
        "action": "checkpoint",
        "patch": ["rollout.source=join(dataset)"],
        "set": {},
    }


SPECIAL = {
    "M23": ("papers/tip",),
    "M36": ("papers/ppo",),
    "M38": ("papers/ppo",),
}
"""The recipes that trigger a specific monitor."""


def test_an_engine_that_errs_is_left_out() -> None:
    recipe = load_recipe("smoke/toy", ["rollout.engine=auto"])
    watch = Watch(resolve_recipe(recipe), {}, lambda overrides: accepted(recipe, overrides))
    assert watch._patch(MONITORS["M16"]) == ["rollout.engine=local"]
    # Without an engine, no setting makes sampler and learner agree.
    recipe = load_recipe("smoke/toy")
    for patch in Watch(
        resolve_recipe(recipe), {}, lambda overrides: accepted(recipe, overrides)
    )._patch(MONITORS["M16"]):
        assert not patch.startswith("optimizer.")


@pytest.mark.parametrize("monitor", MONITORS.values(), ids=lambda monitor: monitor.id)
def test_every_patch_is_taken_by_recipes_of_every_kind(monitor: Monitor):
    every = ("smoke/toy", "papers/thinking-machines", "papers/opsd")
    for name in SPECIAL.get(monitor.id, every):
        recipe = load_recipe(name)
        watch = Watch(
            resolve_recipe(recipe), {}, lambda overrides, recipe=recipe: accepted(recipe, overrides)
        )
        assert watch._patch(monitor), f"{monitor.id} has nothing to say to {name}"


def accepted(recipe: Recipe, overrides: Sequence[str]) -> bool:
    data = resolve_recipe(recipe)
    for text in overrides:
        override(data, text)
    try:
        return resolve_recipe(parse_recipe(data, "patched")) != resolve_recipe(recipe)
    except RecipeError:
        return False


def test_the_table_is_whole():
    assert list(MONITORS) == [
        f"M{number}" for number in range(1, 42) if number not in (2, 15, 25, 28)
    ]
    for monitor in MONITORS.values():
        assert monitor.judge.__doc__ and monitor.patches and monitor.source
        assert monitor.rule_text.format(level=1.0, change=1.0)
        assert monitor.action in ("off", "log", "warn", "checkpoint", "pause", "stop")


def test_the_monitors_can_be_listed():
    rows = {row["name"]: row["summary"] for row in list_names("monitors")}
    assert list(rows) == list(MONITORS) and rows["M5"].startswith(
        "repetition: Completions that loop"
    )


def section(text: str) -> dict[str, Any]:
    data = {**RECIPE, "monitors": yaml.safe_load(text)}
    return {
        name: settings.model_dump()
        for name, settings in parse_recipe(data, "mine.yaml").monitors.items()
    }


def test_the_section_is_read_in_its_short_forms():
    found = section("{M9: off, M5: stop, M4: {level: 0.5}, M1: {action: off}}")
    assert (found["M9"]["action"], found["M5"]["action"], found["M1"]["action"]) == (
        "off",
        "stop",
        "off",
    )
    assert found["M4"]["level"] == 0.5 and found["M4"]["action"] is None
    assert {settings["action"] for settings in section("off").values()} == {"off"}
    assert set(section("off")) == set(MONITORS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{M5x: off}", "monitors: no monitor 'M5x'; did you mean 'M5'?"),
        (
            "{M5: explode}",
            "monitors.M5.action: input should be 'off', 'log', 'warn', 'checkpoint', 'finish', 'pause' or 'stop'",
        ),
        ("{M5: {levle: 1}}", "monitors.M5.levle: no such key"),
        (
            "{M5: {set: {optimizer.learning_rate: half}}}",
            "'half' is no change; write a number such as 1e-5, or a factor such as",
        ),
        (
            "{M5: {set: {optimizer.speed: x0.5}}}",
            "monitors.M5.set: there is no number at 'optimizer.speed'; write a place in",
        ),
        ("{M5: {set: {seed: x2}}}", "there is no number at 'seed'"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(text: str, said: str):
    with pytest.raises(RecipeError) as caught:
        section(text)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_scheduled_number_is_changed_by_one_of_the_two():
    data = {**RECIPE, "objective": {"coefficient": "linear(1, 0.5)"}}
    data["monitors"] = {"M5": {"set": {"objective.losses.0.coefficient": "x0.5"}}}
    with pytest.raises(
        RecipeError,
        match=r"objective\.losses\.0\.coefficient has a schedule; let one of the two change it",
    ):
        parse_recipe(data, "mine.yaml")


@pytest.mark.long
def test_every_recipe_is_watched(tmp_path: Path):
    for name in list_recipe_names():
        found = stages.load_pipeline_or_recipe(name)
        recipes = [found] if isinstance(found, Recipe) else found.build_recipes().values()
        for recipe in recipes:
            Watch(resolve_recipe(recipe), {})
