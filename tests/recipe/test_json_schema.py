"""The JSON Schema for editors accepts every packaged recipe and refuses misspelt keys."""

from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from toy import toy_data

from practicum.core.packaged import list_recipe_files
from practicum.recipe.json_schema import build_schema
from practicum.recipe.schema import Recipe
from practicum.recipe.yaml_files import read_yaml


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    """Return the validator of the schema, which is checked itself."""
    schema = build_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def test_every_packaged_recipe_is_valid(validator: Draft202012Validator) -> None:
    paths = list_recipe_files().values()
    assert len(paths) > 70
    for path in paths:
        assert not [error.message for error in validator.iter_errors(read_yaml(path))], path


def test_the_schema_knows_every_section(validator: Draft202012Validator) -> None:
    known = validator.schema["properties"].keys()
    assert known == {*Recipe.model_fields, "extends", "setting", "stages"}


@pytest.mark.parametrize(
    "changes",
    [
        {"objective.divergence": "jsd(0.1)"},
        {"objective.divergence": "my_parts.losses"},
        {"objective": {"losses": [{"signal": "topk(4)", "coefficient": "linear(1, 0)"}]}},
        {"optimizer.learning_rate": "cosine(1e-3, 1e-5)"},
        {"monitors": {"M22": "off", "M31": {"action": "finish", "change": 0.1}}},
        {"monitors": False},
        {"monitors": {"my_parts.slow_start": {"action": "stop"}}},
        {"rollout.source": "mix(student=0.5, other=teacher)"},
        {"rollout.source": {"type": "prefix", "length": 4}},
        {"rollout.source": "my_parts.surest(3)"},
        {"objective.signal": {"type": "topk", "k": 4}, "objective.target": "mixture(0.5)"},
        {"objective.signal": "my_parts.nucleus", "objective.clip": "loss(0.1)"},
        {"teacher": "none"},
        {"teacher": {"type": "my_parts.flat", "anything": 1}},
        {"teacher": {"type": "privileged", "teacher": {"type": "self", "weights": "frozen"}}},
        {"student": {"model": {"hidden_size": 16}, "lora": {"rank": 4}}},
        {"tracking": "wandb"},
        {"backend": {"chunk_tokens": 64}},
        {"extends": "../quickstart.yaml"},
    ],
)
def test_what_a_recipe_may_say_is_valid(
    validator: Draft202012Validator, changes: dict[str, Any]
) -> None:
    assert validator.is_valid(toy_data(Path("models"), changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"trian": {}},
        {"train.stepz": 3},
        {"train.steps": 0},
        {"train.steps": "linear(1, 2)"},
        {"teacher.type": "modle"},
        {"teacher.weights": "frozen"},
        {"task.pth": "x"},
        {"objective.divergence": "jdd"},
        {"objective.diverg": "jsd(0.1)"},
        {"optimizer.learning_rate": "fast"},
        {"rollout.source": "studnet"},
        {"rollout.source": {"type": "prefix", "lenght": 4}},
        {"objective.signal": "topkk"},
        {"objective.target": {"type": "mixture", "student": 0.5}},
        {"objective.clip": "losses"},
        {"monitors": {"M99": "warn"}},
        {"monitors": {"M22": "shout"}},
        {"student.lora": {"rnk": 4}},
    ],
)
def test_a_mistake_is_refused(validator: Draft202012Validator, changes: dict[str, Any]) -> None:
    assert not validator.is_valid(toy_data(Path("models"), changes))
