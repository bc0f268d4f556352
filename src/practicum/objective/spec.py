"""The objective as data: a list of terms, each a choice on the mathematical axes, and one aggregate.

Every choice is written as a name or a call, `jsd(0.3)`, and reads back from its own text.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_serializer, model_validator

from practicum.functional.divergences import DIVERGENCES
from practicum.functional.estimators import CORRECTIONS
from practicum.functional.sequence import AGGREGATES
from practicum.functional.weights import WEIGHTS, TokenStatistics
from practicum.objective.calls import bind, did_you_mean, format_call, parse_call

Arguments = dict[str, int | float | str]


class Call(BaseModel):
    """A choice that is written as a call; `type` is its name and the other fields its parameters, in order."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_serializer(mode="plain")
    def _as_text(self) -> str:
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return format_call(fields.pop("type"), {name: value for name, value in fields.items() if value is not None})


class Full(Call):
    """Every log-probability of the teacher: exact, and no dearer than one token when both heads are local."""

    type: Literal["full"] = "full"


class Sampled(Call):
    """One teacher log-probability a token, that of the token the student sampled."""

    type: Literal["sampled"] = "sampled"


class TopK(Call):
    """K candidates a token, chosen by `support`; what becomes of the other mass is `tail`'s choice."""

    type: Literal["topk"] = "topk"
    k: int = Field(default=64, ge=1)
    support: Literal["student", "teacher", "union", "intersection"] = "student"
    tail: Literal["bucket", "renorm", "drop", "sampled"] = "bucket"


class TeacherTarget(Call):
    """The teacher's distribution, at a temperature (1: as it is)."""

    type: Literal["teacher"] = "teacher"
    temperature: float = Field(default=1.0, gt=0)


class LogLinear(Call):
    """`softmax(teacher * log T + student * log S)`, the student's part detached (Veto 2601.07155, TAID 2501.16937)."""

    type: Literal["log_linear"] = "log_linear"
    teacher: float = 1.0
    student: float = 0.0


class Mixture(Call):
    """`teacher * T + (1 - teacher) * S` in probability, the student's part detached."""

    type: Literal["mixture"] = "mixture"
    teacher: float = Field(default=1.0, gt=0, le=1)


class Auto(Call):
    """Pathwise wherever there are candidates to differentiate, score_function for sampled signals."""

    type: Literal["auto"] = "auto"


class Pathwise(Call):
    """Differentiate the divergence itself at every visited state (GKD 2306.13649)."""

    type: Literal["pathwise"] = "pathwise"


class ScoreFunction(Call):
    """Policy gradient with the advantage of the sampled token; `gamma` 1 is the sequence-level gradient.

    `baseline`: none; kl, the full divergence at the state (vOPD 2605.07865); group_mean, the mean return of the other
    completions of the prompt.
    """

    type: Literal["score_function"] = "score_function"
    gamma: float = Field(default=0.0, ge=0, le=1)
    baseline: Literal["none", "kl", "group_mean"] = "none"


class K2Surrogate(Call):
    """Back-propagate half the squared log-ratio of the sampled token: exactly the reverse-KL gradient."""

    type: Literal["k2_surrogate"] = "k2_surrogate"


