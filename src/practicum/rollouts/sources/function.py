"""Answers from a user-defined function."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_serializer, model_validator
from pydantic.json_schema import SkipJsonSchema

from practicum.core.calls import format_call
from practicum.errors import DataError, RecipeError
from practicum.foreign import (
    describe_error,
    digest_code,
    is_external,
    load_object,
    name_object,
    takes_arguments,
)
from practicum.prompts import Prompt
from practicum.rollouts.batch import RolloutKey
from practicum.rollouts.responses import encode_written
from practicum.rollouts.source import OtherWriter, SourceConfig, SourceParts
from practicum.types import Rollout


def _check_function(raw: Any) -> Any:
    """Return a function or its name; ValueError if it cannot take a prompt and a seed."""
    if isinstance(raw, str) or takes_arguments(raw, "prompt", "seed"):
        return raw
    raise ValueError(
        f"{name_object(raw)!r} cannot take a prompt and a seed; define it as "
        "def write(prompt: Prompt, seed: int) -> str"
    )


GivenFunction = Annotated[
    str | SkipJsonSchema[Callable[..., Any]], BeforeValidator(_check_function)
]
"""A Python function, or its name `package.module:function`."""


class Config(SourceConfig):
    """Your function writes each answer: `def write(prompt: Prompt, seed: int) -> str`.

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

        Raises RecipeError if the name belongs to a function that was only passed from Python.
        """
        if not isinstance(self.object, str):
            return self.object
        if self.object.startswith("__main__") or not is_external(self.object):
            raise RecipeError(
                f"rollout.source: the run was started with a Python function, {self.object}, which "
                "is not stored in its folder; pass the function again: practicum.distill("
                'rollout={"source": ...}, resume=True)'
            )
        try:
            return _check_function(load_object(self.object))
        except ValueError as error:
            raise RecipeError(f"rollout.source: {error}") from None

    @property
    def other_writers(self) -> tuple[OtherWriter, ...]:
        """Return the dataset: the function's answers are treated like answers of rows."""
        return ("dataset",)

    @property
    def reads_answers(self) -> bool:
        """Return False: the function writes the answers."""
        return False

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Return the answers of the function, which gets one seed per answer."""
        write, length = self.load(), parts.sampler.params.max_new_tokens
        samples = []
        for key, seed in zip(keys, parts.sampler.compute_seeds(keys), strict=True):
            try:
                text = write(key.prompt, seed)
            # The user's code may raise anything.
            except Exception as error:
                raise DataError(
                    f"rollout.source: {name_object(self.object)} fails for prompt "
                    f"{key.prompt.id!r}: {describe_error(error)}"
                ) from error
            samples.append(encode_written(key.prompt, text, parts.writers.renderer, length))
        prompts = parts.sampler.render_prompts(keys)
        return parts.sampler.build_rollouts(keys, prompts, samples, "dataset")
