"""Each paper's recipe is the paper's formula: equal gradients on random tensors, with the formula written out separately."""

import pytest
import torch
from toy import in_check

from practicum.recipe import list_recipe_names, load_recipe

from .case import library_and_formula
from .formulas import find_formula

PAPERS = [name for name in list_recipe_names() if name.startswith(("papers/", "served/"))]


@pytest.mark.parametrize("step", in_check(["first", "middle", "last"], "middle"))
@pytest.mark.parametrize("name", PAPERS)
def test_the_objective_is_the_papers_formula(name: str, step: str) -> None:
    recipe = load_recipe(name)
    steps = recipe.train.steps
    ours, theirs = library_and_formula(
        recipe, find_formula(name), {"first": 1, "middle": (steps + 1) // 2, "last": steps}[step]
    )
    assert theirs.abs().max() > 0
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
