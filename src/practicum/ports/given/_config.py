"""The settings of a Python object: the object, or the name of an object that was passed earlier."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainSerializer, model_validator
from pydantic.json_schema import SkipJsonSchema

from practicum.errors import RecipeError
from practicum.foreign import digest_code, is_external, load_object, name_object
from practicum.types import FrozenConfig

GivenObject = Annotated[
    SkipJsonSchema[Any],
    PlainSerializer(name_object, return_type=str),
]
"""A Python object in a recipe, saved as `module:name` of the object or of its class."""


class GivenConfig(FrozenConfig):
    """The settings of a part of a recipe that is a Python object."""

    role: ClassVar[str]
    """The argument of `practicum.distill` that takes the object."""
    accepted: ClassVar[str]
    """A description of the types of objects that are accepted here."""

    object: GivenObject = Field(description="an object of Python, or `module:name` of one")
    digest: str | None = Field(
        default=None, description="digest of the object's code, which a resumed run compares"
    )

    @model_validator(mode="before")
    @classmethod
    def _add_digest(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping) or isinstance(raw.get("object", ""), str):
            return raw
        entry = raw["object"]
        if not cls.accepts(entry):
            raise ValueError(describe_refusal(entry, cls.accepted))
        return {**raw, "digest": digest_code(entry)}

    @classmethod
    def accepts(cls, entry: Any) -> bool:
        """Return True if an object can be used here."""
        raise NotImplementedError

    def load(self) -> Any:
        """Return the object, imported if the recipe only names it.

        Raises RecipeError if the name belongs to an object that only existed in its run.
        """
        if not isinstance(self.object, str):
            return self.object
        entry = None
        if is_external(self.object) and not self.object.startswith("__main__"):
            try:
                entry = load_object(self.object)
            except ValueError as error:
                raise RecipeError(f"{self.role}.object: {error}") from None
        if entry is None or isinstance(entry, type) or not self.accepts(entry):
            raise RecipeError(explain_absence(self.role, self.object))
        return entry


def describe_refusal(entry: Any, accepted: str) -> str:
    """Return the message for an object of a type that is not accepted."""
    if isinstance(entry, type):
        return f"the class {entry.__name__} is not accepted; give an object, {entry.__name__}(...)"
    return f"an object of type {type(entry).__name__} is not accepted; give {accepted}"


def explain_absence(role: str, name: str) -> str:
    """Return the message for an object that the run was started with and that is missing now."""
    return (
        f"{role}: the run was started with an object of Python, {name}, which is not stored in its "
        f"folder; give the object again: practicum.distill({role}=..., resume=True)"
    )
