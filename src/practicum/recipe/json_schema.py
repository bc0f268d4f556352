"""The JSON Schema of a recipe, which lets an editor complete and check recipe YAML.

The schema is generated from the models that validate recipes. The alternative spellings of a file
are added: calls such as `jsd(0.1)`, schedules in place of numbers, one term without `losses`, the
short forms of monitors, `extends`, and `stages`. No key is required, because a file may extend
another file. The schema does not include the combinations that `practicum check` refuses.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from practicum.core.calls import Call
from practicum.core.plugins import PLUGIN_KEY, list_plugins, load_plugin
from practicum.models.config import MergeConfig, NewModelConfig
from practicum.monitors import MONITORS
from practicum.monitors.settings import ACTIONS
from practicum.recipe.schedule import SCHEDULED, SCHEDULES
from practicum.recipe.schema import Recipe

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]

CALL = {"type": "string", "pattern": r"^\s*[A-Za-z_][A-Za-z0-9_.]*\s*\("}
"""A name with arguments, such as `jsd(0.1)`."""

DOTTED = {"type": "string", "pattern": r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$"}
"""The dotted name of an object in another package, such as `my_parts.flat`."""

REFERENCE = "#/$defs/"


def build_schema() -> Schema:
    """Return the JSON Schema of a recipe file."""
    schema = Recipe.model_json_schema()
    defs: Schema = schema.pop("$defs")
    rooms: dict[str, Schema] = {}
    for room in _list_rooms(schema):
        _add_room(room, defs, rooms)
    for section in SCHEDULED:
        _allow_schedules(schema["properties"][section], defs)
    properties = schema["properties"]
    properties["objective"] = _allow_single_term(properties["objective"], defs)
    properties["monitors"] = _build_monitors(defs)
    properties["extends"] = {"type": "string", "description": "the recipe that provides the method"}
    properties["setting"] = _build_setting(properties)
    _allow_stages_as_models([*defs.values(), *rooms.values()])
    properties["stages"] = _build_stages(properties)
    combined = {"$schema": DIALECT, **schema, "$defs": {**defs, **rooms}}
    return _transform(combined, lambda node: _allow_calls(_drop_required(_point_to_room(node))))


def _transform(node: Any, change: Callable[[Schema], Schema]) -> Any:
    """Return a copy of a schema with each of its mappings changed, the inner ones first."""
    if isinstance(node, list):
        return [_transform(item, change) for item in node]
    if not isinstance(node, Mapping):
        return node
    return change({key: _transform(inner, change) for key, inner in node.items()})


def _list_rooms(node: Any) -> Iterator[str]:
    """Yield the rooms of the plug-ins that a schema mentions."""
    if isinstance(node, Mapping) and PLUGIN_KEY in node:
        yield node[PLUGIN_KEY]
    for inner in (
        node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
    ):
        yield from _list_rooms(inner)


def _add_room(room: str, defs: Schema, rooms: dict[str, Schema]) -> None:
    """Add the definitions of a room's plug-ins, by `type`, and of their settings."""
    if room in rooms:
        return
    names = list_plugins(room)
    rooms[room] = {}
    choices: list[Schema] = [{"enum": names}, DOTTED]
    configs = {}
    for name in names:
        # A plug-in of another package that cannot be imported has no settings to complete.
        with suppress(ValueError):
            configs[name] = load_plugin(room, name).Config
    if any(issubclass(config, Call) for config in configs.values()):
        choices.append(CALL)
    for name, config in configs.items():
        settings = config.model_json_schema()
        defs |= settings.pop("$defs", {})
        settings["properties"]["type"] = {"const": name}
        choices.append(settings)
        for inner in _list_rooms([settings, defs]):
            _add_room(inner, defs, rooms)
    choices.append({"type": "object", "properties": {"type": DOTTED}, "required": ["type"]})
    rooms[room] = {"anyOf": choices}


def _point_to_room(node: Schema) -> Schema:
    if PLUGIN_KEY not in node:
        return node
    words = {key: inner for key, inner in node.items() if key not in (PLUGIN_KEY, "type")}
    return {**words, "$ref": f"{REFERENCE}{node[PLUGIN_KEY]}"}


def _drop_required(node: Schema) -> Schema:
    """Drop required keys, which the extended file may set; foreign plug-ins keep their required keys."""
    if node.get("properties", {}).get("type") == DOTTED:
        return node
    return {key: inner for key, inner in node.items() if key != "required"}


