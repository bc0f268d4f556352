"""`practicum laws`: check entries of the user with the laws of the built-in entries."""

from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from practicum.core.calls import bind, parse_call, suggest_name
from practicum.errors import RecipeError
from practicum.foreign import is_external, load_object
from practicum.functional.advantages import Advantage
from practicum.functional.laws import LawCheck, check_laws
from practicum.functional.registry import TABLES


def check_entries(text: str) -> dict[str, list[LawCheck]]:
    """Return the verdicts on an entry written as in a recipe, or on all entries of a module.

    Raises RecipeError if the text names no entry.
    """
    try:
        entries = list(_find_entries(text))
        return {
            f"{kind} {name}": check_laws(kind, entry, arguments)
            for name, kind, entry, arguments in entries
        }
    except ValueError as error:
        raise RecipeError(str(error)) from None


def format_verdicts(name: str, verdicts: list[LawCheck]) -> list[str]:
    """Return an entry's verdicts as lines of text."""
    lines = [name]
    for verdict in verdicts:
        lines.append(f"  {'holds ' if verdict.holds else 'BROKEN'}  {verdict.statement}")
        if verdict.counterexample is not None:
            lines.append(f"          {verdict.counterexample}")
    broken = sum(not verdict.holds for verdict in verdicts)
    return [*lines, f"  {len(verdicts) - broken} laws hold, {broken} broken"]


def _find_entries(text: str) -> Iterator[tuple[str, str, Any, dict[str, Any]]]:
    """Yield the name, kind, entry and arguments of each entry that a text names."""
    name = parse_call(text)[0]
    table_entry = next(
        (table[name] for _, table in TABLES.values() if name in table.list_names()), None
    )
    loaded: Any = table_entry
    # A module may have no dot, unlike an entry in a recipe.
    if table_entry is None and (is_external(name) or (name.isidentifier() and find_spec(name))):
        loaded = load_object(name)
    if isinstance(loaded, ModuleType):
        candidates = {f"{name}:{key}": member for key, member in vars(loaded).items()}
    else:
        candidates = {name: loaded}
    matches = [
        (key, kind, entry)
        for key, entry in candidates.items()
        for kind, (cls, _) in TABLES.items()
        if isinstance(entry, cls)
    ]
    if not matches:
        classes = ", ".join(cls.__name__ for cls, _ in TABLES.values())
        names = {key for _, table in TABLES.values() for key in table}
        raise ValueError(
            f"{name!r} names no entry ({classes}); write package.module:entry, or one of ours: "
            f"{suggest_name(name, names)}"
        )
    for key, kind, entry in matches:
        defaults = {} if isinstance(entry, Advantage) else entry.defaults
        arguments = bind(kind, text, list(defaults))
        yield key, kind, entry, arguments
