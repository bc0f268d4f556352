"""Python objects in the sections of a recipe: models, rows, teachers, tasks and scorers.

Models and rows are copied into a file next to the run, named by its content, and the recipe names
the file. So the run can be resumed, evaluated and exported like any run, and the user's object does
not change. An object of different content has a different name, which a resumed run refuses. Teachers,
tasks and scorers are not copied: they are the `object` of a plug-in of `practicum.ports.given`.
"""

import hashlib
import json
import logging
import numbers
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from practicum.errors import DataError, RecipeError
from practicum.models.digests import compute_fingerprint
from practicum.ports import Task
from practicum.recipe import Recipe, parse_recipe

log = logging.getLogger(__name__)

TEACHERS = ("teacher", "reference")
TEACHER, TASK, SCORER = (
    "practicum.ports.given.teacher",
    "practicum.ports.given.task",
    "practicum.ports.given.scorer",
)
"""The plug-ins that hold an object of Python."""

ROWS = ("path", "heldout")
"""The keys of a task that name a file of rows."""

Replace = Callable[[str, Any], str]
"""Return the path that represents an object; the text is its key, such as `student`."""


def build_recipe(sections: Mapping[str, Any], folder: Path) -> Recipe:
    """Return the recipe of sections that may hold objects, which are copied into `folder`.

    Sections that are None are left out. Raises RecipeError.
    """
    data = {key: section for key, section in sections.items() if section is not None}
    # All mistakes come before any object is copied, which takes long for a model.
    parse_recipe(_name_objects(data), "distill")
    return parse_recipe(_write_objects(data, folder), "distill")


