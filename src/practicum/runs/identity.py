"""The identity of a run: the digests of the models, tokenizers and prompts that decide its bytes."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from practicum.models.config import ModelConfig, ScorerConfig
from practicum.models.digests import digest_model
from practicum.pictures import list_ids
from practicum.ports import LoadedScalar, Model, Student
from practicum.recipe import Recipe
from practicum.text import Renderer
from practicum.types import Prompt, ToolUse

log = logging.getLogger(__name__)

DECODING = "decoding"
"""The name in an identity of the way in which a model decodes."""

DTYPE = "dtype"
"""The name in an identity of the dtype that `dtype: auto` chose for a model."""

PROMPTING = {"template", "system", "thinking"}
"""Settings that determine how a model reads a prompt."""


def digest_student(student: Student, *, is_local: bool) -> dict[str, str]:
    """Return the digests of the student's files.

    A student at a service has its name and the digests of its tokenizer instead.
    """
    if is_local:
        return add_prefix("student", digest_loaded(student)) | name_decoding("student", student)
    return {"student/name": student.source, **digest_tokenizer("student", student.renderer)}


def digest_loaded(model: Student | Model | LoadedScalar) -> Mapping[str, str]:
    """Return the digests of a model's files, from the record of its load if it has one."""
    return digest_model(model.source) if model.record is None else model.record.digests


def warn_of_equal_teacher(recipe: Recipe, identity: Mapping[str, str]) -> None:
    """Log a warning if the teacher has the student's weights and reads the student's own prompt.

    The digests of `identity` tell whether two folders hold the same model. A teacher of type `self`
    has its own warning.
    """
    teacher, student = recipe.teacher, recipe.student
    weights = [_select_weights(identity, part) for part in ("student", "teacher")]
    if not isinstance(teacher, ScorerConfig) or not weights[0] or weights[0] != weights[1]:
        return
    # A rounded student can learn from its own weights in full precision.
    if student.quantization not in (None, teacher.quantization):
        return
    if teacher.model_dump(include=PROMPTING) == student.model_dump(include=PROMPTING):
        log.warning(
            "teacher and student are the same model with the same prompt, so there is nothing to "
            "learn; name another teacher, or set {type: privileged, teacher: {type: self}, ...} "
            "to let it see more"
        )


def _select_weights(identity: Mapping[str, str], part: str) -> dict[str, str]:
    """Return the digests of a part's weights, without the part in their names."""
    digests = {
        name.removeprefix(f"{part}/"): digest
        for name, digest in identity.items()
        if name.startswith(f"{part}/")
    }
    return {
        name: digest
        for name, digest in digests.items()
        if name == "commit" or name.endswith(".safetensors")
    }


def digest_tokenizer(part: str, renderer: Renderer) -> dict[str, str]:
    """Return the digests of a tokenizer's files, for a model that is at a service."""
    source = str(renderer.tokenizer.name_or_path)
    return add_prefix(f"{part}/tokenizer", digest_model(source, weights=False))


def name_decoding(part: str, model: Student | Model) -> dict[str, str]:
    """Return the way in which a model decodes, if there are several."""
    return {f"{part}/{DECODING}": model.decoding} if model.decoding else {}


def name_dtype(
    part: str, config: ModelConfig, model: Student | Model | LoadedScalar
) -> dict[str, str]:
    """Return the dtype that `dtype: auto` chose, unless it is float32 as on a CPU."""
    is_chosen = config.dtype == "auto" and model.dtype not in ("", "float32")
    return {f"{part}/{DTYPE}": model.dtype} if is_chosen else {}


def note_dtypes(identity: Mapping[str, str]) -> None:
    """Log the dtypes that `dtype: auto` chose on a GPU."""
    chosen = {name.rpartition("/")[0]: d for name, d in identity.items() if is_dtype(name)}
    if chosen:
        products = ", ".join(f"{part} {dtype}" for part, dtype in chosen.items())
        log.info(f"dtype: auto: {products}; other products in float32, in TF32 where it is allowed")


def is_dtype(name: str) -> bool:
    """Return True if an entry of an identity is the dtype of a model."""
    return name.rpartition("/")[2] == DTYPE


def add_prefix(part: str, digests: Mapping[str, str]) -> dict[str, str]:
    """Return the digests under the name of the part of the run that they belong to."""
    return {f"{part}/{name}": digest for name, digest in digests.items()}


def digest_prompts(prompts: Sequence[Prompt]) -> str:
    """Return the digest of prompts with all settings that determine questions and rewards."""
    contents = json.dumps([_encode_prompt(prompt) for prompt in prompts])
    return hashlib.sha256(contents.encode()).hexdigest()


def digest_tools(tools: ToolUse | None) -> dict[str, str]:
    """Return the digest of the tools that prompts show, if there are any."""
    if tools is None:
        return {}
    contents = json.dumps([tools.calls, *(schema.to_json() for schema in tools.schemas)])
    return {"tools": hashlib.sha256(contents.encode()).hexdigest()}


def _encode_prompt(prompt: Prompt) -> list[Any]:
    """Return a prompt as JSON data, with its labels: they may decide which teacher is asked."""
    turns = [[message.to_json(), message.tokens] for message in prompt.messages]
    imitated = [prompt.response, prompt.reasoning]
    labels = [prompt.domain, prompt.teacher]
    pictures = list_ids(prompt.messages)
    return [
        prompt.id,
        turns,
        prompt.answer,
        *imitated,
        *labels,
        dict(prompt.privileged),
        *pictures,
    ]
