"""Define the choices on the axes of an objective.

Each choice is written as a name or a call, such as `jsd(0.3)`, and read back from its own text.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from practicum.core.calls import Call, bind, format_call, parse_call, suggest_name
from practicum.functional.advantages import ADVANTAGES
from practicum.functional.divergences import DIVERGENCES
from practicum.functional.estimators import CORRECTIONS
from practicum.functional.samples import SAMPLE_WEIGHTS, SampleStatistics
from practicum.functional.weights import WEIGHTS, TokenStatistics
from practicum.objective.estimators import Auto, K2Surrogate, Pathwise, ScoreFunction
from practicum.objective.signals import AdvantageName, Draws, Full, Sampled, Score, Text, TopK
from practicum.types import FrozenConfig

Arguments = dict[str, int | float | str]


class TeacherTarget(Call):
    """The teacher's distribution at a temperature (0: its likeliest token as a label)."""

    type: Literal["teacher"] = "teacher"
    temperature: float = Field(default=1.0, ge=0)


class LogLinear(Call):
    """`softmax(teacher log T + student log S + reference log R)`, the student's part detached.

    Veto 2601.07155, TAID 2501.16937, G-OPD 2602.12125.
    """

    type: Literal["log_linear"] = "log_linear"
    teacher: float = 1.0
    student: float = 0.0
    reference: float = 0.0

    @property
    def is_teacher(self) -> bool:
        """Return True if the target is the unmodified teacher."""
        return (self.teacher, self.student, self.reference) == (1.0, 0.0, 0.0)


class Mixture(Call):
    """`teacher * T + (1 - teacher) * S` in probability, the student's part detached."""

    type: Literal["mixture"] = "mixture"
    teacher: float = Field(default=1.0, gt=0, le=1)


class Contrast(Call):
    """`softmax((1 + w) log T - w log R)` with `w = scale TV(T, R) + floor` at each state.
    AlignDistil 2503.02832.

    The divergence is divided by w, so its size does not depend on the distance between teacher and
    reference.
    """

    type: Literal["contrast"] = "contrast"
    scale: float = Field(default=15.0, ge=0)
    floor: float = Field(default=0.001, gt=0)


class NoReward(Call):
    """The teacher alone."""

    type: Literal["none"] = "none"

    @property
    def by_itself(self) -> None:
        """Return None: without the teacher, no loss remains."""
        return None

    @property
    def share(self) -> float:
        """Return the factor of the reward's advantage: 0, as there is none."""
        return 0.0


class AddAdvantage(Call):
    """Add `coefficient` times the advantage of the completion's reward at each token.
    MOPD 2601.02780, slime.
    """

    type: Literal["add_advantage"] = "add_advantage"
    coefficient: float = 1.0
    advantage: AdvantageName = "group_normalized"

    @property
    def by_itself(self) -> Score:
        """Return the signal that remains without the teacher: the reward, times `share`."""
        return Score(advantage=self.advantage)

    @property
    def share(self) -> float:
        """Return the factor of the reward's advantage."""
        return self.coefficient


class Modulate(Call):
    """The reward gives each token's advantage its sign, the teacher its size (RLSD 2604.03128)."""

    type: Literal["modulate"] = "modulate"
    strength: float = Field(default=0.5, ge=0, le=1)
    bound: float = Field(default=0.2, ge=0, lt=1)
    advantage: AdvantageName = "group_normalized"

    @property
    def by_itself(self) -> Score:
        """Return the signal that remains at strength 0: the reward's advantage."""
        return Score(advantage=self.advantage)

    @property
    def share(self) -> float:
        """Return the factor of the reward's advantage: 1, as the teacher only scales it."""
        return 1.0


class NoClip(Call):
    """Nothing is clipped."""

    type: Literal["none"] = "none"


class ClipLoss(Call):
    """A token whose loss exceeds `maximum` gives no gradient."""

    type: Literal["loss"] = "loss"
    maximum: float = Field(default=0.05, gt=0)


class ClipEntries(Call):
    """A candidate's contribution to a token's loss is held constant if it exceeds `maximum`.
    As in OPSD's released code.

    This does not bound the effect of one candidate: see below.
    """

    type: Literal["entries"] = "entries"
    maximum: float = Field(default=0.05, gt=0)


