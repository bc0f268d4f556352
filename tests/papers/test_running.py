"""Each paper's recipe passes its check and takes two steps, at the size of a toy."""

import re
import string
from pathlib import Path
from typing import Any

import pytest
from toy import make_model, rows

from practicum.recipe import (
    find_recipe,
    list_recipe_names,
    load_recipe,
    parse_recipe,
    read_recipe,
    resolve_recipe,
)
from practicum.runs import run

PAPERS = [name for name in list_recipe_names() if name.startswith("papers/")]
SMALL = {
    "train.steps": 2,
    "train.prompts_per_step": 3,
    "train.checkpoint_every": None,
    "train.threads": 1,
    "rollout.n": 3,
    "rollout.max_new_tokens": 6,
    "evaluation.prompts": 0,
    "student.lora": None,
    "student.trainable_layers": None,
}
LONGER = {
    "papers/caopd": {"rollout.max_new_tokens": 24},
    "papers/distillm": {"evaluation.prompts": 2, "evaluation.every": 1},
}
"""Additional needs of a recipe: the statement of a confidence, one letter per token; a held-out metric."""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with enough characters for every recipe's prompts."""
    return make_model(tmp_path_factory.mktemp("tiny") / "model", alphabet=string.printable, seed=1)


def with_models(data: Any, model: Path) -> Any:
    """Return the data with every model in it replaced."""
    if isinstance(data, list):
        return [with_models(item, model) for item in data]
    if not isinstance(data, dict):
        return data
    return {
        key: str(model) if key == "model" else with_models(value, model)
        for key, value in data.items()
    }


@pytest.mark.parametrize("name", PAPERS)
def test_a_recipe_says_what_it_is(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.about and recipe.paper and recipe.claim and recipe.differs and recipe.formula
    by_its_own_words = re.search(
        r"(formula|equations?) .*(second hand|abstract|summaries|others|description|third-party)",
        recipe.differs,
    )
    assert bool(by_its_own_words) == (recipe.formula == "second_hand")
    assert ("prints no equation" in recipe.differs) == (recipe.formula == "ours")
    assert parse_recipe(resolve_recipe(recipe), name) == recipe


@pytest.mark.long
@pytest.mark.parametrize("name", PAPERS)
def test_a_recipe_takes_two_steps(name: str, tiny: Path, tmp_path: Path) -> None:
    data = with_models(read_recipe(find_recipe(name)), tiny)
    for key, value in {**SMALL, **LONGER.get(name, {})}.items():
        section, field = key.split(".")
        data.setdefault(section, {})[field] = value
    result = run(parse_recipe({"name": "small", **data}, name), out=tmp_path)
    assert [row["step"] for row in rows(result.folder / "metrics.jsonl")] == [1, 2]
