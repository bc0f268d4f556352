"""`practicum ls`: the names a recipe can use, each with one line."""

import ast
import inspect
from pathlib import Path

import practicum
from practicum.core.calls import did_you_mean
from practicum.errors import RecipeError

FOLDERS = ("teachers", "tasks", "backends", "trackers")
TABLES = ("divergences", "weights", "corrections", "monitors")
CALLS = ("signals", "targets", "estimators", "sources")


def list_names(room: str) -> list[dict[str, str]]:
    """The names of a room with their summaries; RecipeError for a room there is not."""
    if room == "recipes":
        return _recipes()
    if room in FOLDERS:
        return _modules(room)
    if room in TABLES:
        return _table(room)
    if room in CALLS:
        return _calls(room)
    raise RecipeError(
        f"nothing to list under {room!r}; {did_you_mean(room, ('recipes', *FOLDERS, *TABLES, *CALLS))}"
    )


def _recipes() -> list[dict[str, str]]:
    from practicum.recipe import find_recipe, load_recipe, read_recipe, recipe_names
    from practicum.recipe.methods import describe_method

    rows = []
    for name in recipe_names():
        data = read_recipe(find_recipe(name))
        stages = [str(stage["name"]) for stage in data.get("stages", [])]
        method = " -> ".join(stages) if stages else describe_method(load_recipe(name))
        summary = data.get("about", "") + (
            f" (reduced: {data['reduced']})" if data.get("reduced") else ""
        )
        rows.append(
            {
                "name": name,
                "summary": summary,
                "paper": str(data.get("paper", "")),
                "method": method,
            }
        )
    return rows


def _modules(room: str) -> list[dict[str, str]]:
    """Names and first docstring lines, read without importing anything."""
    folder = Path(practicum.__file__).parent / room
    files = [path for path in sorted(folder.iterdir()) if not path.name.startswith("_")]
    files = [path / "__init__.py" if path.is_dir() else path for path in files]
    rows = []
    for path in files:
        if path.suffix == ".py" and path.is_file():
            described = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            name = path.stem if path.stem != "__init__" else path.parent.name
            rows.append({"name": name, "summary": described.partition("\n")[0]})
    return rows


def _table(room: str) -> list[dict[str, str]]:
    if room == "monitors":
        return _monitors()
    from practicum.functional.divergences import DIVERGENCES
    from practicum.functional.estimators import CORRECTIONS
    from practicum.functional.weights import WEIGHTS

    table = {"divergences": DIVERGENCES, "weights": WEIGHTS, "corrections": CORRECTIONS}[room]
    return [{"name": name, "summary": entry.summary} for name, entry in table.items()]


def _monitors() -> list[dict[str, str]]:
    from practicum.monitors import MONITORS

    return [
        {"name": monitor.id, "summary": f"{monitor.name}: {inspect.getdoc(monitor.judge) or ''}"}
        for monitor in MONITORS.values()
    ]


def _calls(room: str) -> list[dict[str, str]]:
    from practicum.objective import AXES
    from practicum.rollouts import SOURCES

    return [
        {"name": name, "summary": (inspect.getdoc(choice) or "").partition("\n")[0]}
        for name, choice in {**AXES, "sources": SOURCES}[room].items()
    ]
