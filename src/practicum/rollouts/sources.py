"""The sources of the tokens trained on, written as a name or a call: `mix(student=0.5)`."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator

from practicum.objective import Objective
from practicum.objective.choices import build_validator, index_by_type
from practicum.ports import Capabilities, ServesUsers, Task, answers_back
from practicum.rollouts.function_source import FunctionSource, SourceCall, read_function

OtherWriter = Literal["dataset", "teacher", "reference"]
JOINED: tuple[OtherWriter, ...] = get_args(OtherWriter)
"""The writers that can stand beside the student."""


class StudentSource(SourceCall):
    """The student writes every completion: on-policy distillation itself (GKD 2306.13649)."""

    type: Literal["student"] = "student"


class DatasetSource(SourceCall):
    """The task's responses, else its answers: supervised distillation (GKD 2306.13649)."""

    type: Literal["dataset"] = "dataset"


class TeacherSource(SourceCall):
    """The teacher writes, in its own context: sequence-level distillation (SeqKD 1606.07947).

    `temperature` is the teacher's; without it the teacher samples at that of the rollouts. At 0 it
    writes its likeliest completion. Above 1 it errs and corrects itself, like demonstrations with
    noise (DART 1703.09327); its scores of each token stay the labels.
    """

    type: Literal["teacher"] = "teacher"
    temperature: float | None = Field(default=None, ge=0)


class ReferenceSource(SourceCall):
    """The reference writes, from the student's prompt: answers to pair (DPO 2305.18290)."""

    type: Literal["reference"] = "reference"


class Mix(SourceCall):
    """A coin for each: the student with probability `student`, else `other` (GKD 2306.13649).

    `other: replay` takes one of the newest student completions of earlier steps, of any prompt
    (DistiLLM 2402.03898). The student writes as long as the replay buffer is empty.
    """

    type: Literal["mix"] = "mix"
    student: float = Field(default=0.5, ge=0, le=1)
    other: Literal["dataset", "teacher", "replay"] = "dataset"


class Join(SourceCall):
    """`n` of each `other` beside the student's completions (LUFFY 2504.14945, DistiLLM-2 2503.07067).

    `other` joins several by +, as in `teacher+reference`. `student` is the number of the student's
    own, without it `rollout.n`; 0 leaves a prompt to the others (SPIN 2401.01335).
    """

    type: Literal["join"] = "join"
    other: str = "dataset"
    n: int = Field(default=1, ge=1)
    student: int | None = Field(default=None, ge=0)

    @field_validator("other")
    @classmethod
    def _refuse_unknown(cls, text: str) -> str:
        names = text.split("+")
        if len(set(names)) < len(names) or not set(names) <= set(JOINED):
            raise ValueError(
                f"must be 'dataset', 'teacher' or 'reference', or several joined by +, each once "
                f"(given: {text!r})"
            )
        return text

    @property
    def others(self) -> tuple["OtherWriter", ...]:
        """Return the writers beside the student, in order."""
        named = self.other.split("+")
        return tuple(sorted((name for name in JOINED if name in named), key=named.index))


class TokenMix(SourceCall):
    """Tokens sampled from `teacher * T + (1 - teacher) * S` in lockstep (MiniLLM 2306.08543)."""

    type: Literal["token_mix"] = "token_mix"
    teacher: float = Field(default=0.2, ge=0, le=1)


class Prefix(SourceCall):
    """`origin` writes `length` tokens without a loss; the student continues (TrOPD 2606.01249).

    In a conversation the teacher speaks the first `turns` turns instead (TCOD 2604.24005).
    """

    type: Literal["prefix"] = "prefix"
    length: int = Field(default=64, ge=0)
    origin: Literal["teacher", "dataset"] = "teacher"
    turns: int | None = Field(default=None, ge=0)


