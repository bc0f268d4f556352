"""A teacher that sees more than the student: instructions, examples, a solution, the attempt.

The context only changes the prompt; the scored tokens are the student's own. So this module covers
the self-distillation family (OPSD 2601.18734, SDFT 2601.19897, OPCD 2602.12275, CRISP 2603.05433,
SDPO 2601.20802, SD-Zero 2604.12002, OPSDL 2604.17535).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from practicum.core.plugins import Plugin
from practicum.errors import DataError
from practicum.objective import Full, Signal
from practicum.pictures import get_mark, hide_places, list_places
from practicum.ports import (
    Capabilities,
    PromptedClient,
    Teacher,
    TeacherConfig,
    TeacherContext,
    TeacherRequest,
    walk,
)
from practicum.rollouts.fields import (
    ROLLOUT_FIELDS,
    SIBLINGS,
    list_prompt_fields,
    list_rollout_fields,
    show_text,
)
from practicum.rows.pictures import show_pictures
from practicum.statistics import group_pairs
from practicum.teaching.client import FollowerTeacher
from practicum.teaching.members import pool_answers, pool_capabilities
from practicum.text.placeholders import fill_placeholders, list_placeholders
from practicum.types import (
    FrozenConfig,
    Message,
    Prompt,
    Rollout,
    Sample,
    SamplingParams,
    TeacherSignal,
)


class Demonstration(FrozenConfig):
    """A worked example, shown as an earlier turn."""

    prompt: str
    answer: str


class Config(TeacherConfig):
    """The context that the teacher sees beyond the student's prompt.

    `reference` is put before the question or begins the answer, and `question` replaces the
    question. In both, `{field}` stands for a privileged field of the prompt, `{question}` for its
    question and `{answer}` for its answer, as in `"A correct solution: {solution}"`. More
    placeholders describe completions: `{attempt}`, `{outcome}`, `{sibling}` and
    `{failed_sibling}`. A note of the rollout has its own name, such as `{feedback}`. From several
    texts, the first text with all its fields present is shown. If that text is empty, nothing is
    shown, so `["{hint}", ""]` compares a completion without a hint with the bare teacher.
    """

    type: Literal["privileged"] = "privileged"
    teacher: Plugin("teachers", TeacherConfig) = Field(description="the teacher that scores")  # type: ignore[valid-type]
    system: str | None = Field(
        default=None, description="a system turn: an instruction or additional text"
    )
    demonstrations: tuple[Demonstration, ...] = ()
    reference: str | tuple[str, ...] | None = Field(
        default=None,
        description="additional text, with {field} placeholders; from several texts, the first "
        "text with all its fields present",
    )
    place: Literal["question", "answer"] = Field(
        default="question",
        description="position of the reference: before the question, or at the beginning of the "
        "answer",
    )
    question: str | tuple[str, ...] | None = Field(
        default=None,
        description="text that replaces the question, with {field} placeholders, including "
        "{question}; from several texts, the first text with all its fields present",
    )
    images: Literal["none", "teacher"] | None = Field(
        default=None,
        description="the pictures and sounds that the teacher reads: `none`, or the rows' column `teacher_images`; "
        "by default the student's",
    )
    missing: Literal["error", "silent"] = Field(
        default="error",
        description="if a prompt lacks a field: stop, or leave its completions unscored",
    )
    siblings: int = Field(
        default=1,
        ge=1,
        description="score after this many siblings, one at a time, or after as many as the prompt "
        "has, and average the probabilities",
    )

    @model_validator(mode="after")
    def _check_context(self) -> "Config":
        settings = (self.demonstrations, self.references, self.questions, self.images)
        if not any(settings) and self.system is None:
            raise ValueError(
                "a privileged teacher needs something to see: system, demonstrations, reference, "
                "question or images"
            )
        if self.is_pool and not (
            self.shows(SIBLINGS) and max(len(self.references), len(self.questions)) == 1
        ):
            raise ValueError(
                "siblings: the context shows no sibling, or has several texts to select from; put "
                "{sibling} or {failed_sibling} in a single reference or question"
            )
        if self.is_pool and any(config.is_pool for _, config in walk(self.teacher)):
            raise ValueError(
                "siblings: the inner teacher already combines several answers; leave out siblings"
            )
        return self

    @property
    def hides_media(self) -> bool:
        """True with `images: none`."""
        return self.images == "none"

    def capabilities(self) -> Capabilities:
        """Return the capabilities of the inner teacher, or of a pool of its answers.

        It cannot generate if the context needs a completion, because no completion exists yet.
        """
        return self.restrict(self.teacher.capabilities(), writes=not self.needs_rollout)

    def restrict(self, inner: Capabilities, *, writes: bool) -> Capabilities:
        """Return the inner teacher's capabilities with this context."""
        inner = pool_capabilities(inner, "arithmetic") if self.is_pool else inner
        return replace(inner, writes=inner.writes and writes)

    @property
    def is_pool(self) -> bool:
        """True if the scores after several siblings are averaged."""
        return self.siblings > 1

    @property
    def references(self) -> tuple[str, ...]:
        """The texts under `reference`, in order."""
        return _list_texts(self.reference)

    @property
    def questions(self) -> tuple[str, ...]:
        """The texts under `question`, in order."""
        return _list_texts(self.question)

    @property
    def needs_rollout(self) -> bool:
        """True if the context shows a completion, so that there is no context before one."""
        return self.shows(ROLLOUT_FIELDS)

    def shows(self, names: Collection[str]) -> bool:
        """Return True if one of the names is a placeholder of the context."""
        texts = (*self.references, *self.questions)
        return any(field in names for text in texts for field in list_placeholders(text))

    def select_texts(self, fields: Collection[str]) -> tuple[str | None, str | None]:
        """Return the reference for a prompt with these fields, and the question."""
        return _select_text(self.references, fields), _select_text(self.questions, fields)

    def list_lacking(self, fields: Collection[str]) -> list[str]:
        """Return the placeholders of the selected texts that are not among `fields`."""
        texts = " ".join(filter(None, self.select_texts(fields)))
        return [name for name in list_placeholders(texts) if name not in fields]


