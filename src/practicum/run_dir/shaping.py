"""Build the shape of a JSON file, and drop keys that the shape does not have."""

import dataclasses
from functools import reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema

Number = Annotated[float, Field(allow_inf_nan=False, gt=-1e100, lt=1e100)]
Step = Annotated[int, Field(ge=0, lt=2**53)]
Count = Annotated[int, Field(ge=0, lt=2**53)]


def select_known(content: Any, shaped: Any) -> Any:
    """Return JSON data without the keys that its shape does not have.

    `shaped` is the data after validation by its shape. Numbers keep their written form: a task may
    give whole numbers as rewards, and a resumed run writes the same bytes again.
    """
    if isinstance(shaped, BaseModel):
        if shaped.model_config.get("extra") == "allow":
            return content
        names = type(shaped).model_fields.keys() & content.keys()
        chosen = {name: select_known(content[name], getattr(shaped, name)) for name in names}
        return {name: chosen[name] for name in content if name in chosen}
    if isinstance(shaped, dict):
        return {name: select_known(content[name], shaped[name]) for name in content}
    if isinstance(shaped, list):
        return [select_known(*pair) for pair in zip(content, shaped, strict=True)]
    return content


def build_shape(kind: type) -> type[BaseModel]:
    """Return the shape of a dataclass in JSON: every field is required, even if it has a default."""
    hints = get_type_hints(kind)
    fields: dict[str, Any] = {
        field.name: (_replace_hint(hints[field.name]), ...) for field in dataclasses.fields(kind)
    }
    return create_model(kind.__name__, __config__=ConfigDict(extra="ignore"), **fields)


class _Complete:
    """Validate a dataclass in JSON by the shape of its fields."""

    def __get_pydantic_core_schema__(
        self, source: type, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return the schema of the shape instead of the schema of the dataclass."""
        return handler.generate_schema(build_shape(source))


COMPLETE = _Complete()
"""Marks a dataclass as `Annotated[Kind, COMPLETE]`: all of its fields must be in the file."""


def _replace_hint(hint: Any) -> Any:
    """Return a type with the shapes of its dataclasses, and with bounds on its numbers."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return build_shape(hint)
    if hint is float:
        return Number
    origin, arguments = get_origin(hint), get_args(hint)
    if not arguments or origin is Literal:
        return hint
    inner = tuple(map(_replace_hint, arguments))
    if origin is None or origin in (UnionType, Union):
        return reduce(or_, inner)
    return origin[inner]
