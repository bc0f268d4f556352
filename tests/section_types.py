"""Write `src/practicum/recipe/typed.py`, the sections of a recipe as typed dicts, from the models.

    python -m tests.test_docs

rewrites the file. An editor completes the keys of `practicum.distill(student={...})` from it.
"""

import types
import typing
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from practicum.core.calls import Call
from practicum.core.plugins import list_plugins, load_plugin
from practicum.objective import Objective, Term
from practicum.objective.choices import Choice
from practicum.recipe.schedule import SCHEDULED
from practicum.recipe.schema import Recipe

TARGET = Path(__file__).resolve().parents[1] / "src" / "practicum" / "recipe" / "typed.py"

ROOMS = {"teacher": "teachers", "task": "tasks", "backend": "backends", "tracking": "trackers"}

HEAD = '''"""The sections of a recipe as typed dicts, for the completion of `practicum.distill(student={...})`.

Written by `python -m tests.test_docs` from the models that validate recipes; they decide what is
valid. A section of a plug-in has the keys of all its types.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

'''


def render(annotation: Any, *, scheduled: bool = False) -> list[str]:
    """Return the alternatives of an annotation as Python text."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return render(inner[0], scheduled=scheduled)
    if annotation is None or annotation is types.NoneType:
        return ["None"]
    if origin in (typing.Union, types.UnionType):
        return [text for part in inner for text in render(part, scheduled=scheduled)]
    if origin is Literal:
        return [f"Literal[{', '.join(map(repr, inner))}]"]
    if origin is tuple:
        parts = dict.fromkeys(text for part in inner if part is not ... for text in render(part))
        return [f"Sequence[{' | '.join(parts)}]"]
    if annotation in (int, float):
        return [annotation.__name__, *(["str"] if scheduled else [])]
    if annotation in (bool, str):
        return [annotation.__name__]
    if annotation is Path:
        return ["str"]
    if isinstance(annotation, type) and issubclass(annotation, Call | Choice):
        return ["str", "Mapping[str, Any]"]
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return (
        ["str", "Mapping[str, Any]"]
        if annotation is BaseModel
        else (["Mapping[str, Any]"] if is_model or origin is dict else ["Any"])
    )


def collect_fields(*models: type[BaseModel], scheduled: bool = False) -> dict[str, list[str]]:
    """Return the keys of models with the alternatives of their values."""
    fields: dict[str, list[str]] = {}
    for model in models:
        for name, field in model.model_fields.items():
            fields.setdefault(name, []).extend(render(field.annotation, scheduled=scheduled))
    return {name: list(dict.fromkeys(texts)) for name, texts in fields.items()}


def build_sections() -> dict[str, dict[str, list[str]]]:
    """Return the keys of every section of a recipe, by the name of its typed dict."""
    sections = {}
    for name, field in Recipe.model_fields.items():
        if name in ROOMS:
            configs = [load_plugin(ROOMS[name], kind).Config for kind in list_plugins(ROOMS[name])]
            kinds = ", ".join(map(repr, list_plugins(ROOMS[name])))
            fields = {**collect_fields(*configs), "type": [f"Literal[{kinds}]", "str"]}
        elif name == "objective":
            fields = collect_fields(Objective, Term, scheduled=True)
        else:
            models = [
                part
                for part in (field.annotation, *typing.get_args(field.annotation))
                if isinstance(part, type) and issubclass(part, BaseModel)
            ]
            if not models or models == [BaseModel]:
                continue
            fields = collect_fields(*models, scheduled=name in SCHEDULED)
        sections[f"{name.title()}Section"] = fields
    return sections


def render_module() -> str:
    """Return the text of the module."""
    parts = [HEAD]
    for name, fields in build_sections().items():
        label = name.removesuffix("Section").lower()
        parts.append(
            f'\nclass {name}(TypedDict, total=False):\n    """The section `{label}`."""\n\n'
        )
        parts += [f"    {key}: {' | '.join(texts)}\n" for key, texts in fields.items()]
        parts.append("\n")
    return "".join(parts)


def format_module() -> str:
    """Return the text as ruff formats it."""
    import subprocess
    import sys

    words = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(TARGET), "-"]
    return subprocess.run(
        words, input=render_module(), text=True, capture_output=True, check=True
    ).stdout


def write_module() -> None:
    """Rewrite the module."""
    TARGET.write_text(format_module(), encoding="utf-8")
