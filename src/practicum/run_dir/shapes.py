"""What stands in the files of a run, as far as anything reads it: one shape a file, to hold the file against.

A file may hold more than its shape says. What an older version did not write has a default here.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from practicum.rollouts import RolloutRow
from practicum.run_dir.differences import Change
from practicum.statistics import Interval
from practicum.training.evaluation import Evaluation

Number = Annotated[float, Field(allow_inf_nan=False, gt=-1e100, lt=1e100)]
Step = Annotated[int, Field(ge=0, lt=2**53)]
Count = Annotated[int, Field(ge=0, lt=2**53)]


class _Open(BaseModel):
    """An object that may hold more."""

    model_config = ConfigDict(extra="allow")


class _Train(_Open):
    steps: Step
    threads: int | None = None


class _Recipe(_Open):
    name: str = ""
    about: str | None = None
    seed: int = 0
    train: _Train
    task: dict[str, Any] = {}
    prices: dict[str, Any] | None = None


class _Prompts(_Open):
    used: Count
    too_long: Count


class _Set(_Open):
    set: dict[str, Any] = {}


class _Resolved(_Open):
    """A recipe or a pipeline that a comparison runs, as far as changes in it are told."""

    monitors: dict[str, _Set] = {}


class SavedRun(_Open):
    """recipe.json: the resolved recipe, a digest of each thing that the run depends on, and what was changed on the way."""

    recipe: dict[str, Any]
    identity: dict[str, str] = {}
    prompts: _Prompts | None = None
    changes: list[Change] = []


class _Shown(SavedRun):
    """The same with what a page shows of the recipe."""

    recipe: _Recipe  # type: ignore[assignment]


class _Stepped(_Open):
    step: Step = 0


class _Timings(_Open):
    """A row of seconds and bytes by name."""

    __pydantic_extra__: dict[str, Number]  # pyright: ignore[reportIncompatibleVariableOverride]
    step: Step


class _Metrics(_Open):
    """A row of numbers by name, null where one is not finite."""

    __pydantic_extra__: dict[str, Number | None]  # pyright: ignore[reportIncompatibleVariableOverride]
    step: Step
    rollouts: Number
    tokens: Number
    length: Number

    @model_validator(mode="after")
    def _costs_are_known(self) -> "_Metrics":
        unknown = [
            name
            for name, value in self.__pydantic_extra__.items()
            if name.startswith("cost/") and value is None
        ]
        if unknown:
            raise ValueError(f"{unknown[0]} is null")
        return self


class _Rollout(RolloutRow):
    """A row of rollouts.jsonl, a number or null for each token in every column."""

    reward: Number | None
    teacher_logprobs: list[Number | None]
    divergence: list[Number | None]
    student_entropy: list[Number | None] | None = None
    teacher_entropy: list[Number | None] | None = None
    weight: list[Number | None] | None = None

    @model_validator(mode="after")
    def _one_for_each_token(self) -> "_Rollout":
        columns = (
            self.teacher_logprobs,
            self.divergence,
            self.student_entropy,
            self.teacher_entropy,
            self.weight,
        )
        if any(column is not None and len(column) != len(self.tokens) for column in columns):
            raise ValueError("a column has another length than tokens")
        return self


class _Alarm(_Open):
    step: Step
    id: str
    name: str = ""
    reading: str = ""
    patch: list[str] | str | None = None
    set: dict[str, Number] = {}


class _Token(_Open):
    id: int
    text: str
    control: bool


class _Start(_Open):
    first: Step
    versions: dict[str, str | int]


def _check_counts(evaluation: Evaluation) -> Evaluation:
    """Raise ValueError where an evaluation's lists do not belong together: a score for each prompt, a number for each token."""
    scored = {answer.prompt for answer in evaluation.answers if answer.reward is not None}
    if len(evaluation.scores) != len(scored):
        raise ValueError(f"{len(evaluation.scores)} scores of {len(scored)} prompts")
    for trace in evaluation.traces:
        columns = (
            trace.control,
            trace.logprobs,
            trace.teacher_logprobs,
            trace.reverse_kl,
            trace.student_entropy,
        )
        sides = [
            (side.texts, side.probabilities)
            for side in (trace.student, trace.teacher)
            if side is not None
        ]
        lengths = {
            len(column)
            for column in (
                *columns,
                trace.teacher_entropy,
                *(part for side in sides for part in side),
            )
        }
        if lengths != {len(trace.text)}:
            raise ValueError(f"a trace of {len(trace.text)} tokens has columns of other lengths")
    return evaluation


Measured = Annotated[Evaluation, AfterValidator(_check_counts)]


class _Before(_Open):
    student: Measured | None
    teacher: Measured | None
    cost: dict[str, Number] = {}


class _After(_Open):
    student: Measured | None


class _Measured(_Open):
    """An evaluation without its answers."""

    accuracy: Interval | None
    by_domain: dict[str, Interval]
    reverse_kl: Number | None
    length: Number


class _Sample(_Open):
    prompt: str
    answer: str | None
    before: str
    after: str
    reward_before: Number | None
    reward_after: Number | None


class _Summary(_Open):
    name: str
    steps: Step
    ended: str = ""
    rollouts: Count
    before: _Measured | None
    teacher: _Measured | None
    after: _Measured | None
    gain: Interval | None
    samples: list[_Sample]


class _Scaling(_Open):
    N_student: Number | None
    N_teacher: dict[str, Number] | Number | None
    D: Number | None
    rollouts: Number | None
    T: Number | None
    result: dict[str, Number | None]


class _Scaled(_Open):
    """A summary.json as far as a scaling law is fitted to it; one of a pipeline has no quantities."""

    scaling: _Scaling | None = None


class _Stage(_Open):
    name: str
    slot: str | None = None


class _Pipeline(_Open):
    stages: list[_Stage]


class _StageSummary(_Open):
    name: str
    start: str
    method: str
    folder: str
    steps: Step
    ended: str = ""
    before: _Measured | None
    after: _Measured | None


class _Accuracy(_Open):
    stage: str
    all: Interval | None
    by_domain: dict[str, Interval]


class _PipelineSummary(_Open):
    name: str
    stages: list[_StageSummary]
    domains: list[str]
    accuracy: list[_Accuracy]


class _Tracking(_Open):
    type: str
    id: str


class _Doctor(_Open):
    checks: list[dict[str, Any]] = []


SAVED_RUN = TypeAdapter(SavedRun)
SHOWN_RUN = TypeAdapter(_Shown)
BEFORE = TypeAdapter(_Before)
AFTER = TypeAdapter(_After)
SUMMARY = TypeAdapter(_Summary)
ENDED = TypeAdapter(_Summary | _PipelineSummary)
RESOLVED = TypeAdapter(_Resolved)
SCALED = TypeAdapter(_Scaled)
DOCTOR = TypeAdapter(_Doctor)
TRACKING = TypeAdapter(_Tracking)
PIPELINE = TypeAdapter(_Pipeline)
PIPELINE_SUMMARY = TypeAdapter(_PipelineSummary)

STEPPED = TypeAdapter(_Stepped)
METRICS = TypeAdapter(_Metrics)
TIMINGS = TypeAdapter(_Timings)
ROLLOUT = TypeAdapter(_Rollout)
ALARM = TypeAdapter(_Alarm)
VOCABULARY = TypeAdapter(_Token)
START = TypeAdapter(_Start)
REJECTED = TypeAdapter(dict[str, Any])
