"""Each paper's recipe passes its check and takes two steps, at the size of a toy."""

import re
from pathlib import Path

import pytest
from toy import rows

from practicum.recipe import (
    find_recipe,
    list_recipe_names,
    load_recipe,
    parse_recipe,
    read_recipe,
    resolve_recipe,
)
from practicum.runs import run

from .small import make_two_models, shrink

PAPERS = [name for name in list_recipe_names() if name.startswith("papers/")]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_two_models(tmp_path_factory.mktemp("tiny"))


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
def test_a_recipe_takes_two_steps(
    name: str, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRACTICUM_SHARED_MODELS", str(models[0].parent))
    small = shrink(name, read_recipe(find_recipe(name)), models, steps=2)
    result = run(parse_recipe(small, name), out=tmp_path)
    assert [row["step"] for row in rows(result.folder / "metrics.jsonl")] == [1, 2]
