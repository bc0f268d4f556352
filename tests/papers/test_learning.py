"""What a recipe on the toy pair is for: it halves the student's reverse KL to its teacher, unless it is for something else."""

from pathlib import Path

import pytest

from practicum.recipe import find_recipe, load_recipe, read_yaml, recipe_names
from practicum.runs import run

ELSEWHERE = {
    "papers/kdrl": "a reward beside the teacher",
    "papers/rlad": "a reward that the teacher shapes",
    "papers/llm4teach": "a reward, and a teacher whose share goes to nothing",
    "papers/vold": "a reward beside the teacher",
    "papers/g-opd": "a target between where it began and the teacher",
    "papers/exopd": "a target beyond the teacher",
}
"""What these go after instead; their divergence to the teacher falls by less than half."""

ON_THE_PAIR = [
    name
    for name in recipe_names()
    if name.startswith("papers/")
    and name not in ELSEWHERE
    and str(read_yaml(find_recipe(name)).get("extends", "")).endswith("base/pair.yaml")
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_THE_PAIR)
def test_a_recipe_on_the_pair_halves_the_divergence(name: str, tmp_path: Path) -> None:
    summary = run(load_recipe(name, ["train.threads=1"]), out=tmp_path).summary
    assert summary["after"]["reverse_kl"] <= 0.5 * summary["before"]["reverse_kl"]


def test_those_that_go_elsewhere_are_recipes() -> None:
    assert set(recipe_names()) >= ELSEWHERE.keys()
