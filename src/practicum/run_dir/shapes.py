"""The shapes of a run's files, one per file, with every field that something reads.

A file may have more keys than its shape, at any level: `read_json` leaves them out. So a run that a
later version wrote can be shown and resumed. A field without a default must be in the file.
"""

from collections.abc import Sized
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from practicum.rollouts import RolloutRow
from practicum.run_dir.differences import Change
from practicum.run_dir.shaping import COMPLETE, Count, Number, Step
from practicum.statistics import Estimate, Interval
from practicum.statistics.heldout import Calibration, Evaluation


class _OpenShape(BaseModel):
    """An object without its further keys."""

    model_config = ConfigDict(extra="ignore")


class _WholeShape(BaseModel):
    """An object with its further keys, because all of it is read."""

    model_config = ConfigDict(extra="allow")


class _Train(_OpenShape):
    steps: Step
    threads: int | None = None


Price = Annotated[float, Field(ge=0, lt=1e100)]


class _PricesShape(_OpenShape):
    currency: Annotated[str, Field(max_length=12)] = ""
    machine_hour: Price | None = None
    million_sampled_tokens: Price | None = None
    million_scored_tokens: Price | None = None


class _RecipeShape(_WholeShape):
    name: str = ""
    about: str | None = None
    seed: int = 0
    train: _Train
    task: dict[str, Any] = {}
    prices: _PricesShape | None = None


class _Prompts(_OpenShape):
    used: Count
    too_long: Count


class _Set(_WholeShape):
    set: dict[str, Any] = {}


class _Resolved(_WholeShape):
    """A recipe or a pipeline of a comparison, with the fields that a report on changes reads."""

    monitors: dict[str, _Set] = {}


ChangeShape = Annotated[Change, COMPLETE]
IntervalShape = Annotated[Interval, COMPLETE]
EstimateShape = Annotated[Estimate, COMPLETE]
CalibrationShape = Annotated[Calibration, COMPLETE]
EvaluationShape = Annotated[Evaluation, COMPLETE]


class SavedRun(_OpenShape):
    """recipe.json: the resolved recipe, a digest of each input of the run, and allowed changes."""

    recipe: dict[str, Any]
    identity: dict[str, str] = {}
    prompts: _Prompts | None = None
    changes: list[ChangeShape] = []


class _Shown(SavedRun):
    """recipe.json with the fields of the recipe that a page shows."""

    recipe: _RecipeShape  # type: ignore[assignment]


class _Timings(_WholeShape):
    """A row of seconds and bytes by name."""

    __pydantic_extra__: dict[str, Number]  # pyright: ignore[reportIncompatibleVariableOverride]
    step: Step


class _Metrics(_WholeShape):
    """A row of numbers by name, null where one is not finite."""

    __pydantic_extra__: dict[  # pyright: ignore[reportIncompatibleVariableOverride]
        str, Number | None
    ]
    step: Step
    rollouts: Number
    tokens: Number
    length: Number
    supervised: Number = 0.0
    unsupervised_prompts: Number = 0.0

    @model_validator(mode="after")
    def _check_costs(self) -> "_Metrics":
        for name, number in self.__pydantic_extra__.items():
            if name.startswith("cost/") and number is None:
                raise ValueError(f"{name} is null")
        return self


class _RolloutShape(RolloutRow):
    """A row of rollouts.jsonl; every column has a number or null for each token."""

    reward: Number | None
    teacher_logprobs: list[Number | None]
    divergence: list[Number | None]
    student_entropy: list[Number | None] | None = None
    teacher_entropy: list[Number | None] | None = None
    weight: list[Number | None] | None = None

    @model_validator(mode="after")
    def _check_columns(self) -> "_RolloutShape":
        optional = (self.student_entropy, self.teacher_entropy, self.weight)
        columns = (self.teacher_logprobs, self.divergence, *optional)
        if any(column is not None and len(column) != len(self.tokens) for column in columns):
            raise ValueError("a column has another length than tokens")
        return self


class _AlarmShape(_OpenShape):
    step: Step
    id: str
    name: str = ""
    reading: str = ""
    patch: list[str] | str | None = None
    set: dict[str, Number] = {}


class _Token(_OpenShape):
    id: int
    text: str
    control: bool


class _Versions(_WholeShape):
    """The versions of packages by name."""

    __pydantic_extra__: dict[  # pyright: ignore[reportIncompatibleVariableOverride]
        str, str | int
    ]
    threads: int


class _Start(_OpenShape):
    first: Step
    versions: _Versions