class Choice(BaseModel):
    """An entry of one of the tables of `practicum.functional`, with its arguments, defaults filled in."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    arguments: Arguments = {}

    @model_serializer(mode="plain")
    def _as_text(self) -> str:
        return format_call(self.name, self.arguments)


def _by_name(*classes: type[Call]) -> dict[str, type[Call]]:
    return {cls.model_fields["type"].default: cls for cls in classes}


AXES = {
    "signals": _by_name(Full, Sampled, TopK),
    "targets": _by_name(TeacherTarget, LogLinear, Mixture),
    "estimators": _by_name(Auto, Pathwise, ScoreFunction, K2Surrogate),
}
"""The choices that are classes, by axis and name."""


def _reader(kind: str) -> BeforeValidator:
    by_name = AXES[f"{kind}s"]

    def read(value: Any) -> Any:
        if isinstance(value, Mapping):
            _known(kind, str(value.get("type", "")), by_name)
        if not isinstance(value, str):
            return value
        name = parse_call(value)[0]
        fields = [field for field in _known(kind, name, by_name).model_fields if field != "type"]
        return {"type": name, **bind(kind, value, fields)}

    return BeforeValidator(read)


def _chooser(kind: str, table: Mapping[str, Arguments]) -> BeforeValidator:
    def read(value: Any) -> Any:
        if isinstance(value, str):
            name = parse_call(value)[0]
            given = bind(kind, value, list(_known(kind, name, table)))
        elif isinstance(value, Choice):
            name, given = value.name, value.arguments
        elif isinstance(value, Mapping) and "type" in value:
            name = str(value["type"])
            given = {key: argument for key, argument in value.items() if key != "type"}
        else:
            raise ValueError(f"a {kind} is written as a name or a call, not as {value!r}; known: {', '.join(table)}")
        defaults = _known(kind, name, table)
        where = f"{kind} {name!r}"
        checked = {key: _argument(where, key, argument, defaults) for key, argument in given.items()}
        return {"name": name, "arguments": {**defaults, **checked}}

    return BeforeValidator(read)


def _argument(where: str, key: str, argument: Any, defaults: Arguments) -> int | float | str:
    """The argument in the type of the parameter's default; ValueError where there is no such parameter or type."""
    if key not in defaults:
        raise ValueError(f"{where} has no parameter {key!r}; {did_you_mean(key, defaults)}")
    kinds = {str: ("a text", str), int: ("a whole number", int), float: ("a number", int | float)}
    kind, fits = kinds[type(defaults[key])]
    if not isinstance(argument, fits) or isinstance(argument, bool) or argument != argument:
        raise ValueError(f"{where}: {key} must be {kind}, for example {defaults[key]}, got {argument!r}")
    return float(argument) if kind == "a number" else argument


def _known(kind: str, name: str, table: Mapping[str, Any]) -> Any:
    if name not in table:
        raise ValueError(f"no {kind} named {name!r}; {did_you_mean(name, table)}")
    return table[name]


def _in_range(choice: Choice) -> Choice:
    """The divergence, if its parameter is in the family's range."""
    DIVERGENCES[choice.name].resolve(next((float(value) for value in choice.arguments.values()), None))
    return choice


def _usable(choice: Choice) -> Choice:
    """The weight, if its function takes its arguments; seen by calling it on one token."""
    one = torch.ones(1)
    statistics = TokenStatistics(
        loss_mask=one,
        student_entropy=one,
        teacher_entropy=one,
        divergence=one,
        logprobs=one,
        teacher_logprobs=one,
        positions=one.long(),
    )
    WEIGHTS[choice.name].function(statistics, **choice.arguments)
    return choice


_DIVERGENCES: dict[str, Arguments] = {
    name: {} if entry.parameter is None else {entry.parameter.name: entry.parameter.default}
    for name, entry in DIVERGENCES.items()
}
_CORRECTIONS: dict[str, Arguments] = {name: dict(entry.defaults) for name, entry in CORRECTIONS.items()}
_WEIGHTS: dict[str, Arguments] = {name: dict(entry.defaults) for name, entry in WEIGHTS.items()}

Signal = Annotated[Full | Sampled | TopK, _reader("signal"), Field(discriminator="type")]
Target = Annotated[
    TeacherTarget | LogLinear | Mixture,
    _reader("target"),
    Field(discriminator="type"),
]
Estimator = Annotated[
    Auto | Pathwise | ScoreFunction | K2Surrogate,
    _reader("estimator"),
    Field(discriminator="type"),
]
DivergenceChoice = Annotated[Choice, _chooser("divergence", _DIVERGENCES), AfterValidator(_in_range)]
CorrectionChoice = Annotated[Choice, _chooser("correction", _CORRECTIONS)]
WeightChoice = Annotated[Choice, _chooser("weight", _WEIGHTS), AfterValidator(_usable)]


