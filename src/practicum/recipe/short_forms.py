"""The short forms of models: a text in place of a section that names only a model.

`student: path` stands for `{model: path}`, `teacher: path` for `{type: model, model: path}`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from practicum.core.plugins import list_plugins
from practicum.models.packaged import PACKAGED
from practicum.models.sources import is_gguf

TEACHERS = ("teacher", "reference")
"""The sections that hold a teacher; a teacher inside another has the first of these keys."""


def expand_models(recipe_data: Mapping[str, Any], folder: Path = Path()) -> dict[str, Any]:
    """Return a recipe's data with each short form of a model written out.

    A text is a teacher's model if it is a path or a hub name, or a model folder in `folder`;
    otherwise it is a type, as in `teacher: self`.
    """
    expanded = dict(recipe_data)
    if isinstance(expanded.get("student"), str):
        expanded["student"] = {"model": expanded["student"]}
    for role in TEACHERS:
        if role in expanded:
            expanded[role] = _expand_teacher(expanded[role], folder)
    stages = expanded.get("stages")
    if isinstance(stages, list):
        expanded["stages"] = [
            expand_models(stage, folder) if isinstance(stage, Mapping) else stage
            for stage in stages
        ]
    return expanded


def _expand_teacher(section: Any, folder: Path) -> Any:
    """Write out the short form of a teacher's section and of the teachers inside it."""
    if isinstance(section, str) and _names_model(section, folder):
        return {"type": "model", "model": section}
    if not isinstance(section, Mapping):
        return section
    expanded = dict(section)
    if "teacher" in expanded:
        expanded["teacher"] = _expand_teacher(expanded["teacher"], folder)
    members = expanded.get("teachers")
    if isinstance(members, Mapping):
        expanded["teachers"] = {
            name: _expand_teacher(member, folder) for name, member in members.items()
        }
    return expanded


def _names_model(text: str, folder: Path) -> bool:
    """Return True if a text in place of a teacher names a model and not a type of teacher."""
    if text in list_plugins("teachers"):
        return False
    return (
        "/" in text
        or text in PACKAGED
        or (folder / text).expanduser().is_dir()
        or is_gguf(str(folder / text))
    )