class Search(SourceCall):
    """The student's `n` answers grow a tree; each goes on from a promising step (2501.04519).

    A step ends with its `step` (line, paragraph or word). The search goes on from any of the first
    `depth` steps: `breadth` times from one, then from the child with the largest mean reward plus
    `exploration * sqrt(ln N(parent) / N(child))` (UCT). With `scorer`, what that one of the recipe's
    `scorers` says of a step counts as one more answer through it (2501.04519). With `agree`, that model completes each
    answer again from one of its steps, and answers with which it does not agree have no loss
    (rStar 2408.06195). With `keep`, only that many answers of a prompt have a loss: the best by
    their reward, then by the mean value of their steps.
    """

    type: Literal["search"] = "search"
    step: Literal["line", "paragraph", "word"] = "line"
    breadth: int = Field(default=3, ge=1)
    depth: int = Field(default=16, ge=0)
    exploration: float = Field(default=1.4, ge=0)
    keep: int | None = Field(default=None, ge=1)
    agree: Literal["teacher", "reference"] | None = None
    scorer: str | None = None


class Replace(SourceCall):
    """The student writes; `by` writes again what the recipe's `scorer` rejects (OVD 2601.21968).

    What comes before the first rejected step stays, and a rejected answer without steps goes as a
    whole. What was written again is judged again, up to `tries` times in all.
    """

    type: Literal["replace"] = "replace"
    scorer: str
    by: Literal["teacher", "reference", "student"] = "teacher"
    tries: int = Field(default=1, ge=1)


class Retry(SourceCall):
    """The student answers again with a `note` in its prompt, and learns without it (KEPO 2602.00400).

    `of` names the answers: those of prompts without a right one, all wrong ones, or all. A second
    answer takes the first one's place if it is right, or with `of=all` always. With `learn=with` the
    note stays in the prompt that is learned. With `place=answer` the note does not stand before the
    question but begins the answer, as an environment's words do (SD-Zero 2604.12002).
    """

    type: Literal["retry"] = "retry"
    note: str
    of: Literal["failed_group", "incorrect", "all"] = "failed_group"
    learn: Literal["without", "with"] = "without"
    place: Literal["question", "answer"] = "question"

    @property
    def begins_answers(self) -> bool:
        """True if the note is a part of the answers that are learned."""
        return self.place == "answer" and self.learn == "with"


class Turns(SourceCall):
    """The student converses, and each of its turns is an answer of its own (OpenClaw-RL 2603.10165).

    Its prompt is the conversation before it, and its note `next_state` the reply. A turn that nobody
    replied to has no loss.
    """

    type: Literal["turns"] = "turns"


class Restate(SourceCall):
    """The student answers, and a `note` takes the place of what it states itself (CaOPD 2604.16830).

    Its statement begins with the note's name, as in `Confidence: 0.9` for a note `confidence`, and
    goes on to the answer's end. The answer then ends with a line of the same form that has the note,
    also where nothing was stated.
    """

    type: Literal["restate"] = "restate"
    note: str


class Correct(SourceCall):
    """The student converses; `by` writes its first wrong turn, and it goes on (SCoRe 2509.14257).

    The recipe's `scorer` reads the conversation and rejects a turn: a judge by turns. Without one
    the task's own expert knows: a turn is wrong if it is less than `below` times as likely as the
    expert's likeliest. With `start: verified` the student itself acts again from there, `rollout.n`
    times, and only that has a loss: its reward is 1 if it solves the task, else 0.5 for the
    corrected turn, 0 for the wrong one, 0.1 for another.
    """

    type: Literal["correct"] = "correct"
    by: Literal["teacher", "reference"] = "teacher"
    scorer: str | None = None
    below: float = Field(default=0.5, gt=0, le=1)
    start: Literal["corrected", "verified"] = "corrected"


class Resample(SourceCall):
    """The student writes `factor` times as many; kept are clean right ones and any failures (2508.20722).

    Failures are kept by chance, as many as is their share. Of right answers those with few failed
    calls of tools are rather kept, and those that state their answer once, in the task's `tags`.
    """

    type: Literal["resample"] = "resample"
    factor: int = Field(default=2, ge=2)


def check_path(path: str) -> str:
    """Return a path that can be written in a call; ValueError if it cannot."""
    # A resolved recipe writes the source as a call, in which a comma separates arguments and spaces
    # and quotes at the ends are dropped: such a path would not be read back.
    if "," in path or path != path.strip(" '\""):
        raise ValueError(
            f"path {path!r} has a comma, or a space or quote at its end; rename the file or "
            "its folder"
        )
    return path