def _allow_calls(node: Schema) -> Schema:
    """Allow a name or a call in place of an axis's mappings by `type`."""
    if "discriminator" not in node:
        return node
    names = {"enum": list(node["discriminator"]["mapping"])}
    words = {key: inner for key, inner in node.items() if key not in ("discriminator", "oneOf")}
    return {**words, "anyOf": [names, CALL, *node["oneOf"]]}


def _allow_schedules(node: Any, defs: Schema, above: tuple[str, ...] = ()) -> None:
    """Allow a schedule for every number of a section, in place; calls have separate schedules."""
    if isinstance(node, list):
        for item in node:
            _allow_schedules(item, defs, above)
    if not isinstance(node, dict) or "discriminator" in node:
        return
    name = str(node.get("$ref", "")).removeprefix(REFERENCE)
    if name and name not in above:
        _allow_schedules(defs[name], defs, (*above, name))
    for key, field in node.get("properties", {}).items():
        if field.get("type") in ("number", "integer"):
            number = {part: field.pop(part) for part in list(field) if part not in _WORDS}
            node["properties"][key] = {**field, "anyOf": [number, _SCHEDULE]}
        elif {option.get("type") for option in field.get("anyOf", ())} in _OPTIONAL_NUMBERS:
            field["anyOf"].append(_SCHEDULE)
        else:
            _allow_schedules(field, defs, above)
    for key in ("anyOf", "allOf", "items", "prefixItems"):
        _allow_schedules(node.get(key), defs, above)


_WORDS = ("title", "description", "default")
_OPTIONAL_NUMBERS = ({"number", "null"}, {"integer", "null"})
_SCHEDULE = {"type": "string", "pattern": rf"^\s*({'|'.join(SCHEDULES)})\s*\("}


def _allow_single_term(section: Schema, defs: Schema) -> Schema:
    """Return the objective's schema, which also accepts the keys of its only term."""
    objective, term = defs["Objective"], defs["Term"]
    shared = {key: field for key, field in objective["properties"].items() if key != "losses"}
    single = {**term, "properties": {**term["properties"], **shared}}
    words = {key: section[key] for key in _WORDS if key in section}
    return {**words, "anyOf": [single, objective]}


def _build_monitors(defs: Schema) -> Schema:
    """Return the schema of the monitors, with an action or `off` in place of settings."""
    # YAML reads `off` as false.
    action = {"enum": [*ACTIONS, False]}
    settings = {**defs["MonitorSettings"]}
    settings["properties"] = {**settings["properties"], "action": action}
    defs["monitor"] = {"anyOf": [action, settings]}
    by_name = {
        "type": "object",
        "properties": {name: {"$ref": f"{REFERENCE}monitor"} for name in MONITORS.list_names()},
        "patternProperties": {DOTTED["pattern"]: {"$ref": f"{REFERENCE}monitor"}},
        "additionalProperties": False,
    }
    return {"anyOf": [{"enum": ["off", False]}, by_name]}


def _allow_stages_as_models(definitions: Iterable[Schema]) -> None:
    """Allow the student of a pipeline's stage, `{stage: NAME}`, wherever a model is named."""
    stage = {
        "type": "object",
        "properties": {"stage": {"type": "string"}},
        "additionalProperties": False,
    }
    for definition in definitions:
        model = definition.get("properties", {}).get("model")
        if model is not None and "anyOf" in model:
            model["anyOf"].append(stage)
        _allow_stages_as_models(definition.get("anyOf", ()))


def _build_setting(properties: Mapping[str, Schema]) -> Schema:
    """Return the schema of a setting: the name of a pair or a file, or sections over it."""
    sections = {"type": "object", "properties": dict(properties), "additionalProperties": False}
    return {
        "anyOf": [{"type": "string"}, sections],
        "description": "the models, task and numbers that a method is tried on",
    }


def _build_stages(properties: Mapping[str, Schema]) -> Schema:
    """Return the schema of a pipeline's stages: sections of a recipe, a name and a start."""
    mappings = [config.model_json_schema() for config in (MergeConfig, NewModelConfig)]
    start = {"anyOf": [{"type": "string"}, *mappings]}
    fields = {**properties, "start": start}
    stage = {"type": "object", "properties": fields, "additionalProperties": False}
    return {"type": "array", "items": stage, "description": "the stages of a pipeline"}
