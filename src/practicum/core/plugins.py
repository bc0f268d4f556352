"""A name is a file: `{type: privileged}` under `teacher` is `practicum.teachers.privileged`, and its `Config` says what else.

Dropping a file into one of the folders is all it takes to add a teacher, a task or a backend; a dotted name loads one
from another package.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, SerializeAsAny

from practicum.core.calls import did_you_mean


def names(room: str) -> list[str]:
    """The plug-ins of a room, such as `teachers`, in alphabetical order."""
    package = importlib.import_module(_package(room))
    return sorted(
        module.name
        for module in pkgutil.iter_modules(package.__path__)
        if not module.name.startswith("_")
    )


def module_of(room: str, name: str) -> Any:
    """The module behind a plug-in's name; ValueError with the nearest known name."""
    if all(part.isidentifier() for part in name.split(".")) and "." in name:
        return _import_external(room, name)
    if name not in names(room):
        raise ValueError(f"no {room.rstrip('s')} named {name!r}; {did_you_mean(name, names(room))}")
    return importlib.import_module(f"{_package(room)}.{name}")


def _package(room: str) -> str:
    """Return the package of a room of practicum, or the dotted name of a package elsewhere as it is."""
    return room if "." in room else f"practicum.{room}"


def _import_external(room: str, name: str) -> Any:
    """A module of another package, which has what one of ours has."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"no module {name!r} to load as one of the {room} ({error})") from error
    missing = [part for part in ("Config", "build") if part not in vars(module)]
    if missing:
        raise ValueError(
            f"module {name!r} is none of the {room}: it has no {' and no '.join(missing)}; write `class Config` and "
            "`def build(config, context)` as the files of practicum do"
        )
    return module


def read_plugin(room: str, value: Any, default: str | None = None) -> Any:
    """Return a plug-in's settings, the `Config` of the module that their `type` names; ValueError where there is none.

    A mapping without a type is of the `default` type, where there is one.
    """
    if isinstance(value, BaseModel):
        return value
    if isinstance(value, str):
        value = {"type": value}
    if isinstance(value, Mapping) and default is not None:
        value = {"type": default, **value}
    if not isinstance(value, Mapping) or "type" not in value:
        raise ValueError(f"write a mapping with a `type`, one of: {', '.join(names(room))}")
    config = module_of(room, str(value["type"])).Config
    fields = dict(value)
    if "." in str(value["type"]):
        fields["type"] = config.model_fields["type"].default
    return config.model_validate(fields)


def Plugin(room: str, default: str | None = None) -> Any:
    """Return the type of a recipe field that holds a plug-in's settings, which are of the `default` type unless they say so."""
    return Annotated[
        SerializeAsAny[BaseModel], BeforeValidator(lambda value: read_plugin(room, value, default))
    ]
