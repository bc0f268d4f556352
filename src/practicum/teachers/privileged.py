"""Another teacher that sees more than the student: an instruction, worked examples, a solution, its own attempt.

Context is only a way of writing the prompt; the tokens that are scored are the student's own. This one function is the
self-distillation family (OPSD 2601.18734, SDFT 2601.19897, OPCD 2602.12275, CRISP 2603.05433, SDPO 2601.20802,
SD-Zero 2604.12002, OPSDL 2604.17535).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from practicum.core.plugins import Plugin
from practicum.errors import DataError
from practicum.objective import Signal
from practicum.ports import (
    Capabilities,
    PromptedClient,
    Teacher,
    TeacherConfig,
    TeacherContext,
    TeacherRequest,
)
from practicum.teachers._outcome import classify_outcome
from practicum.types import Datum, Message, Prompt, Rollout, Sample, SamplingParams, TeacherSignal

ROLLOUT_FIELDS = ("attempt", "outcome", "sibling")
"""Placeholders that stand for the completion being scored and for what became of its prompt, not for the prompt."""

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


class Demonstration(BaseModel):
    """A worked example, shown as an earlier turn."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    prompt: str
    answer: str


class Config(BaseModel):
    """What the teacher sees beyond the student's prompt.

    `reference` is put before the question and `question` takes its place. `{field}` in either stands for a privileged field
    of the prompt, `{answer}` for its answer, for example `"A correct solution: {solution}"`, and three stand for what the
    student wrote: `{attempt}`, `{outcome}` and `{sibling}`. A note of the rollout stands under its own name, such as an
    environment's `{feedback}`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["privileged"] = "privileged"
    teacher: Plugin("teachers") = Field(description="who scores")  # type: ignore[valid-type]
    system: str | None = Field(
        default=None, description="a system turn: an instruction or a text to know"
    )
    demonstrations: tuple[Demonstration, ...] = ()
    reference: str | None = Field(
        default=None, description="text before the question, with {field} placeholders"
    )
    question: str | None = Field(
        default=None, description="text in place of the question, with {field} placeholders"
    )
    missing: Literal["error", "silent"] = Field(
        default="error",
        description="a prompt without one of the fields: stop, or leave its completions unscored",
    )

    @model_validator(mode="after")
    def _sees_more(self) -> "Config":
        if (
            self.system is None
            and not self.demonstrations
            and self.reference is None
            and self.question is None
        ):
            raise ValueError(
                "a privileged teacher needs something to see: system, demonstrations, reference or question"
            )
        return self

    def capabilities(self) -> Capabilities:
        """Those of the teacher inside; before there is a completion it cannot write with a context that needs one."""
        inside: Capabilities = self.teacher.capabilities()
        return replace(inside, writes=inside.writes and not self.needs_rollout)

    def members(self) -> dict[str, TeacherConfig]:
        """The teacher inside."""
        return {"teacher": self.teacher}

    @property
    def fields(self) -> list[str]:
        """The fields that the context asks for."""
        return _PLACEHOLDER.findall(f"{self.reference or ''} {self.question or ''}")

    @property
    def needs_rollout(self) -> bool:
        """Whether the context shows something of a completion, so that there is none before one."""
        return any(field in ROLLOUT_FIELDS for field in self.fields)


class PrivilegedTeacher(Teacher):
    """Rewrites each prompt and hands it to the teacher inside; see `practicum.ports.Teacher`."""

    def __init__(self, inner: Teacher, config: Config) -> None:
        self._inner = inner
        self._config = config

    @property
    def capabilities(self) -> Capabilities:
        """Those of the teacher inside, which may be unable to write with this context."""
        inside = self._inner.capabilities
        return replace(inside, writes=inside.writes and not self._config.needs_rollout)

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Score the same tokens after the richer prompt; silence about rollouts that lack a field, where it may be."""
        siblings = _first_successes(rollouts)
        shown: dict[int, Rollout] = {}
        for place, rollout in enumerate(rollouts):
            fields = _rollout_fields(rollout, siblings)
            if not self._silent(rollout.prompt, fields):
                shown[place] = replace(
                    rollout, prompt=with_context(rollout.prompt, self._config, fields)
                )
        answers = [TeacherSignal()] * len(rollouts)
        for place, answer in zip(
            shown, self._inner.score(list(shown.values()), signal), strict=True
        ):
            answers[place] = answer
        return answers

    def sample(
        self, requests: Sequence[TeacherRequest], params: SamplingParams
    ) -> list[Sample] | None:
        """What the teacher inside answers to the richer prompts, or None where there is no context before a completion."""
        if self._config.needs_rollout or any(
            self._silent(request.prompt, {}) for request in requests
        ):
            return None
        return self._inner.sample(
            [
                TeacherRequest(with_context(request.prompt, self._config), request.seed)
                for request in requests
            ],
            params,
        )

    def voice(self, prompt: Prompt) -> PromptedClient | None:
        """That of the teacher inside, with the richer prompt; None where there is no context before a completion."""
        if self._config.needs_rollout or self._silent(prompt, {}):
            return None
        return self._inner.voice(with_context(prompt, self._config))

    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        """Pass it on to the teacher inside."""
        self._inner.after_step(step, data)

    def save_state(self) -> dict[str, Tensor]:
        """Return that of the teacher inside."""
        return self._inner.save_state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Give it to the teacher inside."""
        self._inner.load_state(tensors)

    def _silent(self, prompt: Prompt, rollout_fields: Mapping[str, str]) -> bool:
        """Whether a field is missing and that is no error: a sibling is a matter of luck, other fields of `missing`."""
        known = _prompt_fields(prompt).keys() | rollout_fields.keys()
        lacking = [field for field in self._config.fields if field not in known]
        forgiven = self._config.missing == "silent" or all(field == "sibling" for field in lacking)
        return bool(lacking) and forgiven


def with_context(
    prompt: Prompt, config: Config, rollout_fields: Mapping[str, str] | None = None
) -> Prompt:
    """The prompt as the teacher sees it; DataError where a placeholder's field is missing.

    `rollout_fields` are those of `ROLLOUT_FIELDS` that are known; without a completion there are none.
    """
    own_system = [message for message in prompt.messages if message.role == "system"]
    turns = [message for message in prompt.messages if message.role != "system"]
    system = [Message("system", config.system)] if config.system is not None else own_system
    shown = [
        message
        for example in config.demonstrations
        for message in (Message("user", example.prompt), Message("assistant", example.answer))
    ]
    fields = {**_prompt_fields(prompt), **(rollout_fields or {})}
    lacking = [name for name in config.fields if name not in fields]
    if lacking:
        raise DataError(
            _lacking(min(lacking, key=lambda name: name == "sibling"), prompt, config, fields)
        )
    if config.reference is not None or config.question is not None:
        asked = turns[-1].content if config.question is None else _filled(config.question, fields)
        before = [] if config.reference is None else [_filled(config.reference, fields)]
        turns = [*turns[:-1], Message(turns[-1].role, "\n\n".join([*before, asked]))]
    return replace(prompt, messages=(*system, *shown, *turns))


def _prompt_fields(prompt: Prompt) -> dict[str, str]:
    """What placeholders can stand for before there is a completion; the names of a completion's fields are its own."""
    fields = {"answer": prompt.answer, **prompt.privileged}
    return {
        name: value
        for name, value in fields.items()
        if value is not None and name not in ROLLOUT_FIELDS
    }