class _Recorded(SourceCall):
    path: str = Field(min_length=1)

    @field_validator("path")
    @classmethod
    def _refuse_ambiguous_path(cls, path: str) -> str:
        return check_path(path)


class Cache(_Recorded):
    """Completions of an earlier rollouts.jsonl, token for token (Lightning OPD 2604.13010)."""

    type: Literal["cache"] = "cache"


class Traces(_Recorded):
    """Conversations that an agent of the student recorded under another harness, token for token.

    `path` has traces of the library verifiers (schema 1), one a line, with their rewards.
    """

    type: Literal["traces"] = "traces"


class Served(SourceCall):
    """Users speak with the student, and each turn that they reply to is learned from (2603.10165).

    The task `served` says where they find it, and the note `next_state` has the reply. With `path`,
    nobody is served: the turns are those of an earlier run's traffic.jsonl.
    """

    type: Literal["served"] = "served"
    path: str | None = Field(default=None, min_length=1)
    fixed: ClassVar[Mapping[str, str]] = {
        "train.prompts_per_step": "which turns of the traffic a step learns from is counted by it, so "
        "turns would be learned from twice or never; start a new run"
    }

    @field_validator("path")
    @classmethod
    def _refuse_ambiguous_path(cls, path: str | None) -> str | None:
        return None if path is None else check_path(path)


SOURCES = index_by_type(
    StudentSource,
    DatasetSource,
    TeacherSource,
    ReferenceSource,
    Mix,
    Join,
    TokenMix,
    Prefix,
    Search,
    Replace,
    Retry,
    Restate,
    Correct,
    Resample,
    Cache,
    Traces,
    Turns,
    Served,
    FunctionSource,
)
"""The sources by name."""

Source = (
    StudentSource
    | DatasetSource
    | TeacherSource
    | ReferenceSource
    | Mix
    | Join
    | TokenMix
    | Prefix
    | Search
    | Replace
    | Retry
    | Restate
    | Correct
    | Resample
    | Cache
    | Traces
    | Turns
    | Served
    | FunctionSource
)
SourceChoice = Annotated[
    Source,
    Field(discriminator="type"),
    build_validator("source", SOURCES),
    # It comes first: validators before the type run from the last to the first.
    BeforeValidator(read_function),
]


def needs_replay(source: Source) -> bool:
    """Return True if completions of earlier steps are trained on again."""
    return isinstance(source, Mix) and source.other == "replay"


def list_source_problems(
    source: Source, teacher: Capabilities, kind: str, reference: Capabilities | None = None
) -> list[str]:
    """List why teacher and reference cannot serve a source: one line for each that cannot write.

    `kind` is the teacher's type.
    """
    writers = list_other_writers(source)
    problems = []
    if "teacher" in writers and not teacher.writes:
        problems.append(explain_no_generation(source, f"teacher {kind!r}"))
    if "reference" in writers and reference is None:
        problems.append(
            f"rollout.source: {source.model_dump()} lets the reference write and there is none; "
            "write reference: {type: self, weights: frozen} for the student as it began, or "
            "{type: self, weights: periodic, period: 20} for an earlier self"
        )
    elif "reference" in writers and reference is not None and not reference.writes:
        problems.append(explain_no_generation(source, "the reference"))
    return problems


def list_task_problems(source: Source, task: Task) -> list[str]:
    """List why a source cannot serve a task."""
    list_problems = list_conversation_problems if answers_back(task) else list_answer_problems
    problems = list_problems(source)
    has_users = isinstance(task, ServesUsers)
    if isinstance(source, Served) and not has_users:
        problems.append(
            "rollout.source: served needs users, and this task has none; write task: {type: served, "
            "task: ...} around the task with the held-out prompts"
        )
    if has_users and not isinstance(source, Served):
        problems.append(
            f"rollout.source: {source.model_dump()} does not listen to users, and this task serves "
            "them; write source: served, or the inner task alone"
        )
    return problems


def list_observation_problems(objective: Objective, source: Source, task: Task) -> list[str]:
    """List why there is nothing to learn of an environment: a line for each term about one."""
    has_others = isinstance(source, Cache | Traces) or (
        isinstance(source, Retry) and source.begins_answers
    )
    if answers_back(task) or has_others:
        return []
    return [
        f"objective.losses[{number}].source: this task's answers are single ones, and no environment "
        "writes between them; take a task that answers back, such as walker"
        for number, term in enumerate(objective.losses)
        if term.observes
    ]


