"""The base of all sources of rollouts: settings, facts that a recipe is checked by, and `collect`.

A source is one file of `practicum.rollouts.sources`, or a module of another package, with a class
`Config` below `SourceConfig`.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from pydantic import BeforeValidator, Field, SerializeAsAny, WithJsonSchema

from practicum.core.calls import Call
from practicum.core.plugins import PLUGIN_KEY, read_part
from practicum.errors import CapabilityError
from practicum.objective import Objective
from practicum.ports import (
    Capabilities,
    OpensEpisodes,
    PromptedClient,
    SamplingClient,
    Task,
    Teacher,
)
from practicum.ports.notes import Note
from practicum.ports.scoring import Scorer
from practicum.rollouts.batch import RolloutKey
from practicum.rollouts.responses import check_responses, encode_response
from practicum.rollouts.sampling import RolloutSampler
from practicum.rollouts.segments import Segments
from practicum.rollouts.tape import RolloutArchive, RolloutRow
from practicum.rollouts.traffic import Traffic
from practicum.text import Renderer
from practicum.types import FrozenConfig, Metrics, Prompt, Rollout, Sample

SOURCES = "practicum.rollouts.sources"
"""The package with the sources, one file each."""

Form = Literal["any", "answers", "conversations"]
OtherWriter = Literal["dataset", "teacher", "reference"]

SampleOrRollout = TypeVar("SampleOrRollout", Sample, Rollout)


@dataclass(frozen=True, slots=True)
class RolloutWriters:
    """The writers of rollouts: student, teacher and reference, and the archive of earlier rollouts.

    With an `environment`, every completion is a conversation with it. Some sources ask the `task`,
    one of the `scorers`, or make one of the `notes`.
    """

    student: SamplingClient
    teacher: Teacher
    renderer: Renderer
    archive: RolloutArchive = field(default_factory=RolloutArchive)
    environment: OpensEpisodes | None = None
    reference: Teacher | None = None
    task: Task | None = None
    scorers: Mapping[str, Scorer] = field(default_factory=dict)
    notes: Mapping[str, Note] = field(default_factory=dict)
    traffic: Traffic | None = None
    segments: Segments | None = None


class SourceConfig(Call):
    """A source writes the tokens that a step trains on.

    - other_writers: the models and datasets that write tokens, without the student
    - form: `answers` if it cannot hold conversations, `conversations` if it only holds conversations
    - replays: it trains again on completions of earlier steps
    - guide: the scorer that it asks while it writes
    - note_made, note_shown: the note that the source makes itself, and the note that it shows the student
    - environment_writes: single answers can contain an environment's text
    - serves_users: it listens to the users of a task
    - writes_segments: an answer can continue in a later step
    - mixes_tokens: student and teacher sample each token together
    - reads_answers: it needs the answers of the rows
    - instead: the source to suggest for single answers, if this source only holds conversations
    - guide_rejects, guide_example: whether its guide must reject parts of answers, and an example
    - explain_no_evaluation: the reason why it cannot answer held-out prompts
    - fixed: settings of a recipe that a resumed run cannot change with this source, with the reason
    """

    form: ClassVar[Form] = "any"
    instead: ClassVar[str] = "student"
    guide_rejects: ClassVar[bool] = False
    guide_example: ClassVar[str] = ""
    serves_users: ClassVar[bool] = False
    writes_segments: ClassVar[bool] = False
    mixes_tokens: ClassVar[bool] = False
    fixed: ClassVar[Mapping[str, str]] = {}

    @property
    def other_writers(self) -> tuple[OtherWriter, ...]:
        """List the writers other than the student; empty if only the student writes."""
        return ()

    @property
    def replays(self) -> bool:
        """Return True if completions of earlier steps are trained on again."""
        return False

    @property
    def guide(self) -> str | None:
        """Return the scorer that the source asks while it writes; None if it asks none."""
        return None

    @property
    def note_made(self) -> str | None:
        """Return the note that the source makes itself while it writes; None if it makes none."""
        return None

    @property
    def note_shown(self) -> str | None:
        """Return the note that the source shows the student; None if it shows none."""
        return None

    @property
    def environment_writes(self) -> bool:
        """Return True if single answers can contain an environment's text."""
        return False

    @property
    def reads_answers(self) -> bool:
        """Return True if the source imitates answers that the task's rows have."""
        return "dataset" in self.other_writers

    def count_teacher_answers(self, n: int) -> float:
        """Return the number of answers that the teacher writes or begins for `n` rollouts of a prompt.

        For a source that replaces rejected parts, it is the maximum.
        """
        return 0

    def limit_answer(self, max_new_tokens: int) -> int:
        """Return the maximum number of tokens to read of a row's answer."""
        return max_new_tokens

    def list_problems(self, n: int, max_new_tokens: int) -> list[str]:
        """List why the source cannot write `n` rollouts of at most `max_new_tokens` for a prompt."""
        return []

    def explain_form(self, *, is_conversation: bool) -> str | None:
        """Return the reason why the source does not fit the task's form; None if it fits."""
        if is_conversation and (self.form == "answers" or "dataset" in self.other_writers):
            return (
                f"rollout.source: {self.model_dump()} does not write turn by turn, and this task "
                "answers every turn; set source: student, teacher, mix(other=teacher), "
                "mix(other=replay), join(other=teacher) or cache(path)"
            )
        if not is_conversation and self.form == "conversations":
            return (
                f"rollout.source: {self.name} needs conversations; use a task that answers turns, "
                f"such as walker, or set source: {self.instead} for single answers"
            )
        return None

    def explain_no_evaluation(self) -> str | None:
        """Return why the source cannot answer held-out prompts; None if it can.

        It can if it gives a loss to one answer per prompt, and chooses this answer without the
        row's answer, its privileged fields and the verifier.
        """
        return "may read the rows' answers or the verifier, or returns several answers"

    def explain_no_generation(self, who: str) -> str:
        """Return the error text for a model that has to write for this source, and cannot."""
        role = "reference" if who == "the reference" else "teacher"
        return (
            f"rollout.source: {self.model_dump()} lets the {role} write, but {who} writes no "
            "answers; set source: student, dataset or mix(other=dataset), or use a teacher that "
            "writes, such as {type: model, model: ...}"
        )

    def load_tape(
        self, folder: Path, prompts: Sequence[Prompt], renderer: Renderer, max_tokens: int
    ) -> "Tape | None":
        """Return the rollouts of an earlier run that the source takes; None if it takes none."""
        return None

    def collect(self, keys: Sequence[RolloutKey], parts: "SourceParts") -> list[Rollout]:
        """Return the rollouts of a batch. `keys` has `n` keys for each prompt."""
        raise NotImplementedError

    @property
    def converts_rows(self) -> bool:
        """Return True if its rollouts can be exported for other trainers, see `convert_row`."""
        return False

    def convert_row(self, prompt: Prompt, row: RolloutRow) -> Mapping[str, Any] | None:
        """Return a saved rollout in another trainer's format; None if it has nothing to learn."""
        raise NotImplementedError

    @classmethod
    def measure(cls, rollouts: Sequence[Rollout]) -> Metrics:
        """Return the metrics of rollouts that this source wrote; empty for all other rollouts."""
        return {}


