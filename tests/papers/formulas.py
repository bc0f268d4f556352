"""The formula of every recipe, in the `formulas_*` modules."""

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache

from torch import Tensor

from .case import Case

Formula = Callable[[Case], Tensor]


@cache
def _collect_formulas() -> dict[str, Formula]:
    """Return every function of a `formulas_*` module with the name of a recipe, dashes as underscores."""
    package = importlib.import_module(str(__package__))
    formulas: dict[str, Formula] = {}
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("formulas_"):
            formulas |= vars(importlib.import_module(f"{__package__}.{module.name}"))
    return formulas


def find_formula(name: str) -> Formula:
    """Return the formula of a packaged recipe."""
    return _collect_formulas()[name.removeprefix("papers/").replace("-", "_").replace("/", "_")]