def list_conversation_problems(source: Source) -> list[str]:
    """List why a source cannot serve a task whose completions are conversations."""
    if isinstance(source, Prefix) and source.origin == "teacher":
        if source.turns is not None:
            return []
        return [
            f"rollout.source: {source.model_dump()} does not write turn by turn, and this task "
            "answers every turn; write prefix(turns=2) for the turns that the teacher speaks first"
        ]
    is_one_answer = isinstance(
        source, TokenMix | Prefix | Search | Replace | Retry | Restate | Served
    )
    if not is_one_answer and "dataset" not in list_other_writers(source):
        return []
    return [
        f"rollout.source: {source.model_dump()} does not write turn by turn, and this task "
        "answers every turn; write source: student, teacher, mix(other=teacher), "
        "mix(other=replay), join(other=teacher) or cache(path)"
    ]


def list_answer_problems(source: Source) -> list[str]:
    """List why a source cannot serve a task whose completions are single answers."""
    if isinstance(source, Correct | Turns):
        instead = "replace(...)" if isinstance(source, Correct) else "student"
        return [
            f"rollout.source: {source.type} needs conversations; take a task that answers back, such "
            f"as walker, or source: {instead} for single answers"
        ]
    if not isinstance(source, Prefix) or source.turns is None:
        return []
    return [
        f"rollout.source: {source.model_dump()} counts turns, and this task's answers have one; "
        "write prefix(length=64) for the tokens that the teacher writes first"
    ]


def explain_no_generation(source: Source, who: str) -> str:
    """Return the error text for a source that needs a teacher to generate, which it cannot."""
    role = "reference" if who == "the reference" else "teacher"
    return (
        f"rollout.source: {source.model_dump()} lets the {role} write, but {who} writes no "
        "answers; write source: student, dataset or mix(other=dataset), or take a teacher that "
        "writes, such as {type: model, model: ...}"
    )


def list_other_writers(source: Source) -> tuple[OtherWriter, ...]:
    """List the writers beside or instead of the student; none if only the student ever writes."""
    match source:
        case TeacherSource() | TokenMix():
            return ("teacher",)
        case DatasetSource() | FunctionSource():
            return ("dataset",)
        case ReferenceSource():
            return ("reference",)
        case Mix():
            return () if source.other == "replay" else (source.other,)
        case Join():
            return source.others
        case Prefix():
            return (source.origin,)
        case Search(agree=agree) if agree is not None:
            return (agree,)
        case Replace(by=writer) if writer != "student":
            return (writer,)
        case Correct(by=writer):
            return (writer,)
    return ()


def name_guide(source: Source) -> str | None:
    """Return the scorer that the source asks while it writes; None if it asks none."""
    return source.scorer if isinstance(source, Search | Replace | Correct) else None


def name_own_note(source: Source) -> str | None:
    """Return the note that the source makes itself while it writes; None if it makes none."""
    return source.note if isinstance(source, Retry | Restate) else None


def name_shown_note(source: Source) -> str | None:
    """Return the note that the source makes itself to show it to the student; None if none."""
    return source.note if isinstance(source, Retry) else None


def count_teacher_answers(source: Source, n: int) -> float:
    """Return how many answers to a prompt the teacher writes, or begins, beside or instead of `n`.

    Of a source that replaces what is rejected it is the most that there can be.
    """
    match source:
        case TeacherSource():
            return n
        case Mix(other="teacher"):
            return n * (1 - source.student)
        case Join() if "teacher" in source.others:
            return source.n
        case Prefix(origin="teacher"):
            return n
        case Correct(by="teacher"):
            return n
        case Replace(by="teacher"):
            return n * source.tries
    return 0


def needs_teacher_samples(source: Source) -> bool:
    """Return True if the teacher writes tokens."""
    return "teacher" in list_other_writers(source)


def needs_reference_samples(source: Source) -> bool:
    """Return True if the reference writes tokens."""
    return "reference" in list_other_writers(source)
