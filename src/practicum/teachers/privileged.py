"""A teacher that sees more than the student: instructions, examples, a solution, the attempt.

The context only changes the prompt; the scored tokens are the student's own. So this module covers
the self-distillation family (OPSD 2601.18734, SDFT 2601.19897, OPCD 2602.12275, CRISP 2603.05433,
SDPO 2601.20802, SD-Zero 2604.12002, OPSDL 2604.17535).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

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
from practicum.statistics import group_pairs
from practicum.teachers._client import FollowerTeacher
from practicum.teachers._outcome import classify_outcome
from practicum.types import (
    FrozenConfig,
    Message,
    Prompt,
    Rollout,
    Sample,
    SamplingParams,
    TeacherSignal,
)

ROLLOUT_FIELDS = ("attempt", "outcome", "sibling")
"""The placeholders for the completion to score and for the prompt's other completions."""

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


class Demonstration(FrozenConfig):
    """A worked example, shown as an earlier turn."""

    prompt: str
    answer: str


class Config(FrozenConfig):
    """The context that the teacher sees beyond the student's prompt.

    `reference` is put before the question, and `question` replaces it. In both, `{field}` stands
    for a privileged field of the prompt, `{answer}` for its answer, as in `"A correct solution:
    {solution}"`, and three more for the completions: `{attempt}`, `{outcome}` and `{sibling}`. A
    note of the rollout has its own name, such as an environment's `{feedback}`.
    """

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
    def _check_context(self) -> "Config":
        texts = (self.system, self.reference, self.question)
        if not self.demonstrations and all(text is None for text in texts):
            raise ValueError(
                "a privileged teacher needs something to see: system, demonstrations, reference or "
                "question"
            )
        return self

    def capabilities(self) -> Capabilities:
        """Return the capabilities of the inner teacher.

        It cannot generate if the context needs a completion: there is none before it.
        """
        inner: Capabilities = self.teacher.capabilities()
        return replace(inner, writes=inner.writes and not self.needs_rollout)

    def members(self) -> dict[str, TeacherConfig]:
        """Return the settings of the inner teacher."""
        return {"teacher": self.teacher}

    @property
    def fields(self) -> list[str]:
        """The names of the placeholders in the context."""
        return _PLACEHOLDER.findall(f"{self.reference or ''} {self.question or ''}")

    @property
    def needs_rollout(self) -> bool:
        """True if the context shows a completion, so that there is no context before one."""
        return any(field in ROLLOUT_FIELDS for field in self.fields)


class PrivilegedTeacher(FollowerTeacher):
    """A teacher that rewrites each prompt for an inner teacher; see `practicum.ports.Teacher`."""

    def __init__(self, inner: Teacher, config: Config) -> None:
        self._inner = self._follower = inner
        self._config = config

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the inner teacher; see `Config.capabilities`."""
        inner = self._inner.capabilities
        return replace(inner, writes=inner.writes and not self._config.needs_rollout)

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Score the same tokens after the richer prompt.

        Rollouts that lack a field get a silent signal, if that is allowed.
        """
        successes = _find_successes(rollouts)
        enriched: dict[int, Rollout] = {}
        for index, rollout in enumerate(rollouts):
            fields = _list_rollout_fields(rollout, successes)
            if not self._is_silent(rollout.prompt, fields):
                prompt = add_context(rollout.prompt, self._config, fields)
                enriched[index] = replace(rollout, prompt=prompt)
        answers = self._inner.score(list(enriched.values()), signal)
        signals = dict(zip(enriched, answers, strict=True))
        return [signals.get(index, TeacherSignal()) for index in range(len(rollouts))]

    def sample(
        self, requests: Sequence[TeacherRequest], params: SamplingParams
    ) -> list[Sample] | None:
        """Sample from the inner teacher after the richer prompts; None without a context."""
        if not all(self._has_context(request.prompt) for request in requests):
            return None
        enriched = [
            TeacherRequest(add_context(request.prompt, self._config), request.seed)
            for request in requests
        ]
        return self._inner.sample(enriched, params)

    def bind_prompt(self, prompt: Prompt) -> PromptedClient | None:
        """Return the inner teacher's client of the richer prompt; None without a context."""
        if not self._has_context(prompt):
            return None
        return self._inner.bind_prompt(add_context(prompt, self._config))

    def _has_context(self, prompt: Prompt) -> bool:
        """Return True if the prompt has a context before any completion of it."""
        return not self._config.needs_rollout and not self._is_silent(prompt, {})

    def _is_silent(self, prompt: Prompt, rollout_fields: Mapping[str, str]) -> bool:
        """Return True if a field is missing and `missing` allows it; a sibling may always miss."""
        fields = _list_prompt_fields(prompt).keys() | rollout_fields.keys()
        lacking = [field for field in self._config.fields if field not in fields]
        is_allowed = self._config.missing == "silent" or all(n == "sibling" for n in lacking)
        return bool(lacking) and is_allowed


