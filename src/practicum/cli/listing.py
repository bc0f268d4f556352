"""`practicum ls`: the names that a recipe can use, with a line about each."""

import ast
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType

from practicum.core.calls import suggest_name
from practicum.core.plugins import find_plugin_file, list_plugins
from practicum.errors import RecipeError

FOLDERS = {
    **{name: name for name in ("teachers", "scorers", "tasks", "backends", "trackers")},
    "notes": "practicum.notes",
    "signals": "practicum.objective.signals",
    "targets": "practicum.objective.targets",
    "clips": "practicum.objective.clips",
    "estimators": "practicum.objective.estimators",
    "sources": "practicum.rollouts.sources",
}
"""The rooms of plug-ins by kind."""
TABLES = {
    "divergences": "divergence",
    "weights": "weight",
    "samples": "sample weight",
    "corrections": "correction",
    "advantages": "advantage",
    "rewards": "reward",
}
"""The tables of `practicum.functional`, each with the kind of its entries."""


def list_names(
    kind: str, like: str | None = None, family: str | None = None
) -> list[dict[str, str]]:
    """Return the names of a kind with their summaries.

    `like` keeps the rows with this word, in any case; `family` keeps the recipes of one family.
    Raises RecipeError for an unknown kind or family, and if no row is left.
    """
    if family is not None and kind != "recipes":
        raise RecipeError(f"--family {family}: only recipes have a family; leave it out")
    rows = _list_recipes(family) if kind == "recipes" else _list_kind(kind)
    if like is not None:
        rows = [row for row in rows if like.lower() in " ".join(row.values()).lower()]
    if not rows:
        options = {"--family": family, "--like": like}
        words = " ".join(f"{name} {word}" for name, word in options.items() if word is not None)
        raise RecipeError(f"nothing under {kind} {words}; practicum ls {kind} lists all")
    return rows


def _list_kind(kind: str) -> list[dict[str, str]]:
    if kind in FOLDERS:
        return _list_modules(kind)
    if kind in TABLES:
        return _list_table(kind)
    if kind == "monitors":
        return _list_monitors()
    kinds = ("recipes", "monitors", *FOLDERS, *TABLES)
    # A single word may be a misspelt kind: the suggestion is then of more use than the import.
    if suggest_name(kind, kinds).startswith("did you mean"):
        raise RecipeError(f"nothing to list under {kind!r}; {suggest_name(kind, kinds)}")
    return _list_entries(kind, kinds)


def _list_recipes(family: str | None) -> list[dict[str, str]]:
    """Return the packaged recipes of all families or of one family."""
    from practicum.recipe import (
        FAMILIES,
        find_recipe,
        list_recipe_names,
        load_recipe,
        read_recipe,
    )
    from practicum.recipe.methods import describe_method

    if family is not None and family not in FAMILIES:
        raise RecipeError(f"--family: no family {family!r}; {suggest_name(family, FAMILIES)}")
    rows = []
    for name in list_recipe_names():
        recipe_data = read_recipe(find_recipe(name))
        if family not in (None, recipe_data["family"]):
            continue
        stages = [str(stage["name"]) for stage in recipe_data.get("stages", [])]
        rows.append(
            {
                "name": name,
                "group": f"{recipe_data['family']}: {FAMILIES[recipe_data['family']]}",
                "summary": recipe_data["about"],
                "paper": str(recipe_data.get("paper", "")),
                "reduced": str(recipe_data.get("reduced", "")),
                "teacher_effect": str(recipe_data.get("teacher_effect", "")).replace("_", " "),
                "method": " -> ".join(stages) or describe_method(load_recipe(name)),
            }
        )
    order = [f"{name}: {title}" for name, title in FAMILIES.items()]
    return sorted(rows, key=lambda row: order.index(row["group"]))


def _list_modules(kind: str) -> list[dict[str, str]]:
    # Plug-ins are read, not imported: a tracker or a backend may need a package that is missing.
    rows = []
    for name in list_plugins(FOLDERS[kind]):
        path = find_plugin_file(FOLDERS[kind], name)
        text = "" if path is None else path.read_text(encoding="utf-8")
        docstring = ast.get_docstring(ast.parse(text)) or ""
        rows.append({"name": name, "summary": docstring.partition("\n")[0]})
    return rows


def _list_table(kind: str) -> list[dict[str, str]]:
    from practicum.functional.registry import TABLES as ENTRIES

    _, table = ENTRIES[TABLES[kind]]
    return _summarise(table.list_names(), lambda name: table[name].summary)


def _summarise(names: Sequence[str], summarise: Callable[[str], str]) -> list[dict[str, str]]:
    """Return each part with its line; if a part of another package fails, with the reason."""
    rows = []
    for name in names:
        try:
            summary = summarise(name)
        except ValueError as error:
            summary = f"cannot be used: {error}"
        rows.append({"name": name, "summary": summary})
    return rows


def _list_entries(name: str, kinds: Sequence[str]) -> list[dict[str, str]]:
    """Return the entries in a module of the user's, each with its kind."""
    from practicum.foreign import load_object
    from practicum.functional.registry import TABLES as ENTRIES

    try:
        module = load_object(name)
    except ValueError as error:
        raise RecipeError(str(error)) from None
    members = vars(module) if isinstance(module, ModuleType) else {}
    rows = [
        {"name": f"{name}:{key}", "summary": f"{kind}: {entry.summary}"}
        for key, entry in members.items()
        for kind, (cls, _) in ENTRIES.items()
        if isinstance(entry, cls)
    ]
    if not rows:
        raise RecipeError(
            f"{name!r} has no entries of practicum.functional; name a module with some, or one of "
            f"{', '.join(kinds)}"
        )
    return rows


def _list_monitors() -> list[dict[str, str]]:
    from practicum.monitors.table import MONITORS, find_monitor

    def describe(name: str) -> str:
        monitor = find_monitor(name)
        return f"{monitor.name}: {inspect.getdoc(monitor.judge) or ''}"

    return _summarise(MONITORS.list_names(), describe)
