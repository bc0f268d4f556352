"""What a recipe on the toy pair is for: it halves the student's reverse KL to its teacher."""

from pathlib import Path

import pytest

from practicum.recipe import find_recipe, load_recipe, read_yaml, recipe_names
from practicum.runs import run

ON_THE_PAIR = [
    name
    for name in recipe_names()
    if name.startswith("papers/") and str(read_yaml(find_recipe(name)).get("extends", "")).endswith("base/pair.yaml")
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_THE_PAIR)
def test_a_recipe_on_the_pair_halves_the_divergence(name: str, tmp_path: Path) -> None:
    summary = run(load_recipe(name, ["train.threads=1"]), out=tmp_path).summary
    assert summary["after"]["reverse_kl"] <= 0.5 * summary["before"]["reverse_kl"]
