"""The pipelines of published models: each is parsed and runs to its end, and the slow tests show its intended effect."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from practicum.recipe import list_recipe_names
from practicum.runs.pipeline import run
from practicum.runs.stages import Pipeline, load_pipeline_or_recipe, parse_pipeline
from practicum.tasks.skills import EFFORTS

pytestmark = pytest.mark.long

TEAMS = [name for name in list_recipe_names() if name.startswith("teams/")]
QUICK = ("teams/glm5", "teams/qwen3")
"""Pipelines with few stages; `benchmarks digests` runs every stage of every pipeline."""

SHORT = (
    "train.steps=1",
    "train.prompts_per_step=4",
    "evaluation.prompts=4",
    "task.train_size=8",
    "task.heldout_size=2",
    "student.model.pretrain.steps=1",
)


def loaded(name: str, *overrides: str) -> Pipeline:
    found = load_pipeline_or_recipe(name, overrides)
    assert isinstance(found, Pipeline)
    return found


def test_there_are_four() -> None:
    assert TEAMS == ["teams/deepseek_v4", "teams/glm5", "teams/mimo_v2", "teams/qwen3"]


@pytest.mark.parametrize("name", TEAMS)
def test_a_pipeline_reads_back_and_says_what_it_is(name: str) -> None:
    pipeline = loaded(name)
    assert parse_pipeline(pipeline.resolve(), name).build_recipes() == pipeline.build_recipes()
    about = pipeline.recipe
    assert about.about and about.paper and about.claim and about.differs
    assert all(recipe.slot for recipe in pipeline.build_recipes().values())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in TEAMS]
)
def test_every_stage_runs_a_step(name: str, tmp_path: Path) -> None:
    more = ["teacher.model.pretrain.steps=1"] if name == "teams/qwen3" else []
    result = run(name, [*SHORT, *more], out=tmp_path)
    assert [stage["steps"] for stage in result.summary["stages"]] == [1] * len(loaded(name).stages)
    assert len(result.summary["accuracy"]) == len(loaded(name).stages) + 1
    assert (result.folder / "report.html").is_file()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("pipelines/score-agents", marks=pytest.mark.slow),
        pytest.param("pipelines/tcod-shell", marks=pytest.mark.slow),
        pytest.param("pipelines/openclaw-shell", marks=pytest.mark.slow),
        "pipelines/rstar2-agent",
    ],
)
def test_the_stages_of_agents_run_a_step(name: str, tmp_path: Path) -> None:
    # No stage learns from answers before the stages: a walk has none.
    result = run(name, SHORT[:-1], out=tmp_path)
    assert [stage["steps"] for stage in result.summary["stages"]] == [1] * len(loaded(name).stages)


def test_the_default_pipeline_is_found_by_its_name_and_ends_by_its_monitor(tmp_path: Path) -> None:
    stages = loaded("default").build_recipes().values()
    assert [recipe.slot for recipe in stages] == [
        "cold_start",
        "rl_replacement",
        "inside_rl",
        "rl_replacement",
    ]
    assert all(
        recipe.monitors["M31"].action == "finish" and recipe.evaluation.every for recipe in stages
    )
    patience = ["monitors.M31.change=1.0", "monitors.M31.level=-1.0", "monitors.M31.persistence=1"]
    short = [
        *SHORT,
        "teacher.model.pretrain.steps=1",
        "train.steps=3",
        "evaluation.every=1",
        *patience,
    ]
    result = run("default", short, out=tmp_path)
    assert [(stage["steps"], stage["ended"]) for stage in result.summary["stages"]] == [
        (1, "finished by M31 plateau")
    ] * 4
    assert "1, finished by M31 plateau</td>" in (result.folder / "report.html").read_text()


def whole(name: str, out: Path) -> dict[str, dict[str, float]]:
    """Return the accuracy after each stage of the whole pipeline, `all` and by domain."""
    summary: dict[str, Any] = run(name, out=out).summary
    return {
        row["stage"]: {
            "all": row["all"]["mean"],
            **{name: interval["mean"] for name, interval in row["by_domain"].items()},
        }
        for row in summary["accuracy"]
    }


@pytest.mark.slow
def test_qwen3_gains_from_the_teachers_answers_and_more_from_its_own(tmp_path: Path) -> None:
    after = whole("teams/qwen3", tmp_path)
    assert after["base"]["all"] + 0.2 < after["off_policy"]["all"] < after["on_policy"]["all"] - 0.1


@pytest.mark.slow
def test_glm5_unlearns_stage_by_stage_and_recovers(tmp_path: Path) -> None:
    after = whole("teams/glm5", tmp_path)
    assert after["reasoning_rl"]["sort"] > after["base"]["sort"]
    assert after["general_rl"]["sort"] < after["reasoning_rl"]["sort"] - 0.2
    assert after["general_rl"]["all"] < after["base"]["all"] - 0.2
    assert after["distillation"]["sort"] > after["general_rl"]["sort"] + 0.2
    assert after["distillation"]["all"] > after["general_rl"]["all"] + 0.2


@pytest.mark.slow
def test_mimo_v2_makes_experts_and_one_student_of_them(tmp_path: Path) -> None:
    after = whole("teams/mimo_v2", tmp_path)
    skills = ("sort", "left", "reverse")
    for skill in skills:
        assert after[f"{skill}_expert"][skill] > after["sft"][skill] + 0.1
    assert (
        sum(after["mopd"][skill] for skill in skills)
        > sum(after["sft"][skill] for skill in skills) + 0.2
    )
    assert after["mopd"]["all"] > max(after[f"{skill}_expert"]["all"] for skill in skills)


@pytest.mark.slow
def test_deepseek_v4_makes_one_student_of_eleven_experts_that_obeys_its_effort(
    tmp_path: Path,
) -> None:
    after = whole("teams/deepseek_v4", tmp_path)
    experts = [name for name in after if name.endswith("_expert")]
    assert len(experts) == 11
    skills = [name.removesuffix("_expert") for name in experts[:8]]
    gains = [after[f"{skill}_expert"][skill] - after["sft"][skill] for skill in skills]
    assert fmean(gains) > -0.05
    # The student of all experts keeps what each of them forgets.
    for name in experts[:8]:
        assert fmean(after["routed"][skill] for skill in skills) > fmean(
            after[name][skill] for skill in skills
        )
    none, high, most = measure_efforts(tmp_path, "14-routed")
    assert none + 4 < high < most - 1
    cold = measure_efforts(tmp_path, "01-sft")
    assert max(cold) < min(cold) + 1
    assert after["routed"]["none"] < after["routed"]["high"] < after["routed"]["max"]


def measure_efforts(out: Path, stage: str) -> list[float]:
    """Return the mean tokens of a stage's held-out answers at each effort."""
    saved = json.loads((out / "deepseek_v4" / "stages" / stage / "after.json").read_text())
    answers = saved["student"]["answers"]
    return [
        fmean(answer["tokens"] for answer in answers if answer["prompt"].startswith(f"{effort} "))
        for effort in EFFORTS
    ]
