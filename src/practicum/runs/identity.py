"""The identity of a run: the digests of the models, tokenizers and prompts that decide its bytes."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from practicum.models.digests import digest_model
from practicum.ports import Model, Student
from practicum.text import Renderer
from practicum.types import Prompt

DECODING = "decoding"
"""The name in an identity of the way in which a model decodes."""


def digest_student(student: Student, *, is_local: bool) -> dict[str, str]:
    """Return the digests of the student's files.

    A student at a service has its name and the digests of its tokenizer instead.
    """
    if is_local:
        return add_prefix("student", digest_model(student.source)) | name_decoding(
            "student", student
        )
    return {"student/name": student.source, **digest_tokenizer("student", student.renderer)}


def digest_tokenizer(part: str, renderer: Renderer) -> dict[str, str]:
    """Return the digests of a tokenizer's files, for a model that is at a service."""
    source = str(renderer.tokenizer.name_or_path)
    return add_prefix(f"{part}/tokenizer", digest_model(source, weights=False))


def name_decoding(part: str, model: Student | Model) -> dict[str, str]:
    """Return the way in which a model decodes, if there are several."""
    return {f"{part}/{DECODING}": model.decoding} if model.decoding else {}


def add_prefix(part: str, digests: Mapping[str, str]) -> dict[str, str]:
    """Return the digests under the name of the part of the run that they belong to."""
    return {f"{part}/{name}": digest for name, digest in digests.items()}


def digest_prompts(prompts: Sequence[Prompt]) -> str:
    """Return the digest of prompts with all that decides what is asked and rewarded."""
    contents = json.dumps([_encode_prompt(prompt) for prompt in prompts])
    return hashlib.sha256(contents.encode()).hexdigest()


def _encode_prompt(prompt: Prompt) -> list[Any]:
    """Return a prompt as JSON data, with its labels: they may decide which teacher is asked."""
    turns = [[message.role, message.content] for message in prompt.messages]
    labels = [prompt.domain, prompt.teacher]
    return [prompt.id, turns, prompt.answer, prompt.response, *labels, dict(prompt.privileged)]