def _rollout_fields(rollout: Rollout, successes: Mapping[str, Sequence[Rollout]]) -> dict[str, str]:
    """What placeholders can stand for once there is a completion: its notes, and the `ROLLOUT_FIELDS` that are known."""
    fields = {**rollout.notes, "attempt": rollout.text}
    if classify_outcome(rollout) != "unknown":
        fields["outcome"] = classify_outcome(rollout)
    others = [other for other in successes.get(rollout.prompt.id, ()) if other is not rollout]
    return {**fields, "sibling": others[0].text} if others else fields


def _first_successes(rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    """The first two correct completions of each prompt by sample number: one of them is another than any given one."""
    found: dict[str, list[Rollout]] = {}
    for rollout in sorted(rollouts, key=lambda rollout: rollout.sample):
        if classify_outcome(rollout) == "correct":
            found.setdefault(rollout.prompt.id, []).append(rollout)
    return {name: successes[:2] for name, successes in found.items()}


def _filled(text: str, fields: Mapping[str, str]) -> str:
    """The text with each `{field}` replaced once, so that braces in a field's content stay text."""
    return _PLACEHOLDER.sub(lambda match: fields[match.group(1)], text)


def _lacking(name: str, prompt: Prompt, config: Config, fields: Mapping[str, str]) -> str:
    """What to say where a placeholder stands for nothing."""
    key = "teacher.reference" if f"{{{name}}}" in (config.reference or "") else "teacher.question"
    if name == "outcome":
        return (
            f"prompt {prompt.id!r} has no outcome, which {key} asks for: its task gave no reward; give it an answer to "
            "verify, or write missing: silent"
        )
    if name in ROLLOUT_FIELDS:
        return f"{key} shows the {name} of a completion, so there is no context for prompt {prompt.id!r} before one"
    return (
        f"prompt {prompt.id!r} has no field {name!r}, which {key} asks for; add it under 'privileged' in the task's rows, "
        f"take {{{name}}} out, or write missing: silent (this prompt has: {', '.join(fields) or 'none'})"
    )


def build(config: Config, context: TeacherContext) -> Teacher:
    """Build the teacher inside and put the context around it."""
    return PrivilegedTeacher(context.build(context, config.teacher), config)
