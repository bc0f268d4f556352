"""Overrides of a recipe that was read already."""

from collections.abc import Sequence

from practicum.recipe import Recipe, override_all, parse_recipe, resolve_recipe


def apply_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Return the recipe with overrides (`key=value`) applied.

    RecipeError if it does not accept them.
    """
    values = resolve_recipe(recipe)
    override_all(values, overrides)
    return parse_recipe(values, recipe.name)
