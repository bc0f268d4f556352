"""Plug-ins are files: `teacher: {type: privileged}` loads `practicum.teachers.privileged`.

The module's `Config` holds the settings. A new file in one of the folders adds a teacher, a task, a
source or a backend. A module of another package is given by its full name, as in
`practicum.foreign`, or by the name of its entry point in the group `practicum.teachers`,
`practicum.sources` and so on.
"""

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, SerializeAsAny, WithJsonSchema

from practicum.core.calls import Call, bind, suggest_name
from practicum.errors import RecipeError
from practicum.foreign import find_published, is_external, is_foreign, load_object, try_foreign

Part = TypeVar("Part", bound=Call)
Settings = TypeVar("Settings", bound=BaseModel)
Built = TypeVar("Built")

METHODS = "practicum.methods"
"""The package with a folder for each published method that needs special code."""

PLUGIN_KEY = "x-plugin"
"""The key that marks a plug-in's place in a JSON Schema; its value is the room."""


def list_plugins(room: str) -> list[str]:
    """Return the plug-ins of a room, such as `teachers`, in alphabetical order.

    The list includes plug-ins that other packages publish. If two have the same name, practicum's
    is used.
    """
    return sorted({*list_packaged(room), *_list_published(room)})


def load_plugin(room: str, name: str) -> Any:
    """Import the module of a plug-in; ValueError with the closest known name if it does not exist."""
    if is_external(name):
        return _import_external(room, name)
    if (module := _locate_packaged(room).get(name)) is not None:
        return importlib.import_module(module)
    published = _list_published(room)
    if name not in published:
        kind = _name_group(room).rstrip("s")
        refused = vars(importlib.import_module(_package(room))).get("REFUSED", {})
        unknown = f"no {kind} named {name!r}; {suggest_name(name, list_plugins(room))}"
        raise ValueError(refused.get(name, unknown))
    return _import_external(room, published[name])


def find_plugin_file(room: str, name: str) -> Path | None:
    """Return the file of a plug-in without importing it; None if it cannot be found."""
    modules = {**_list_published(room), **_locate_packaged(room)}
    dotted = modules.get(name, name).partition(":")[0]
    try:
        spec = importlib.util.find_spec(dotted)
    except Exception:
        # The packages around it are imported, and another package may raise anything.
        return None
    file = None if spec is None or spec.origin is None else Path(spec.origin)
    return file if file is not None and file.suffix == ".py" else None


def list_packaged(room: str) -> frozenset[str]:
    """Return the plug-ins of practicum itself, from the room's folder and the folders of methods."""
    return frozenset(_locate_packaged(room))


@functools.cache
def _locate_packaged(room: str) -> dict[str, str]:
    """Return the modules of practicum's own plug-ins by name.

    In a room, they are the files that do not begin with an underscore.
    """
    package = importlib.import_module(_package(room))
    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    modules = {name: f"{_package(room)}.{name}" for name in names if not name.startswith("_")}
    return modules | _list_method_parts().get(_name_group(room), {})


@functools.cache
def _list_method_parts() -> dict[str, dict[str, str]]:
    """Return the modules of all parts of the methods by kind and name; none without the folder."""
    spec = importlib.util.find_spec(METHODS)
    folders = spec.submodule_search_locations if spec is not None else None
    parts: dict[str, dict[str, str]] = {}
    for folder in pkgutil.iter_modules(folders or ()):
        method = importlib.import_module(f"{METHODS}.{folder.name}")
        for kind, names in method.PARTS.items():
            parts.setdefault(kind, {}).update(
                {name: f"{METHODS}.{folder.name}.{name}" for name in names}
            )
    return parts


def _list_published(room: str) -> dict[str, str]:
    """Return dotted names of plug-ins that other packages publish for a room, by entry point."""
    published = find_published(_name_group(room))
    return {name: dotted for name, dotted in published.items() if name not in list_packaged(room)}


def _name_group(room: str) -> str:
    """Return the short name of a room, such as `sources` for `practicum.rollouts.sources`."""
    return _package(room).rpartition(".")[2].strip("_")