def _list_texts(setting: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the texts of a setting that holds no text, one text or several texts."""
    if setting is None:
        return ()
    return (setting,) if isinstance(setting, str) else setting


def _select_text(texts: Sequence[str], fields: Collection[str]) -> str | None:
    """Return the first text with all placeholders in `fields`, else the last; None without texts."""
    complete = [text for text in texts if set(list_placeholders(text)) <= set(fields)]
    # The last text is for prompts with the fewest known fields.
    return next(iter([*complete, *texts[-1:]]), None)


class PrivilegedTeacher(FollowerTeacher):
    """A teacher that rewrites each prompt for an inner teacher; see `practicum.ports.Teacher`.

    `notes` are the names of the recipe's notes. A completion may lack them, and a prompt always
    lacks them.
    """

    def __init__(self, inner: Teacher, config: Config, notes: Sequence[str] = ()) -> None:
        self._inner = self._follower = inner
        self._config = config
        self._notes = notes
        self._needs_rollout = config.shows((*ROLLOUT_FIELDS, *notes))

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the inner teacher; see `Config.capabilities`."""
        return self._config.restrict(self._inner.capabilities, writes=not self._needs_rollout)

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Score the same tokens after the richer prompt.

        Rollouts that lack a field get an empty signal, if `missing` is `silent`. With `siblings`,
        the probabilities are averaged over the siblings.
        """
        enriched: list[tuple[int, Rollout]] = []
        for number in range(self._config.siblings):
            for index, fields in enumerate(list_rollout_fields(rollouts, number)):
                rollout = rollouts[index]
                if not self._is_silent(rollout.prompt, fields):
                    prompt = add_context(rollout.prompt, self._config, fields)
                    enriched.append((index, replace(rollout, prompt=prompt)))
        # The best candidates of an average are not the best candidates after each sibling.
        question = Full() if self._config.is_pool and not signal.sampled else signal
        answers = self._inner.score([rollout for _, rollout in enriched], question)
        indices = [index for index, _ in enriched]
        signals = group_pairs(zip(indices, answers, strict=True))
        return [_average(signals.get(index, [])) for index in range(len(rollouts))]

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
        names = {*ROLLOUT_FIELDS, *self._notes} - prompt.privileged.keys()
        return not self._config.shows(names) and not self._is_silent(prompt, {})

    def _is_silent(self, prompt: Prompt, rollout_fields: Mapping[str, str]) -> bool:
        """Return True if a field is missing and allowed to be; siblings and notes always are."""
        fields = list_prompt_fields(prompt).keys() | rollout_fields.keys()
        lacking = self._config.list_lacking(fields)
        may_miss = all(name in SIBLINGS or name in self._notes for name in lacking)
        return bool(lacking) and (self._config.missing == "silent" or may_miss)


def _average(answers: Sequence[TeacherSignal]) -> TeacherSignal:
    """Return the mean of the answers' probabilities; a single answer is returned unchanged."""
    if len(answers) == 1:
        return answers[0]
    named = [replace(answer, name=str(number)) for number, answer in enumerate(answers)]
    return pool_answers(named, [1 / max(len(named), 1)] * len(named), "arithmetic")


def add_context(
    prompt: Prompt, config: Config, rollout_fields: Mapping[str, str] | None = None
) -> Prompt:
    """Return the prompt with the teacher's context; DataError if a placeholder's field is missing.

    `rollout_fields` holds the notes and known `ROLLOUT_FIELDS` of a completion, if there is one.
    """
    prompt = show_pictures(prompt, config.images)
    fields = {**list_prompt_fields(prompt), **(rollout_fields or {})}
    if any(message.images for message in prompt.messages):
        # A model may have written a field, and only the question has places of pictures.
        hidden = {name: hide_places(text) for name, text in fields.items() if name != "question"}
        fields |= hidden
    lacking = config.list_lacking(fields)
    if lacking:
        # A sibling is checked last: it is optional, so another missing field is the real error.
        name = min(lacking, key=lambda name: name in SIBLINGS)
        raise DataError(_explain_missing(name, prompt, config, fields))
    system = [message for message in prompt.messages if message.role == "system"]
    turns = [message for message in prompt.messages if message.role != "system"]
    if config.system is not None:
        system = [Message("system", config.system)]
    examples = []
    for example in config.demonstrations:
        examples += [Message("user", example.prompt), Message("assistant", example.answer)]
    of_rollout = set(rollout_fields or {})
    reference, question = (
        _fill_unless_empty(text, fields, of_rollout) for text in config.select_texts(fields)
    )
    if question is not None:
        users = [n for n, turn in enumerate(turns) if turn.role == "user"]
        place = users[-1] if users else -1
        images = turns[place].images
        # `{question}` has the places of its pictures.
        marks = [get_mark(image) for image in images]
        if not list_places(question, images):
            question = "".join(marks) + question
        if list_places(question, images) != marks:
            raise DataError(
                f"prompt {prompt.id!r} has {len(images)} pictures or sounds, and teacher.question shows other "
                f"places for them; write {{question}} once, or images: none"
            )
        turns[place] = Message("user", question, images=images)
    messages = (*system, *examples, *turns)
    if reference is not None:
        messages = show_text(messages, reference, config.place)
    return replace(prompt, messages=messages)


def _fill_unless_empty(
    text: str | None, fields: Mapping[str, str], of_rollout: Collection[str]
) -> str | None:
    """Return a text with its fields filled in; None if it is empty or shows only empty notes."""
    # An empty note leaves the teacher with the student's own prompt, token for token.
    names = set() if text is None else set(list_placeholders(text)) - {"question"}
    is_empty = names and names <= set(of_rollout) and not any(fields[name] for name in names)
    if not text or is_empty:
        return None
    return fill_placeholders(text, fields)


def _explain_missing(name: str, prompt: Prompt, config: Config, fields: Mapping[str, str]) -> str:
    """Return the error text for a placeholder without a field."""
    references = " ".join(config.references)
    key = "teacher.reference" if f"{{{name}}}" in references else "teacher.question"
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
    return PrivilegedTeacher(context.build(config.teacher), config, context.notes)
