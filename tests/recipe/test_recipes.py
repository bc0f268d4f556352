"""Every recipe of the package parses, reads back, and runs if it only needs the package."""

from pathlib import Path

import pytest
from toy import rows

from practicum.core.packaged import list_recipe_files
from practicum.core.plugins import list_plugins
from practicum.models.config import ModelConfig, ScratchConfig
from practicum.ports import walk
from practicum.recipe import (
    FAMILIES,
    list_recipe_names,
    load_recipe,
    parse_recipe,
    read_recipe,
    resolve_recipe,
)
from practicum.recipe.yaml_files import read_yaml
from practicum.runs import run
from practicum.runs.opening import build_task


def test_there_are_recipes() -> None:
    assert {"quickstart", "smoke/toy"} <= set(list_recipe_names())


def test_the_quick_start_asks_in_other_words_for_facts_that_only_its_teacher_sees() -> None:
    recipe = load_recipe("quickstart")
    task = build_task(recipe)
    train, heldout = task.train_prompts(), task.heldout_prompts()
    assert not {prompt.question for prompt in train} & {prompt.question for prompt in heldout}
    asked = {prompt.domain for prompt in heldout}
    assert {prompt.domain for prompt in train} == {"handbook"} and asked == {"handbook", "general"}
    for prompt in (*train, *heldout):
        assert prompt.answer is not None and prompt.answer not in prompt.question
        for key, facts in prompt.privileged.items():
            assert (prompt.answer in facts) is (key == "fact")


PIPELINES = [
    name for name in list_recipe_names() if "stages" in read_yaml(list_recipe_files()[name])
]
RECIPES = [name for name in list_recipe_names() if name not in PIPELINES]


@pytest.mark.parametrize("name", list_recipe_names())
def test_a_recipe_states_its_family_in_its_own_file(name: str) -> None:
    content = read_yaml(list_recipe_files()[name])
    assert content["family"] in FAMILIES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_parses_and_reads_back(name: str) -> None:
    recipe = load_recipe(name)
    assert parse_recipe(resolve_recipe(recipe), name) == recipe
    assert recipe.about, "a recipe has a text about itself"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_speaks_of_files_that_come_with_it(name: str) -> None:
    data = read_recipe(list_recipe_files()[name])
    task = data["task"] if isinstance(data["task"], dict) else {}
    if task.get("type") == "datasets":
        pytest.skip("its dataset is on the hub")
    for key in ("path", "heldout"):
        if isinstance(task.get(key), str):
            assert (Path(data["base_dir"]) / task[key]).is_file(), f"{name}: task.{key}"


# The papers' recipes run in tests/papers, the pipelines in test_teams.
TOYS = [
    name
    for name in RECIPES
    if not name.startswith("papers/") and isinstance(load_recipe(name).student.model, ScratchConfig)
]


@pytest.mark.parametrize("name", TOYS)
def test_a_recipe_with_models_from_scratch_runs_two_steps(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    short = [
        "train.steps=2",
        "train.prompts_per_step=4",
        "evaluation.prompts=4",
    ]
    assert isinstance(recipe.student.model, ScratchConfig)
    if recipe.student.model.pretrain.steps:
        short.append("student.model.pretrain.steps=2")
    short += [
        ".".join(("teacher", *keys, "model.pretrain.steps=2"))
        for keys, teacher in walk(recipe.teacher)
        if isinstance(teacher, ModelConfig) and isinstance(teacher.model, ScratchConfig)
    ]
    result = run(name, short, out=tmp_path)
    assert [row["step"] for row in rows(result.folder / "metrics.jsonl")] == [1, 2]
    assert result.folder.name == recipe.name


@pytest.mark.slow
def test_the_first_run_of_the_readme_succeeds_in_five_seeds(tmp_path: Path) -> None:
    """The student rises from below 0.2 to within 0.1 of its teacher."""
    for seed in range(5):
        summary = run("smoke/toy", [f"seed={seed}"], out=tmp_path / str(seed)).summary
        before, after, teacher = (
            summary[when]["accuracy"]["mean"] for when in ("before", "after", "teacher")
        )
        assert before < 0.2 and after >= teacher - 0.1 and teacher >= 0.95, seed


def test_a_toy_is_among_them() -> None:
    assert TOYS and "model" in list_plugins("teachers")