def _name_objects(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections with a name in place of each object, to be checked before any is written.

    Raises RecipeError if an object is of a type that no recipe takes.
    """

    def check(key: str, candidate: Any) -> str:
        if key not in ROWS:
            _check_model(key, candidate)
        return f"./{key}"

    return _replace_objects(sections, check)


def _write_objects(sections: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the sections with the path of a copy in `folder` in place of each object.

    A copy that is there already is not written again. Raises DataError if a row is no mapping or
    has a value that JSON cannot represent.
    """

    def write(key: str, candidate: Any) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        copy = _write_rows if key in ROWS else _write_model
        return str(copy(key, candidate, folder.absolute()))

    return _replace_objects(sections, write)


def _replace_objects(sections: Mapping[str, Any], replace: Replace) -> dict[str, Any]:
    """Return the sections with each object replaced."""
    replaced = dict(sections)
    if "student" in replaced:
        student = replaced["student"]
        student = student if _is_section(student) else {"model": student}
        replaced["student"] = _replace_model("student", student, replace)
    for role in TEACHERS:
        if role in replaced:
            replaced[role] = _replace_teacher(role, replaced[role], replace)
    if "task" in replaced:
        replaced["task"] = _replace_rows(replaced["task"], replace)
    scorers = replaced.get("scorers")
    if isinstance(scorers, Mapping):
        replaced["scorers"] = {
            name: scorer if _is_section(scorer) else {"type": SCORER, "object": scorer}
            for name, scorer in scorers.items()
        }
    return replaced


def _is_section(section: Any) -> bool:
    """Return True if a section is given as data, and not as an object in its place."""
    return section is None or isinstance(section, str | Mapping | BaseModel)


def _replace_model(role: str, section: Any, replace: Replace) -> Any:
    """Return a section with its `model` replaced if that is an object."""
    if not isinstance(section, Mapping) or "model" not in section:
        return section
    model = section["model"]
    if isinstance(model, str | Mapping | BaseModel):
        return section
    path = str(model) if isinstance(model, os.PathLike) else replace(role, model)
    return {**section, "model": path}


def _replace_teacher(role: str, section: Any, replace: Replace) -> Any:
    """Replace the models in the section of a teacher and of the teachers inside it."""
    if not _is_section(section):
        section = (
            {"type": "model", "model": section}
            if _is_model(section)
            else {"type": TEACHER, "object": section}
        )
    section = _replace_model(role, section, replace)
    if not isinstance(section, Mapping):
        return section
    replaced = dict(section)
    if "teacher" in replaced:
        replaced["teacher"] = _replace_teacher(role, replaced["teacher"], replace)
    members = replaced.get("teachers")
    if isinstance(members, Mapping):
        replaced["teachers"] = {
            name: _replace_teacher(f"{role}-{name}", member, replace)
            for name, member in members.items()
        }
    return replaced


def _is_model(candidate: Any) -> bool:
    """Return True if an object is the path of a model, a model, or a pair with a model."""
    # Imported here: a recipe without objects needs no transformers.
    from peft import PeftModel
    from transformers import PreTrainedModel

    first = candidate[0] if isinstance(candidate, tuple) and candidate else candidate
    return isinstance(first, os.PathLike | PreTrainedModel | PeftModel)


def _replace_rows(task: Any, replace: Replace) -> Any:
    """Return the section of a task with rows replaced by the file that holds them."""
    match task:
        case str() | BaseModel():
            return task
        case (rows, verifier) if callable(verifier):
            task = {"type": "jsonl", "path": rows, "verifier": verifier}
        case Task():
            return {"type": TASK, "object": task}
        case Iterable() if not isinstance(task, Mapping):
            task = {"type": "jsonl", "path": task}
        case _ if not isinstance(task, Mapping):
            # Its settings refuse the object, with the types that a task may have.
            return {"type": TASK, "object": task}
    rows = {
        key: replace(key, task[key])
        for key in ROWS
        if not isinstance(task.get(key), str | os.PathLike | int | float | None)
    }
    return {**task, **rows}


def _check_model(role: str, candidate: Any) -> None:
    """Raise RecipeError unless an object is a pair of a model and its tokenizer."""
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    match candidate:
        case (PreTrainedModel() | PeftModel(), PreTrainedTokenizerBase()):
            return
        case PreTrainedModel() | PeftModel():
            raise RecipeError(
                f"{role}: a model object needs its tokenizer; pass {role}=(model, tokenizer)"
            )
    raise RecipeError(
        f"{role}: an object of type {type(candidate).__name__} is not a model; pass a path, a hub name, a "
        "mapping, or (model, tokenizer)"
    )


def _write_model(role: str, candidate: Any, folder: Path) -> Path:
    """Write a model and its tokenizer; return the folder, which is named by its content."""
    model, tokenizer = candidate
    temporary = Path(tempfile.mkdtemp(prefix=f"{role}.tmp-", dir=folder))
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        temporary.chmod(0o755)  # mkdtemp makes folders that other users cannot read
        copy = folder / f"{role}-{compute_fingerprint(str(temporary))[:12]}"
        if not copy.is_dir():
            temporary.rename(copy)
            log.info(f"{role}: copied the {type(model).__name__} to {copy}")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return copy


def _write_rows(key: str, rows: Iterable[Any], folder: Path) -> Path:
    """Write rows as JSONL; return the file, which is named by its content."""
    name = {"path": "rows"}.get(key, key)
    digest = hashlib.sha256()
    descriptor, temporary = tempfile.mkstemp(prefix=f"{name}.tmp-", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for line in _encode_rows(key, rows):
                digest.update(line)
                file.write(line)
        copy = folder / f"{name}-{digest.hexdigest()[:12]}.jsonl"
        os.chmod(temporary, 0o644)  # mkstemp makes files that other users cannot read
        os.replace(temporary, copy)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return copy


def _encode_rows(key: str, rows: Iterable[Any]) -> Iterator[bytes]:
    """Yield each row as a line; raises DataError at a row that is no mapping or no JSON."""
    count = 0
    for count, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise DataError(
                f"task.{key}: row {count} is of type {type(row).__name__}; give mappings such as "
                '{"prompt": "...", "answer": "..."}; a DataFrame gives them by to_dict("records")'
            )
        yield b"%s\n" % _encode_row(key, count, row).encode()
    if not count:
        raise DataError(
            f"task.{key}: no rows; an iterator that was used before gives none, so give a list"
        )


def _encode_row(key: str, count: int, row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(row), default=_convert_number, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"task.{key}: row {count} cannot be written as JSON ({error}); give texts and numbers"
        ) from None


def _convert_number(number: object) -> int | float:
    """Convert a number of another library, such as numpy, to a Python number."""
    match number:
        case numbers.Integral():
            return int(number)
        case numbers.Real():
            return float(number)
    raise TypeError(f"a value of type {type(number).__name__}")