class ClipAdvantage(Call):
    """The teacher's advantage is clipped to [low, high], which contains 0.
    A clipped token keeps its gradient (REOPOLD 2603.11137).
    """

    type: Literal["advantage"] = "advantage"
    low: float = -5.0
    high: float = 5.0

    @model_validator(mode="after")
    def _check_order(self) -> "ClipAdvantage":
        if not self.low <= 0.0 <= self.high:
            raise ValueError(
                f"clip 'advantage' needs low <= 0 <= high, got {self.low} and {self.high}: "
                "another band turns the sign of some"
            )
        return self


class Choice(FrozenConfig):
    """An entry of a table of `practicum.functional` with its arguments, defaults filled in."""

    name: str
    arguments: Arguments = Field(default_factory=dict)

    @model_serializer(mode="plain")
    def _serialize(self) -> str:
        return format_call(self.name, self.arguments)


def index_by_type(*classes: type[Call]) -> dict[str, type[Call]]:
    """Return the classes of one axis by the names that recipes use."""
    return {cls.model_fields["type"].default: cls for cls in classes}


AXES = {
    "signals": index_by_type(Full, Sampled, TopK, Draws, Text, Score),
    "targets": index_by_type(TeacherTarget, LogLinear, Mixture, Contrast),
    "estimators": index_by_type(Auto, Pathwise, ScoreFunction, K2Surrogate),
    "rewards": index_by_type(NoReward, AddAdvantage, Modulate),
    "clips": index_by_type(NoClip, ClipLoss, ClipEntries, ClipAdvantage),
}
"""The choices that are classes, by axis and name."""

REFUSED = {
    "kl": (
        "'kl' does not say which way; write forward_kl for KL(T || S) or reverse_kl for KL(S || T)"
    ),
    "k1": (
        "k1 back-propagated has an expected gradient of zero; write score_function, "
        "which has it as a reward and gives the gradient of reverse KL"
    ),
    "k2": "k2 back-propagated is called k2_surrogate here: its gradient is that of reverse KL",
    "k3": (
        "k3 back-propagated has the gradient of forward KL; write score_function with divergence: "
        "forward_kl for that, or k2_surrogate for reverse KL"
    ),
    "value_as_reward": (
        "a divergence's value at a state says nothing about the token that was sampled there; "
        "write score_function, whose advantage is that of the divergence (r f'(r) - f(r))"
    ),
}
"""The names that are refused, each with its real effect and what to write instead."""


def build_validator(kind: str, choices: Mapping[str, type[Call]]) -> BeforeValidator:
    """Return a validator that reads a name, a call or a mapping as a choice of one axis.

    It raises ValueError with the nearest known name.
    """

    def read(raw: Any) -> Any:
        if isinstance(raw, Mapping):
            _look_up(kind, str(raw.get("type", "")), choices)
        if not isinstance(raw, str):
            return raw
        name = parse_call(raw)[0]
        fields = [field for field in _look_up(kind, name, choices).model_fields if field != "type"]
        return {"type": name, **bind(kind, raw, fields)}

    return BeforeValidator(read)


def _list_in_schema(table: Mapping[str, Any]) -> WithJsonSchema:
    """Return the JSON Schema of an entry of a table: its name, a call, or a mapping by `type`."""
    call = {"type": "string", "pattern": r"^\s*[A-Za-z_][\w.]*\s*\("}
    dotted = {"type": "string", "pattern": r"^[A-Za-z_]\w*([.:][A-Za-z_]\w*)+$"}
    mapping = {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}
    return WithJsonSchema({"anyOf": [{"enum": list(table)}, call, dotted, mapping]})


def _read_choice(kind: str) -> BeforeValidator:
    return build_validator(kind, AXES[f"{kind}s"])


def _read_entry(kind: str, table: Mapping[str, Any]) -> BeforeValidator:
    """Return a validator that reads a name, a call or a mapping as an entry of a table.

    It raises ValueError with the nearest known name.
    """

    def read(raw: Any) -> Any:
        if isinstance(raw, str):
            name = parse_call(raw)[0]
            arguments = bind(kind, raw, list(_look_up(kind, name, table).defaults))
        elif isinstance(raw, Choice):
            name, arguments = raw.name, raw.arguments
        elif isinstance(raw, Mapping) and "type" in raw:
            name = str(raw["type"])
            arguments = {key: argument for key, argument in raw.items() if key != "type"}
        else:
            raise ValueError(
                f"a {kind} is written as a name or a call, not as {raw!r}; known: "
                f"{', '.join(table)}"
            )
        defaults = _look_up(kind, name, table).defaults
        where = f"{kind} {name!r}"
        checked = {
            key: _check_argument(where, key, argument, defaults)
            for key, argument in arguments.items()
        }
        return {"name": name, "arguments": {**defaults, **checked}}

    return BeforeValidator(read)