def _check_counts(evaluation: Evaluation) -> Evaluation:
    """Raise ValueError unless each graded prompt has a score and each traced token its numbers."""
    scored = {answer.prompt for answer in evaluation.answers if answer.reward is not None}
    if len(evaluation.scores) != len(scored):
        raise ValueError(f"{len(evaluation.scores)} scores of {len(scored)} prompts")
    for trace in evaluation.traces:
        columns: list[Sized] = [trace.control, trace.logprobs, trace.teacher_logprobs]
        columns += [trace.reverse_kl, trace.student_entropy, trace.teacher_entropy]
        for side in (trace.student, trace.teacher):
            if side is not None:
                columns += [side.texts, side.probabilities]
        if any(len(column) != len(trace.text) for column in columns):
            raise ValueError(f"a trace of {len(trace.text)} tokens has columns of other lengths")
    return evaluation


Measured = Annotated[EvaluationShape, AfterValidator(_check_counts)]


class _Before(_OpenShape):
    student: Measured | None
    teacher: Measured | None
    search: Measured | None = None
    cost: dict[str, Number]


class _After(_OpenShape):
    student: Measured | None


class _Measured(_OpenShape):
    """An evaluation without its answers."""

    prompts: Count
    completions: Count
    equal_answers: Number
    looping_answers: Number
    accuracy: IntervalShape | None
    by_domain: dict[str, IntervalShape]
    reverse_kl: Number | None
    length: Number
    truncated: Number
    student_entropy: Number | None
    calibration: CalibrationShape | None
    reverse_kl_estimate: EstimateShape | None
    student_entropy_estimate: EstimateShape | None


class _SampleShape(_OpenShape):
    prompt: str
    answer: str | None
    before: str
    after: str
    reward_before: Number | None
    reward_after: Number | None
    pictures: list[int] = []


class _Cost(_WholeShape):
    flops: Number


VerdictWord = Literal["COLLAPSED", "WORSE", "NO DETECTABLE CHANGE", "BETTER", "TOO FEW PROMPTS"]


class _RunVerdictShape(_OpenShape):
    """The verdict of a run, with its reasons and the commands to try next."""

    verdict: VerdictWord
    reasons: list[str]
    next: list[str]


class _BestShape(_OpenShape):
    metric: str
    step: Step | None
    score: Number | None
    last: Number | None


class _Summary(_OpenShape):
    name: str
    seed: int
    steps: Step
    ended: str
    lost_rows: dict[str, Count]
    rollouts: Count
    tokens: Count
    skipped_updates: Count
    empty_updates: Count
    before: _Measured | None
    teacher: _Measured | None
    after: _Measured | None
    gain: IntervalShape | None
    draft_gain: IntervalShape | None = None
    verdict: _RunVerdictShape
    alarms: dict[str, Count]
    best: _BestShape | None = None
    search: dict[str, Any] = {}
    cost: _Cost
    scaling: dict[str, Any]
    samples: list[_SampleShape]

    @model_validator(mode="after")
    def _check_gain(self) -> "_Summary":
        evaluations = (self.before, self.after)
        if self.gain is not None and any(
            evaluation is None or evaluation.accuracy is None for evaluation in evaluations
        ):
            raise ValueError("gain without an accuracy before and after")
        return self


class _Scaling(_OpenShape):
    N_student: Number | None
    N_teacher: dict[str, Number] | Number | None
    D: Number | None
    rollouts: Number | None
    T: Number | None
    result: dict[str, Number | None]


class _Scaled(_OpenShape):
    """A summary.json with the quantities of a scaling law, which a pipeline's does not have."""

    scaling: _Scaling | None = None


class _StageShape(_WholeShape):
    name: str
    slot: str | None = None


class _PipelineShape(_WholeShape):
    stages: list[_StageShape]


class _StageSummary(_WholeShape):
    name: str
    start: str
    method: str
    folder: str
    steps: Step
    ended: str
    lost_rows: dict[str, Count]
    before: _Measured | None
    after: _Measured | None


class _Accuracy(_OpenShape):
    stage: str
    all: IntervalShape | None
    by_domain: dict[str, IntervalShape]


class _PipelineSummary(_WholeShape):
    name: str
    stages: list[_StageSummary]
    domains: list[str]
    accuracy: list[_Accuracy]


class _Tracking(_OpenShape):
    type: str
    id: str


class _Doctor(_WholeShape):
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
PIPELINE = TypeAdapter(_PipelineShape)
PIPELINE_SUMMARY = TypeAdapter(_PipelineSummary)

METRICS = TypeAdapter(_Metrics)
TIMINGS = TypeAdapter(_Timings)
ROLLOUT = TypeAdapter(_RolloutShape)
ALARM = TypeAdapter(_AlarmShape)
VOCABULARY = TypeAdapter(_Token)
START = TypeAdapter(_Start)
REJECTED = TypeAdapter(dict[str, Any])
