"""A configuration of verl's distillation becomes a recipe, and nothing is left out silently."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from practicum.cli.convert import write_recipe
from practicum.errors import PracticumError, RecipeError
from practicum.objective import Objective
from practicum.recipe import load_recipe
from practicum.recipe.verl import convert_verl

# The keys of verl's own example run_qwen3_8b_fsdp.sh.
OVERRIDES = """\
data.train_files=['{train}']
data.val_files=['{test}']
data.train_batch_size=4
data.max_prompt_length=1024
data.max_response_length=2048
data.truncation='error'
actor_rollout_ref.model.path=Qwen/Qwen3-8B
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=2
actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.n=1
actor_rollout_ref.rollout.prompt_length=${{oc.select:data.max_prompt_length,512}}
trainer.experiment_name=qwen3 8b/32b
trainer.save_freq=200
trainer.test_freq=5
trainer.total_epochs=3
distillation.enabled=True
distillation.n_gpus_per_node=4
distillation.teacher_models.teacher_model.model_path=Qwen/Qwen3-32B
distillation.distillation_loss.loss_mode=k1
distillation.distillation_loss.topk=64
distillation.distillation_loss.use_task_rewards=False
distillation.distillation_loss.use_policy_gradient=True
distillation.distillation_loss.loss_max_clamp=10.0
distillation.distillation_loss.log_prob_min_clamp=-10.0
"""


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    for name in ("train", "test"):
        rows = [json.dumps({"prompt": f"{name} {n}", "answer": n}) for n in range(9)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    text = OVERRIDES.format(train=tmp_path / "train.jsonl", test=tmp_path / "test.jsonl")
    return text.splitlines()


def convert(folder: Path, lines: list[str]) -> tuple[dict[str, Any], list[str]]:
    source = folder / "overrides.yaml"
    source.write_text(yaml.safe_dump(lines))
    return convert_verl(source, folder / "recipe.yaml")


def test_a_recipe_is_written_that_runs(
    tmp_path: Path, overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    write_recipe(tmp_path / "overrides.yaml", tmp_path / "recipe.yaml")
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert (recipe.name, recipe.student.model) == ("qwen3-8b-32b", "Qwen/Qwen3-8B")
    assert dict(recipe.teacher)["model"] == "Qwen/Qwen3-32B"
    assert (recipe.prompt_tokens, recipe.rollout.max_new_tokens) == (1024, 2048)
    assert (recipe.train.prompts_per_step, recipe.train.updates_per_step) == (4, 2)
    assert recipe.train.steps == 9 * 3 // 4
    assert (recipe.optimizer.learning_rate, recipe.optimizer.weight_decay) == (1e-6, 0.01)
    assert dict(recipe.task)["path"] == Path("train.jsonl")
    assert recipe.objective == Objective.model_validate(
        {
            "signal": "sampled",
            "divergence": "reverse_kl",
            "estimator": "score_function",
            "correction": "ratio_clip(0.2, 0.2)",
            "clip": "advantage(-10, 10)",
        }
    )
    said = capsys.readouterr().err
    written = (tmp_path / "recipe.yaml").read_text()
    for key in ("data.truncation", "rollout.name", "rollout.prompt_length", "n_gpus_per_node"):
        assert f"{key} = " in said and f"{key} = " in written
    assert "log_prob_min_clamp = -10.0" in said
    with pytest.raises(RecipeError, match="exists; give another file to --out"):
        write_recipe(tmp_path / "overrides.yaml", tmp_path / "recipe.yaml")


LOSS = "distillation.distillation_loss."


@pytest.mark.parametrize(
    "mode", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "forward_kl_topk"]
)
@pytest.mark.parametrize("is_policy_gradient", [False, True])
@pytest.mark.parametrize("rewards", [False, True])
def test_every_loss_mode_becomes_a_valid_objective(
    tmp_path: Path, overrides: list[str], mode: str, is_policy_gradient: bool, rewards: bool
) -> None:
    changes = {
        "loss_mode": mode,
        "use_policy_gradient": is_policy_gradient,
        "use_task_rewards": rewards,
    }
    recipe, notes = convert(
        tmp_path, [*overrides, *(f"{LOSS}{key}={value}" for key, value in changes.items())]
    )
    Objective.model_validate(recipe["objective"])
    assert ("losses" in recipe["objective"]) == rewards
    is_known = is_policy_gradient == (mode in ("kl", "k1")) and mode != "abs"
    assert any("gradient of no divergence" in note for note in notes) != is_known


def test_several_teachers_are_a_route_and_verl_drops_the_default_one(
    tmp_path: Path, overrides: list[str]
) -> None:
    teachers = {"math": "m/math", "code": "m/code"}
    lines = [
        f"+distillation.teacher_models.{name}.{key}={value}"
        for name, model in teachers.items()
        for key, value in (("key", f"{name}-data"), ("model_path", model))
    ]
    recipe, _ = convert(tmp_path, [*overrides, *lines])
    assert recipe["teacher"]["by"] == "domain"
    assert {key: member["model"] for key, member in recipe["teacher"]["teachers"].items()} == {
        "math-data": "m/math",
        "code-data": "m/code",
    }


def test_steps_that_cannot_be_counted_are_asked_for(tmp_path: Path, overrides: list[str]) -> None:
    recipe, notes = convert(tmp_path, [*overrides, "data.train_files=~/none/train.parquet"])
    assert "steps" not in recipe["train"] and recipe["task"]["path"] == "~/none/train.parquet"
    assert any(note.startswith("train.steps: missing; set rows * 3 // 4") for note in notes)
    recipe, _ = convert(tmp_path, [*overrides, "trainer.total_training_steps=7"])
    assert recipe["train"]["steps"] == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "cannot be read as YAML"),
        ("5", "neither a mapping nor a list of overrides"),
        ("data: {train_files: x}", "no key `distillation`"),
        ("distillation: {enabled: true}\ndata: {train_batch_size: many}", "not a positive number"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(RecipeError, match=message):
        convert_verl(tmp_path / "x.yaml", tmp_path / "recipe.yaml")


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.just("${a.b}"),
    st.lists(st.integers(), max_size=2),
)
KEYS = [line.partition("=")[0] for line in OVERRIDES.splitlines()]


@given(st.dictionaries(st.sampled_from([*KEYS, "distillation", "data", "a.b"]), LEAVES))
def test_whatever_the_values_a_configuration_is_read_or_refused(leaves: dict[str, Any]) -> None:
    config: dict[str, Any] = {"distillation": {"x": 1}}
    for key, leaf in leaves.items():
        *sections, last = key.split(".")
        place = config
        for section in sections:
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = place[section]
        place[last] = leaf
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "verl.yaml"
        path.write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
        try:
            recipe, _ = convert_verl(path, Path(folder) / "recipe.yaml")
            yaml.safe_dump(recipe)
        except PracticumError as error:
            assert len(str(error).splitlines()) == 1  # noqa: PT017 - most are no error