def _check_argument(where: str, key: str, argument: Any, defaults: Arguments) -> int | float | str:
    """Return the argument in the type of the parameter's default.

    Raise ValueError if there is no such parameter or the type is wrong.
    """
    if key not in defaults:
        raise ValueError(f"{where} has no parameter {key!r}; {suggest_name(key, defaults)}")
    kinds = {str: ("a text", str), int: ("a whole number", int), float: ("a number", int | float)}
    kind, fits = kinds[type(defaults[key])]
    # A bool is an int in Python, and NaN differs from itself: neither is a number here.
    if not isinstance(argument, fits) or isinstance(argument, bool) or argument != argument:
        raise ValueError(
            f"{where}: {key} must be {kind}, for example {defaults[key]}, got {argument!r}"
        )
    return float(argument) if kind == "a number" else argument


def _look_up(kind: str, name: str, table: Mapping[str, Any]) -> Any:
    """Return the entry of a table by name; raise ValueError with the nearest known name."""
    try:
        return table[name]
    except KeyError:
        raise ValueError(
            REFUSED.get(name, f"no {kind} named {name!r}; {suggest_name(name, table)}")
        ) from None


def _check_parameter(choice: Choice) -> Choice:
    """Return the divergence if its parameter is in the range of its family."""
    parameter = next((float(argument) for argument in choice.arguments.values()), None)
    DIVERGENCES[choice.name].resolve(parameter)
    return choice


def _check_weight(choice: Choice) -> Choice:
    """Return the weight if its function takes its arguments, by calling it on one token."""
    ones = torch.ones(1)
    statistics = TokenStatistics(
        loss_mask=ones,
        student_entropy=ones,
        teacher_entropy=ones,
        divergence=ones,
        logprobs=ones,
        teacher_logprobs=ones,
        positions=ones.long(),
        rows=ones.long() - 1,
        teacher_rank=ones.long(),
        special=ones.bool(),
    )
    WEIGHTS[choice.name].function(statistics, **choice.arguments)
    return choice


def _check_sample_weight(choice: Choice) -> Choice:
    """Return the weight if its function takes its arguments, by calling it on one completion."""
    statistics = SampleStatistics(
        kept=(True,), rewards=(1.0,), texts=("",), student_nll=(1.0,), teacher_nll=(1.0,)
    )
    SAMPLE_WEIGHTS[choice.name].function(statistics, **choice.arguments)
    return choice


Signal = Annotated[
    Full | Sampled | TopK | Draws | Text | Score,
    _read_choice("signal"),
    Field(discriminator="type"),
]
Target = Annotated[
    TeacherTarget | LogLinear | Mixture | Contrast,
    _read_choice("target"),
    Field(discriminator="type"),
]
Reward = Annotated[
    NoReward | AddAdvantage | Modulate, _read_choice("reward"), Field(discriminator="type")
]
Clip = Annotated[
    NoClip | ClipLoss | ClipEntries | ClipAdvantage,
    _read_choice("clip"),
    Field(discriminator="type"),
]
Estimator = Annotated[
    Auto | Pathwise | ScoreFunction | K2Surrogate,
    _read_choice("estimator"),
    Field(discriminator="type"),
]
DivergenceChoice = Annotated[
    Choice,
    _read_entry("divergence", DIVERGENCES),
    AfterValidator(_check_parameter),
    _list_in_schema(DIVERGENCES),
]
CorrectionChoice = Annotated[
    Choice, _read_entry("correction", CORRECTIONS), _list_in_schema(CORRECTIONS)
]
WeightChoice = Annotated[
    Choice, _read_entry("weight", WEIGHTS), AfterValidator(_check_weight), _list_in_schema(WEIGHTS)
]
SampleWeightChoice = Annotated[
    Choice,
    _read_entry("sample weight", SAMPLE_WEIGHTS),
    AfterValidator(_check_sample_weight),
    _list_in_schema(SAMPLE_WEIGHTS),
]

assert set(ADVANTAGES) == set(AdvantageName.__args__)  # type: ignore[attr-defined]
