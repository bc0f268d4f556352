"""Each paper's recipe is the paper's formula: equal gradients on random tensors, with the formula written out separately."""

import importlib
import pkgutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from toy import in_check

from practicum.recipe import list_recipe_names, load_recipe

from .case import Case, library_and_formula

PAPERS = [name for name in list_recipe_names() if name.startswith(("papers/", "served/"))]


def _formulas() -> dict[str, Callable[[Case], Tensor]]:
    """Return every function of a `formulas_*` module with the name of a recipe, dashes as underscores."""
    package = importlib.import_module(str(__package__))
    found: dict[str, Callable[[Case], Tensor]] = {}
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("formulas_"):
            found |= vars(importlib.import_module(f"{__package__}.{module.name}"))
    return found


FORMULAS = _formulas()


@pytest.mark.parametrize("step", in_check(["first", "middle", "last"], "middle"))
@pytest.mark.parametrize("name", PAPERS)
def test_the_objective_is_the_papers_formula(name: str, step: str) -> None:
    recipe = load_recipe(name)
    formula = FORMULAS[name.removeprefix("papers/").replace("-", "_").replace("/", "_")]
    steps = recipe.train.steps
    ours, theirs = library_and_formula(
        recipe, formula, {"first": 1, "middle": (steps + 1) // 2, "last": steps}[step]
    )
    assert theirs.abs().max() > 0
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
