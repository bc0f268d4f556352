"""Plug-ins are files: `teacher: {type: privileged}` loads `practicum.teachers.privileged`.

The module's `Config` holds the settings. A new file in one of the folders adds a teacher, a task or
a backend; a name as in `practicum.foreign` loads one from another package.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, SerializeAsAny, WithJsonSchema

from practicum.core.calls import suggest_name
from practicum.foreign import is_external, load_object

PLUGIN_KEY = "x-plugin"
"""The key that marks a plug-in's place in a JSON Schema; its value is the room."""


def list_plugins(room: str) -> list[str]:
    """Return the plug-ins of a room, such as `teachers`, in alphabetical order."""
    package = importlib.import_module(_package(room))
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    return sorted(name for name in names if not name.startswith("_"))


def load_plugin(room: str, name: str) -> Any:
    """Import the module of a plug-in; ValueError with the closest known name if there is none."""
    if is_external(name):
        return _import_external(room, name)
    if name not in list_plugins(room):
        kind = _package(room).rpartition(".")[2].strip("_").rstrip("s")
        raise ValueError(f"no {kind} named {name!r}; {suggest_name(name, list_plugins(room))}")
    return importlib.import_module(f"{_package(room)}.{name}")


def _package(room: str) -> str:
    """Return the package of a room of practicum, or the dotted name of a package elsewhere as it is."""
    return room if "." in room else f"practicum.{room}"


def _import_external(room: str, name: str) -> Any:
    """Return a module or class of another package with `Config` and `build`, as ours have."""
    try:
        plugin = load_object(name)
    except ValueError as error:
        raise ValueError(f"{name!r} is none of the {room}: {error}") from error
    members = vars(plugin) if isinstance(plugin, ModuleType | type) else {}
    missing = [part for part in ("Config", "build") if part not in members]
    if missing:
        raise ValueError(
            f"{name!r} is none of the {room}: it has no {' and no '.join(missing)}; "
            "write `class Config` and `def build(config, context)` as the files of practicum do"
        )
    return plugin


def read_plugin(room: str, settings: Any, default: str | None = None) -> Any:
    """Validate a plug-in's settings with the `Config` of the module that their `type` names.

    A mapping without a type is of the `default` type, if there is one. ValueError without a type.
    """
    if isinstance(settings, BaseModel):
        return settings
    if isinstance(settings, str):
        settings = {"type": settings}
    if isinstance(settings, Mapping) and default is not None:
        settings = {"type": default, **settings}
    if not isinstance(settings, Mapping) or "type" not in settings:
        raise ValueError(f"write a mapping with a `type`, one of: {', '.join(list_plugins(room))}")
    fields = dict(settings)
    name = str(fields["type"])
    config = load_plugin(room, name).Config
    if is_external(name):
        # A plug-in of another package declares a short literal type; the recipe has its full path.
        fields["type"] = config.model_fields["type"].default
    return config.model_validate(fields)


def Plugin(room: str, default: str | None = None) -> Any:
    """Return the type of a recipe field that holds a plug-in, by default of type `default`."""
    return Annotated[
        SerializeAsAny[BaseModel],
        BeforeValidator(lambda value: read_plugin(room, value, default)),
        WithJsonSchema({PLUGIN_KEY: room}),
    ]