@dataclass(frozen=True, slots=True)
class Tape:
    """The recorded rollouts of a file, by prompt id."""

    file: Path
    rollouts: Mapping[str, Sequence[Rollout]]


@dataclass(frozen=True, slots=True)
class SourceParts:
    """The parts that a source collects with: the sampler of the batch, and the writers."""

    sampler: RolloutSampler
    writers: RolloutWriters

    def sample_student(
        self, keys: Sequence[RolloutKey], stream: str | None = None
    ) -> list[Rollout]:
        """Return the student's completions or conversations.

        Other answers to the same keys come from another `stream` of random numbers.
        """
        sampler = self.sampler if stream is None else self.sampler.switch_stream(stream)
        return sampler.sample_student(keys, self.writers.student)

    def sample_writer(
        self, writer: str, keys: Sequence[RolloutKey], source: SourceConfig
    ) -> list[Rollout]:
        """Return the rollouts of student, teacher, reference or dataset for a source."""
        match writer:
            case "teacher":
                return self.sample_teacher(keys, source)
            case "reference":
                return self.sample_reference(keys, source)
            case "dataset":
                return self.read_answers(keys, source)
        return self.sample_student(keys)

    def sample_teacher(
        self, keys: Sequence[RolloutKey], source: SourceConfig, temperature: float | None = None
    ) -> list[Rollout]:
        """Return the teacher's completions or conversations; CapabilityError if it cannot write."""
        sampler = self.sampler
        if temperature is not None:
            params = replace(sampler.params, temperature=temperature)
            sampler = replace(sampler, params=params)
        rollouts = sampler.sample_teacher(keys, self.writers.teacher)
        if rollouts is None:
            raise CapabilityError(source.explain_no_generation("this teacher"))
        return clear_policy_logprobs(rollouts)

    def sample_reference(self, keys: Sequence[RolloutKey], source: SourceConfig) -> list[Rollout]:
        """Return the reference's completions; CapabilityError if it cannot write."""
        reference = self.writers.reference
        if reference is not None:
            rollouts = self.sampler.sample_teacher(keys, reference, "reference")
            if rollouts is not None:
                return clear_policy_logprobs(rollouts)
        raise CapabilityError(source.explain_no_generation("the reference"))

    def read_answers(self, keys: Sequence[RolloutKey], source: SourceConfig) -> list[Rollout]:
        """Return the answers of the prompts' rows, which no model sampled."""
        samples = self.encode_answers(keys, source, self.sampler.params.max_new_tokens)
        prompts = self.sampler.render_prompts(keys)
        return self.sampler.build_rollouts(keys, prompts, samples, "dataset")

    def encode_answers(
        self, keys: Sequence[RolloutKey], source: SourceConfig, length: int
    ) -> list[Sample]:
        """Return at most `length` tokens of the answers of the prompts' rows."""
        renderer = self.writers.renderer
        return [encode_response(key.prompt, renderer, source.name, length) for key in keys]

    def bind_teacher(self, prompt: Prompt, source: SourceConfig) -> PromptedClient:
        """Return the teacher with a prompt; CapabilityError if it writes nothing."""
        client = self.writers.teacher.bind_prompt(prompt)
        if client is None:
            raise CapabilityError(source.explain_no_generation("this teacher"))
        return client