def _package(room: str) -> str:
    """Return the package of a room of practicum; return another package's dotted name unchanged."""
    return room if "." in room else f"practicum.{room}"


def _import_external(room: str, name: str) -> Any:
    """Return a module or class of another package that has `Config` and `build`, like built-in
    plug-ins.

    The package's `NEEDED` lists the names if they differ.
    """
    try:
        plugin = load_object(name)
    except ValueError as error:
        raise ValueError(f"{name!r} is not one of the {_name_group(room)}: {error}") from error
    members = vars(plugin) if isinstance(plugin, ModuleType | type) else {}
    needed = vars(importlib.import_module(_package(room))).get("NEEDED", ("Config", "build"))
    missing = [part for part in needed if part not in members]
    if missing:
        forms = {"Config": "`class Config`", "build": "`def build(config, context)`"}
        raise ValueError(
            f"{name!r} is not one of the {_name_group(room)}: it has no {' and no '.join(missing)}; "
            f"write {' and '.join(forms[part] for part in needed)} like the files of practicum"
        )
    return plugin


def read_plugin(room: str, settings: Any, default: str | None = None) -> Any:
    """Validate a plug-in's settings with the `Config` of the module that their `type` names.

    A mapping without a type is of the `default` type, if there is one. ValueError without a type.
    """
    if isinstance(settings, BaseModel):
        return settings
    if isinstance(settings, str):
        settings = _read_text(room, settings)
    if isinstance(settings, Mapping) and default is not None:
        settings = {"type": default, **settings}
    if not isinstance(settings, Mapping) or "type" not in settings:
        raise ValueError(f"write a mapping with a `type`, one of: {', '.join(list_plugins(room))}")
    fields = dict(settings)
    name = str(fields["type"])
    config = load_plugin(room, name).Config
    if name not in list_packaged(room):
        # A plug-in of another package defines its own name in recipes.
        if "type" not in config.model_fields:
            raise ValueError(
                f"{name!r}: its Config has no type; set type: Literal[{name!r}] = {name!r}"
            )
        fields["type"] = config.model_fields["type"].default
    return config.model_validate(fields)


def read_part(room: str, base: type[Part], settings: Any) -> Part:
    """Return the settings of a room's part; ValueError if its `Config` is not below the base."""
    part = check_base(room, base, settings, read_plugin(room, settings))
    if is_foreign(part):
        try_foreign(repr(settings), part.try_out)
    return part


def build_part(room: str, base: type[Built], config: Any, *context: Any) -> Built:
    """Build a part from its settings; RecipeError if a foreign `build` returns no object of `base`."""
    part = load_plugin(room, config.type).build(config, *context)
    if not isinstance(part, base):
        raise RecipeError(
            f"{config.type!r}: build returned a {type(part).__name__}; return an object of a class "
            f"below {base.__module__}.{base.__name__}"
        )
    return part


def check_base(room: str, base: type[Settings], settings: Any, part: BaseModel) -> Settings:
    """Return the part that was read from some settings; ValueError if it is not below the base."""
    if not isinstance(part, base):
        raise ValueError(
            f"{settings!r} is no {_name_group(room).rstrip('s')}: its Config is not below "
            f"{base.__module__}.{base.__name__}"
        )
    return part


def _read_text(room: str, text: str) -> dict[str, Any]:
    """Return the settings for a name, or for a call if the plug-ins are calls."""
    name = text.partition("(")[0].strip()
    if name == text or not issubclass(config := load_plugin(room, name).Config, Call):
        return {"type": text}
    fields = [field for field in config.model_fields if field != "type"]
    return {"type": name, **bind(_name_group(room).rstrip("s"), text, fields)}


def Plugin(room: str, base: type[BaseModel] = BaseModel, default: str | None = None) -> Any:
    """Return the type of a recipe field that holds a plug-in with settings below `base`.

    A mapping without a type is of type `default`, if there is one.
    """

    def read(settings: Any) -> BaseModel:
        return check_base(room, base, settings, read_plugin(room, settings, default))

    return Annotated[
        SerializeAsAny[BaseModel],
        BeforeValidator(read),
        WithJsonSchema({PLUGIN_KEY: room}),
    ]
