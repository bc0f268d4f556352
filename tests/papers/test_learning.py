"""The purpose of a recipe on the toy pair: over three seeds it halves the student's reverse KL to its teacher, unless the
recipe has another goal.
"""

from pathlib import Path

import pytest

from practicum.recipe import find_recipe, list_recipe_names, load_recipe
from practicum.recipe.layers import read_layers
from practicum.runs import run

ELSEWHERE = {
    "papers/kdrl": "a reward in addition to the teacher",
    "papers/rlad": "a reward that the teacher shapes",
    "papers/llm4teach": "a reward, and a teacher with a share that falls to 0",
    "papers/vold-text": "a reward in addition to the teacher",
    "papers/g-opd": "a target between the initial student and the teacher",
    "papers/exopd": "a target beyond the teacher",
    "papers/lightning-opd": "only answers of the first student, which is near its teacher already",
}
"""The goals of these recipes; their divergence to the teacher falls by less than half."""

ON_THE_PAIR = [
    name
    for name in list_recipe_names()
    if name.startswith("papers/")
    and name not in ELSEWHERE
    and read_layers(find_recipe(name))[0].origin == "setting pair"
]


SEEDS = (0, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_THE_PAIR)
def test_a_recipe_on_the_pair_halves_the_divergence(name: str, tmp_path: Path) -> None:
    recipes = [load_recipe(name, [f"seed={seed}", "train.threads=1"]) for seed in SEEDS]
    summaries = [run(recipe, out=tmp_path / str(recipe.seed)).summary for recipe in recipes]
    before, after = (
        sum(summary[when]["reverse_kl"] for summary in summaries) for when in ("before", "after")
    )
    assert after <= 0.5 * before


def test_those_that_go_elsewhere_are_recipes() -> None:
    assert set(list_recipe_names()) >= ELSEWHERE.keys()