class Term(BaseModel):
    """One term of the loss: which rollouts, what the teacher says, how disagreement becomes a gradient."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    signal: Signal = Full()
    target: Target = TeacherTarget()
    divergence: DivergenceChoice = Choice(name="reverse_kl")
    estimator: Estimator = Auto()
    correction: CorrectionChoice = Choice(name="none")
    advantage_logprob: Literal["learner", "sampler"] = "learner"
    weights: WeightChoice = Choice(name="all")
    filter: Literal["all", "correct", "incorrect"] = "all"
    coefficient: float = 1.0

    @model_validator(mode="after")
    def _consistent(self) -> "Term":
        entry = DIVERGENCES[self.divergence.name]
        if isinstance(self.signal, Sampled) and isinstance(self.gradient, Pathwise):
            raise ValueError(
                "estimator 'pathwise' needs more than one token's log-probability; with signal 'sampled' "
                "write estimator: score_function"
            )
        if not entry.pointwise and not isinstance(self.gradient, Pathwise):
            raise ValueError(
                f"divergence {self.divergence.name!r} has no sampled-token form; use signal full with estimator "
                "pathwise, or a divergence that has one, such as reverse_kl or jsd(0.5)"
            )
        if isinstance(self.gradient, K2Surrogate) and self.divergence.name != "reverse_kl":
            raise ValueError(
                "estimator 'k2_surrogate' is the gradient of reverse_kl only; write divergence: reverse_kl"
            )
        if isinstance(self.signal, Sampled) and self.baseline == "kl":
            raise ValueError("baseline 'kl' needs signal full or topk, not 'sampled'")
        self._target_consistent()
        return self

    def _target_consistent(self) -> None:
        plain = isinstance(self.target, TeacherTarget) and self.target.temperature == 1.0
        if plain or isinstance(self.signal, Full):
            return
        if (
            isinstance(self.signal, Sampled)
            and self.divergence.name == "reverse_kl"
            and self.target.type == "log_linear"
        ):
            return  # the normaliser is a constant of the state, so it drops out of the expected gradient
        raise ValueError(
            f"target {self.target.type!r} must be renormalised over the whole vocabulary; write signal: full"
        )

    @property
    def parameter(self) -> float | None:
        """The divergence's parameter, where it has one."""
        return next((float(value) for value in self.divergence.arguments.values()), None)

    @property
    def gradient(self) -> Pathwise | ScoreFunction | K2Surrogate:
        """The estimator, with `auto` decided."""
        if not isinstance(self.estimator, Auto):
            return self.estimator
        return ScoreFunction() if isinstance(self.signal, Sampled) else Pathwise()

    @property
    def baseline(self) -> str:
        """The baseline of a score function, `none` for the other estimators."""
        return self.gradient.baseline if isinstance(self.gradient, ScoreFunction) else "none"

    @property
    def needs_sequences(self) -> bool:
        """Whether a token's coefficient depends on other tokens, so that the losses need a first pass without gradient."""
        gradient = self.gradient
        sequence = isinstance(gradient, ScoreFunction) and (gradient.gamma > 0 or gradient.baseline == "group_mean")
        return (
            sequence
            or self.correction.name == "prefix_ratio"
            or self.weights.name not in ("all", "prefix", "threshold")
        )


class Objective(BaseModel):
    """The whole loss: terms that are summed, and the aggregate that turns tokens into one number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    losses: tuple[Term, ...] = (Term(),)
    aggregate: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"] = (
        "token_mean"
    )
    aggregate_norm: float | None = Field(default=None, gt=0, description="L of seq_mean_token_sum_norm")

    @model_validator(mode="before")
    @classmethod
    def _one_term_needs_no_list(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or "losses" in value:
            return value
        whole = {key: value[key] for key in ("aggregate", "aggregate_norm") if key in value}
        return {"losses": [{key: field for key, field in value.items() if key not in whole}], **whole}

    @model_validator(mode="after")
    def _complete(self) -> "Objective":
        if not self.losses:
            raise ValueError("losses is empty; leave it out for the default, or write at least one term")
        if self.aggregate == "seq_mean_token_sum_norm" and self.aggregate_norm is None:
            raise ValueError("aggregate 'seq_mean_token_sum_norm' needs aggregate_norm, for example the token limit")
        if self.aggregate != "seq_mean_token_sum_norm" and self.aggregate_norm is not None:
            raise ValueError(
                f"aggregate_norm divides under aggregate 'seq_mean_token_sum_norm' only, not under {self.aggregate!r}; "
                "leave it out or change the aggregate"
            )
        for term in self.losses:
            if isinstance(self.signal, Sampled) and term.weights.arguments.get("of") in ("teacher", "teacher_entropy"):
                raise ValueError(
                    f"weights {term.weights.name!r} needs the teacher's entropy, which signal 'sampled' does not tell; "
                    "write signal: full, or weights of another statistic"
                )
        return self

    @property
    def signal(self) -> Full | Sampled | TopK:
        """The richest signal any term asks for: what the teacher has to give."""
        order = ("sampled", "topk", "full")
        signals = [term.signal for term in self.losses]
        return max(signals, key=lambda signal: (order.index(signal.type), signal.k if isinstance(signal, TopK) else 0))

    @property
    def needs_sequences(self) -> bool:
        """Whether any term needs the first pass without gradient."""
        return any(term.needs_sequences for term in self.losses)


assert set(AGGREGATES) == set(Objective.model_fields["aggregate"].annotation.__args__)  # type: ignore[union-attr]
