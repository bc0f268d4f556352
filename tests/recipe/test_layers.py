"""Method and setting of a recipe are separate: `extends` takes the method and leaves the setting."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from practicum.core.packaged import find_base, list_recipe_files, locate_packaged_recipes
from practicum.errors import RecipeError
from practicum.models.starting_values import SETTINGS
from practicum.recipe import WORDS, find_recipe, list_recipe_names, load_recipe, read_recipe
from practicum.recipe.layers import NUMBERS, read_layers
from practicum.recipe.origins import list_paths, trace_origins
from practicum.recipe.schema import resolve_recipe
from practicum.recipe.settings import list_setting_names
from practicum.recipe.yaml_files import read_yaml
from practicum.runs.stages import load_pipeline_or_recipe

OWN: dict[str, Any] = {
    "student": {"model": "smollm2-135m-instruct"},
    "teacher": {"type": "model", "model": "smollm2-135m-instruct", "system": "Be brief."},
    "task": {"type": "jsonl", "path": "rows.jsonl"},
}
PRETRAINED = SETTINGS[2]

METHOD_KEYS = {
    "train": {"updates_per_step", "epochs", "curriculum"},
    "rollout": {
        "source",
        "n",
        "temperature",
        "top_p",
        "top_k",
        "max_turns",
        "segment_tokens",
        "max_staleness",
        "replay_size",
    },
}
"""The keys that a packaged recipe may have in sections that its setting also has."""


def write(folder: Path, content: dict[str, Any], name: str = "mine") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_real_student_never_has_the_numbers_of_a_toy(tmp_path: Path) -> None:
    """The fault of the first hour: `extends: papers/gkd` trained a 135M model at 0.002."""
    recipe = load_recipe(write(tmp_path, {"extends": "papers/gkd", **OWN}))
    assert recipe.optimizer.learning_rate == PRETRAINED.learning_rate
    assert recipe.rollout.max_new_tokens == PRETRAINED.cpu_max_new_tokens
    assert recipe.evaluation.max_new_tokens is None and recipe.train.threads is None
    method = load_recipe("papers/gkd")
    assert recipe.objective == method.objective and recipe.rollout.source == method.rollout.source
    assert (recipe.paper, recipe.claim, recipe.differs, recipe.formula) == (None,) * 4


@pytest.mark.parametrize("name", [n for n in list_recipe_names() if n.startswith("papers/")])
def test_a_method_with_other_models_has_no_number_of_its_setting(name: str, tmp_path: Path) -> None:
    data = read_recipe(write(tmp_path, {"extends": name, **OWN}))
    assert not data.keys() & {"optimizer", "evaluation", *WORDS} - {"slot"}
    student = {key: setting for key, setting in data["student"].items() if key != "drafter"}
    assert student == OWN["student"] and "objective" in data


@pytest.mark.parametrize("name", list_recipe_names())
def test_a_packaged_recipe_keeps_numbers_in_its_setting(name: str) -> None:
    content = read_yaml(list_recipe_files()[name])
    assert "setting" in content
    for part in (content, *content.get("stages", ())):
        assert not part.keys() & {"optimizer", "evaluation"}, name
        for section, allowed in METHOD_KEYS.items():
            numbers = {
                key for key, value in part.get(section, {}).items() if not isinstance(value, str)
            }
            assert numbers <= allowed | {"source"}, name
    if "stages" not in content:
        assert "task" not in content and "model" not in content.get("student", {})


@pytest.mark.parametrize("name", list_setting_names())
def test_a_setting_has_no_method(name: str) -> None:
    content = read_yaml(locate_packaged_recipes() / "settings" / f"{name}.yaml")
    assert not content.keys() & {"objective", "scorers", "notes", "schedules", "stages"}
    assert content["about"]


@pytest.mark.parametrize(
    ("overrides", "fits"),
    [
        ([], True),
        (["student.model.hidden_size=32"], True),
        (["optimizer.betas=[0.9, 0.95]"], True),
        (["student.model=smollm2-135m-instruct"], False),
        (["student=smollm2-135m-instruct"], False),
        (["student={model: smollm2-135m-instruct, lora: {}}"], False),
    ],
)
def test_an_override_of_the_student_leaves_the_settings_numbers_out(
    overrides: list[str], fits: bool
) -> None:
    recipe = load_recipe("papers/gkd", overrides)
    toy = load_recipe("papers/gkd")
    assert (recipe.optimizer.learning_rate == toy.optimizer.learning_rate) == fits
    assert (recipe.train.threads == 1) == fits
    assert (recipe.differs is not None) == fits
    assert recipe.task == toy.task


def test_a_setting_is_no_override() -> None:
    with pytest.raises(RecipeError, match="setting and extends are keys of a file"):
        load_recipe("papers/gkd", ["setting=pair"])


def test_adapters_on_a_settings_student_have_the_rate_of_adapters() -> None:
    recipe = load_recipe("products", ["student.lora={}"])
    assert recipe.optimizer.learning_rate == PRETRAINED.adapter_learning_rate
    assert load_recipe("products", ["seed=1"]).optimizer.learning_rate == 1e-4


def test_a_setting_is_a_name_a_file_or_a_mapping(tmp_path: Path) -> None:
    method = {"extends": "papers/gkd"}
    by_name = load_recipe(write(tmp_path, {**method, "setting": "pair"}))
    assert by_name.optimizer == load_recipe("papers/gkd").optimizer
    write(
        tmp_path,
        {
            "extends": str(locate_packaged_recipes() / "settings/pair.yaml"),
            "train": {"steps": 7},
        },
        "own_pair",
    )
    by_file = load_recipe(write(tmp_path, {**method, "setting": "own_pair.yaml"}))
    assert by_file.train.steps == 7 and by_file.optimizer == by_name.optimizer
    inline = {"extends": "pair", "train": {"steps": 9}}
    by_mapping = load_recipe(write(tmp_path, {**method, "setting": inline, "seed": 4}))
    assert (by_mapping.train.steps, by_mapping.seed) == (9, 4)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            {"extends": "papers/gkd"},
            "no `student` and no `task`; name your own, or one of the pairs",
        ),
        ({"extends": "papers/gkd", "setting": "pear"}, "setting: no 'pear'"),
        ({"extends": "papers/gkd", "setting": 3}, "setting: write a name such as `pair`"),
        ({"extends": "papers/gkd", **OWN, "student": {}}, "student.model: missing"),
    ],
)
def test_what_is_missing_is_said(content: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe(write(tmp_path, content))


def test_stages_have_settings_of_their_own(tmp_path: Path) -> None:
    stages = [
        {
            "name": "first",
            "objective": {"signal": "text", "divergence": "ce"},
            "rollout": {"source": "teacher"},
        },
        {"name": "second", "setting": {"train": {"steps": 3}, "optimizer": {"learning_rate": 0.5}}},
    ]
    base = write(tmp_path, {"setting": "pair", "stages": stages}, "base")
    assert read_recipe(base)["stages"][1]["train"] == {"steps": 3}
    extended = read_recipe(write(tmp_path, {"extends": "base.yaml", **OWN}))
    assert extended["stages"][1] == {"name": "second"}
    changed = read_recipe(base, ["student.model=smollm2-135m-instruct"])
    assert changed["stages"][1] == {"name": "second"}


def test_a_stage_extends_a_method_under_its_own_sections(tmp_path: Path) -> None:
    loss = {"divergence": "forward_kl", "coefficient": 0.5}
    method = {"about": "a method", "rollout": {"n": 2}, "objective": loss, "setting": "pair"}
    write(tmp_path, method, "method")
    second = {"name": "b", "extends": "method.yaml", "objective": {"coefficient": 0.1}}
    file = write(tmp_path, {"setting": "pair", "stages": [{"name": "a"}, second]}, "pipeline")
    plain, extended = load_pipeline_or_recipe(file).build_recipes().values()
    assert plain.objective.losses[0].divergence.name == "reverse_kl"
    term = extended.objective.losses[0]
    assert (term.divergence.name, term.coefficient) == ("forward_kl", 0.1)
    assert (extended.rollout.n, extended.about, extended.optimizer) == (2, "", plain.optimizer)
    write(tmp_path, {"extends": "pipeline.yaml"}, "method")
    with pytest.raises(RecipeError, match="which extends this one again"):
        load_pipeline_or_recipe(file)


def test_the_last_stage_of_aligndistil_is_its_recipe() -> None:
    pipeline = load_pipeline_or_recipe("pipelines/aligndistil").build_recipes()
    # The scale fits the distance between the two policies.
    numbers = {"objective.losses.0.target.scale": 2.0}
    expected = load_recipe("papers/aligndistil").replace_numbers(numbers).objective
    assert pipeline["distil"].objective == expected
    for stage in ("dpo", "reverse_dpo"):
        assert pipeline[stage].objective.losses[0].signal.pairs


def test_the_origin_of_every_value_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, {"extends": "papers/gkd", **OWN})
    origins = trace_origins(path, ["seed=3", "divergence=jsd(0.1)"])
    resolved = dict(
        list_paths(resolve_recipe(load_recipe(path, ["seed=3", "divergence=jsd(0.1)"])))
    )
    assert origins.find("seed") == "the command line"
    assert origins.find("objective.losses.0.divergence.name") == "the command line"
    assert origins.find("objective.losses.0.signal") == "papers/gkd"
    assert origins.find("student.model") == str(path)
    assert origins.find("rollout.n") == "default"
    for key in ("optimizer.learning_rate", "train.steps", "rollout.max_new_tokens"):
        assert origins.find(key).startswith(
            "the table of settings: pretrained, up to 250 million"
        ), key
        assert key in resolved
    (line,) = origins.describe_setting()
    assert "optimizer.learning_rate=5e-05" in line and PRETRAINED.source in line

    toy = trace_origins("papers/gkd")
    assert toy.find("optimizer.learning_rate") == "setting pair"
    assert toy.describe_setting() == ["models and task: setting pair"]
    other = trace_origins("papers/gkd", ["student.model=smollm2-135m-instruct"])
    assert "the numbers of setting pair" in other.describe_setting()[1]
    staged = trace_origins("default").narrow("rl_polish")
    assert staged.find("reference.type") == "default: stage rl_polish"


def test_layers_come_from_the_weakest_to_the_strongest() -> None:
    layers = read_layers(find_recipe("papers/gad"))
    assert [layer.origin for layer in layers] == [
        "setting pair",
        "setting of papers/gad",
        "papers/gad",
    ]
    assert [layer.is_setting for layer in layers] == [True, True, False]
    assert not set(NUMBERS) & layers[2].sections.keys() - {"rollout"}


@pytest.mark.parametrize("name", list_recipe_names())
def test_the_recipe_of_a_run_folder_is_the_recipe(name: str, tmp_path: Path) -> None:
    """A run folder is accepted wherever a recipe is, so that a run is repeated with a change."""
    if "stages" in read_recipe(find_recipe(name)):
        pytest.skip("a pipeline has a folder for each stage")
    recipe = load_recipe(name, ["seed=3"])
    (tmp_path / "recipe.json").write_text(json.dumps({"recipe": resolve_recipe(recipe)}))
    assert load_recipe(tmp_path) == recipe
    changed = load_recipe(str(tmp_path), ["train.steps=77"])
    assert resolve_recipe(changed) == resolve_recipe(
        load_recipe(name, ["seed=3", "train.steps=77"])
    )


def test_a_folder_without_a_run_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="not a file, not a run folder and not a packaged recipe"):
        load_recipe(tmp_path)


def test_relative_paths_of_packaged_recipes_start_in_a_folder_that_exists() -> None:
    """The same for a method's recipe, even if its family has no other recipe."""
    for name, file in list_recipe_files().items():
        assert find_base(file).is_dir(), name