def clear_policy_logprobs(items: Sequence[SampleOrRollout]) -> list[SampleOrRollout]:
    """Return samples or rollouts of another model without log-probabilities of the policy."""
    return [
        replace(item, policy_logprobs=torch.full_like(item.policy_logprobs, math.nan))
        for item in items
    ]


def list_writer_problems(
    source: SourceConfig, teacher: Capabilities, kind: str, reference: Capabilities | None = None
) -> list[str]:
    """List why teacher and reference cannot serve a source: one line for each that cannot write.

    `kind` is the teacher's type.
    """
    problems = []
    if "teacher" in source.other_writers and not teacher.writes:
        problems.append(source.explain_no_generation(f"teacher {kind!r}"))
    elif source.mixes_tokens and teacher.by_span:
        problems.append(
            f"rollout.source: {source.model_dump()} lets student and teacher write one text token by "
            f"token, and teacher {kind!r} has another tokenizer; set source: student, or use a "
            "teacher with the student's tokenizer"
        )
    if "reference" in source.other_writers and reference is None:
        problems.append(
            f"rollout.source: {source.model_dump()} needs a reference, and the recipe has none; "
            "set reference: {type: self, weights: frozen} for the initial student, or "
            "{type: self, weights: periodic, period: 20} for an earlier student"
        )
    elif "reference" in source.other_writers and reference is not None and not reference.writes:
        problems.append(source.explain_no_generation("the reference"))
    return problems


def list_task_problems(source: SourceConfig, objective: Objective, task: Task) -> list[str]:
    """List why a source and the losses on its rollouts cannot serve a task."""
    is_conversation = task.converses
    problem = source.explain_form(is_conversation=is_conversation)
    problems = [] if problem is None else [problem]
    has_users = task.serves_users
    if source.serves_users and not has_users:
        problems.append(
            f"rollout.source: {source.name} needs users, and this task has none; set task: {{type: "
            "served, task: ...} around the task with the held-out prompts"
        )
    if has_users and not source.serves_users:
        problems.append(
            f"rollout.source: {source.model_dump()} does not listen to users, and this task serves "
            "users; set source: served, or use only the inner task"
        )
    if not is_conversation and not source.environment_writes:
        problems += [
            f"objective.losses[{number}].source: this task has single answers without an "
            "environment's text; use a task that answers turns, such as walker"
            for number, term in enumerate(objective.losses)
            if term.observes
        ]
    return problems


def check_answers(
    source: SourceConfig, prompts: Sequence[Prompt], renderer: Renderer, max_new_tokens: int
) -> None:
    """Raise DataError if a source imitates the rows' answers and some rows have no usable answer."""
    if source.reads_answers:
        length = source.limit_answer(max_new_tokens)
        check_responses(prompts, renderer, source.name, length)


def check_path(path: str) -> str:
    """Return a path that can be an argument of a source; ValueError if it cannot."""
    # A resolved recipe stores the source as a call. In a call, a comma separates arguments, and
    # spaces and quotes at the ends are dropped, so such a path could not be restored.
    if "," in path or path != path.strip(" '\""):
        raise ValueError(
            f"path {path!r} has a comma, or a space or quote at its end; rename the file or "
            "its folder"
        )
    return path


def _read_source(raw: Any) -> Any:
    """Return the settings of a source; ValueError if the module is not a source."""
    if inspect.isroutine(raw):
        raw = {"type": "function", "object": raw}
    return read_part(SOURCES, SourceConfig, raw)


SourceChoice = Annotated[
    SerializeAsAny[SourceConfig],
    BeforeValidator(_read_source),
    WithJsonSchema({PLUGIN_KEY: SOURCES}),
]
"""A source in a recipe: its name, a call such as `mix(student=0.5)`, a mapping, or a function."""


class HeldoutSearch(FrozenConfig):
    """A source that writes `n` answers to each held-out prompt, and gives a loss to the best."""

    source: SourceChoice
    n: int = Field(default=8, ge=1)
    temperature: float = Field(default=1.0, ge=0)
