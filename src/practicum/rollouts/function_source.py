"""The source that is a function of the user's, and the base class of all sources."""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, model_serializer, model_validator
from pydantic.json_schema import SkipJsonSchema

from practicum.core.calls import Call, format_call
from practicum.errors import RecipeError
from practicum.foreign import digest_code, is_external, load_object, name_object, takes_arguments
from practicum.prompts import Prompt


class SourceCall(Call):
    """A source, with the other places of a recipe that a resumed run cannot change with it, and why."""

    fixed: ClassVar[Mapping[str, str]] = {}


def _check_function(raw: Any) -> Any:
    """Return a function or its name; ValueError if it cannot take a prompt and a seed."""
    if isinstance(raw, str) or takes_arguments(raw, "prompt", "seed"):
        return raw
    raise ValueError(
        f"{name_object(raw)!r} cannot take a prompt and a seed; write "
        "def write(prompt: Prompt, seed: int) -> str"
    )


GivenFunction = Annotated[
    str | SkipJsonSchema[Callable[..., Any]], BeforeValidator(_check_function)
]
"""A function of Python, or its name `package.module:function`."""


class FunctionSource(SourceCall):
    """A function of yours writes each answer: `def write(prompt: Prompt, seed: int) -> str`.

    `object` is its name, `package.module:function`; from Python, `source` may be the function.
    """

    type: Literal["function"] = "function"
    object: GivenFunction
    digest: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _add_digest(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping) or isinstance(raw.get("object", ""), str):
            return raw
        return {**raw, "digest": digest_code(raw["object"])}

    @model_serializer(mode="plain")
    def _as_text(self) -> str:
        digest = {} if self.digest is None else {"digest": self.digest}
        return format_call(self.type, {"object": name_object(self.object), **digest})

    def load(self) -> Callable[[Prompt, int], Any]:
        """Return the function, imported if the recipe only names it.

        Raises RecipeError if the name belongs to a function that only its run had.
        """
        if not isinstance(self.object, str):
            return self.object
        if self.object.startswith("__main__") or not is_external(self.object):
            raise RecipeError(
                f"rollout.source: the run was started with a function of Python, {self.object}, which "
                "is not stored in its folder; give the function again: practicum.distill("
                'rollout={"source": ...}, resume=True)'
            )
        try:
            return _check_function(load_object(self.object))
        except ValueError as error:
            raise RecipeError(f"rollout.source: {error}") from None


def read_function(raw: Any) -> Any:
    """Return a function of Python as a source; anything else unchanged."""
    return {"type": "function", "object": raw} if inspect.isroutine(raw) else raw
