"""Whose tokens are learned from, as data: each source is written as a name or a call, `mix(student=0.5)`."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from practicum.core.calls import Call
from practicum.objective.choices import index_by_type, make_validator
from practicum.ports import Capabilities


class StudentSource(Call):
    """The student writes every completion: on-policy distillation itself (GKD 2306.13649)."""

    type: Literal["student"] = "student"


class DatasetSource(Call):
    """The task's own responses, or its answers where it has none: supervised distillation (GKD 2306.13649)."""

    type: Literal["dataset"] = "dataset"


class TeacherSource(Call):
    """The teacher writes, in its own context: sequence-level distillation (SeqKD 1606.07947).

    `temperature` is its own, none: that of the rollouts. 0 is its best; above 1 it errs and corrects itself, in the manner of
    demonstrations with noise (DART 1703.09327): what it says of each token when it scores stays the label.
    """

    type: Literal["teacher"] = "teacher"
    temperature: float | None = Field(default=None, ge=0)


class Mix(Call):
    """A coin for each completion: the student with probability `student`, else the other (GKD 2306.13649).

    `other` replay takes one of the newest student completions of earlier steps, of any prompt (DistiLLM 2402.03898); the
    student writes as long as there is none.
    """

    type: Literal["mix"] = "mix"
    student: float = Field(default=0.5, ge=0, le=1)
    other: Literal["dataset", "teacher", "replay"] = "dataset"


class Join(Call):
    """`n` completions of the other beside the student's own, for every prompt (LUFFY 2504.14945, DistiLLM-2 2503.07067)."""

    type: Literal["join"] = "join"
    other: Literal["dataset", "teacher"] = "dataset"
    n: int = Field(default=1, ge=1)


class TokenMix(Call):
    """Every token is drawn from `teacher * T + (1 - teacher) * S`, both decoding in lockstep (MiniLLM 2306.08543)."""

    type: Literal["token_mix"] = "token_mix"
    teacher: float = Field(default=0.2, ge=0, le=1)


class Prefix(Call):
    """Another writes the first `length` tokens, which are not learned from; the student goes on (TrOPD 2606.01249)."""

    type: Literal["prefix"] = "prefix"
    length: int = Field(default=64, ge=0)
    origin: Literal["teacher", "dataset"] = "teacher"


class Cache(Call):
    """The completions of an earlier run's rollouts.jsonl, token for token (Lightning OPD 2604.13010)."""

    type: Literal["cache"] = "cache"
    path: str = Field(min_length=1)

    @field_validator("path")
    @classmethod
    def _reads_back(cls, path: str) -> str:
        if "," in path or path != path.strip(" '\""):
            raise ValueError(
                f"path {path!r} has a comma, or a space or quote at its end; rename the file or its folder"
            )
        return path


SOURCES = index_by_type(
    StudentSource, DatasetSource, TeacherSource, Mix, Join, TokenMix, Prefix, Cache
)
"""The sources by name."""

Source = StudentSource | DatasetSource | TeacherSource | Mix | Join | TokenMix | Prefix | Cache
SourceChoice = Annotated[Source, Field(discriminator="type"), make_validator("source", SOURCES)]


def replays(source: Source) -> bool:
    """Whether completions of earlier steps are learned from again."""
    return isinstance(source, Mix) and source.other == "replay"


def source_problems(source: Source, capabilities: Capabilities, teacher: str) -> list[str]:
    """What a source asks of a teacher that writes nothing, with what to write instead."""
    if capabilities.writes or not asks_teacher(source):
        return []
    return [explain_no_generation(source, f"teacher {teacher!r}")]


def conversation_problems(source: Source) -> list[str]:
    """What a source asks that nobody can do where a completion is a conversation with the task."""
    match source:
        case DatasetSource() | TokenMix() | Prefix() | Mix(other="dataset") | Join(other="dataset"):
            return [
                f"rollout.source: {source.model_dump()} does not write turn by turn, and this task answers every turn; write "
                "source: student, teacher, mix(other=teacher), mix(other=replay), join(other=teacher) or cache(path)"
            ]
    return []


def explain_no_generation(source: Source, who: str) -> str:
    """The sentence about a teacher that was asked to write and cannot."""
    return (
        f"rollout.source: {source.model_dump()} lets the teacher write, but {who} writes no answers; write source: student, "
        "dataset or mix(other=dataset), or take a teacher that writes, such as {type: model, model: ...}"
    )


def other_writer(source: Source) -> Literal["teacher", "dataset"] | None:
    """Return who writes tokens beside the student, or in its place; None where the student alone writes, now or earlier."""
    match source:
        case (
            TeacherSource()
            | TokenMix()
            | Mix(other="teacher")
            | Join(other="teacher")
            | Prefix(origin="teacher")
        ):
            return "teacher"
        case (
            DatasetSource()
            | Mix(other="dataset")
            | Join(other="dataset")
            | Prefix(origin="dataset")
        ):
            return "dataset"
    return None


def asks_teacher(source: Source) -> bool:
    """Whether the teacher writes tokens."""
    return other_writer(source) == "teacher"