def add_context(
    prompt: Prompt, config: Config, rollout_fields: Mapping[str, str] | None = None
) -> Prompt:
    """Return the prompt with the teacher's context; DataError if a placeholder's field is missing.

    `rollout_fields` holds the notes and known `ROLLOUT_FIELDS` of a completion, if there is one.
    """
    fields = {**_list_prompt_fields(prompt), **(rollout_fields or {})}
    lacking = [name for name in config.fields if name not in fields]
    if lacking:
        # A sibling comes last: a run can do without it, so another missing field is the real error.
        name = min(lacking, key=lambda name: name == "sibling")
        raise DataError(_explain_missing(name, prompt, config, fields))
    system = [message for message in prompt.messages if message.role == "system"]
    turns = [message for message in prompt.messages if message.role != "system"]
    if config.system is not None:
        system = [Message("system", config.system)]
    examples = []
    for example in config.demonstrations:
        examples += [Message("user", example.prompt), Message("assistant", example.answer)]
    if config.reference is not None or config.question is not None:
        texts = [] if config.reference is None else [_fill(config.reference, fields)]
        question = config.question
        texts.append(turns[-1].content if question is None else _fill(question, fields))
        turns = [*turns[:-1], Message(turns[-1].role, "\n\n".join(texts))]
    return replace(prompt, messages=(*system, *examples, *turns))


def _list_prompt_fields(prompt: Prompt) -> dict[str, str]:
    """Return the texts of a prompt's placeholders; the names of a completion's are reserved."""
    fields = {"answer": prompt.answer, **prompt.privileged}
    texts = {name: value for name, value in fields.items() if value is not None}
    return {name: text for name, text in texts.items() if name not in ROLLOUT_FIELDS}


def _list_rollout_fields(
    rollout: Rollout, successes: Mapping[str, Sequence[Rollout]]
) -> dict[str, str]:
    """Return the texts of a completion's placeholders: notes and the known `ROLLOUT_FIELDS`."""
    fields = {**rollout.notes, "attempt": rollout.text}
    if classify_outcome(rollout) != "unknown":
        fields["outcome"] = classify_outcome(rollout)
    for sibling in successes.get(rollout.prompt.id, ()):
        if sibling is not rollout:
            return {**fields, "sibling": sibling.text}
    return fields


def _find_successes(rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    """Return the correct completions of each prompt, in the order of their sample numbers."""
    ordered = sorted(rollouts, key=lambda rollout: rollout.sample)
    correct = [rollout for rollout in ordered if classify_outcome(rollout) == "correct"]
    return group_pairs((rollout.prompt.id, rollout) for rollout in correct)


def _fill(text: str, fields: Mapping[str, str]) -> str:
    """Replace each `{field}` once, so that braces in a field's content stay text."""
    return _PLACEHOLDER.sub(lambda match: fields[match.group(1)], text)


def _explain_missing(name: str, prompt: Prompt, config: Config, fields: Mapping[str, str]) -> str:
    """Return the error text for a placeholder without a field."""
    key = "teacher.reference" if f"{{{name}}}" in (config.reference or "") else "teacher.question"
    if name == "outcome":
        return (
            f"prompt {prompt.id!r} has no outcome, which {key} asks for: its task gave no reward; "
            "give it an answer to verify, or write missing: silent"
        )
    if name in ROLLOUT_FIELDS:
        return (
            f"{key} shows the {name} of a completion, so there is no context for prompt "
            f"{prompt.id!r} before one"
        )
    return (
        f"prompt {prompt.id!r} has no field {name!r}, which {key} asks for; add it under "
        f"'privileged' in the task's rows, take {{{name}}} out, or write missing: silent (this "
        f"prompt has: {', '.join(fields) or 'none'})"
    )


def build(config: Config, context: TeacherContext) -> Teacher:
    """Build the inner teacher and add the context to it."""
    return PrivilegedTeacher(context.build(context, config.teacher), config)
