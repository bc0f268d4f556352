"""Define the choices on the axes of an objective.

Each choice is written as a name or a call, such as `jsd(0.3)`, and read back from its own text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field

from practicum.core.calls import Call, bind, parse_call, suggest_name
from practicum.foreign import is_external
from practicum.functional.advantages import REWARDS, RewardRule
from practicum.functional.registry import TABLES
from practicum.objective.entries import REFUSED, Choice, read_entry
from practicum.objective.estimators import Auto, K2Surrogate, Pathwise, ScoreFunction
from practicum.objective.signal_call import AdvantageName
from practicum.objective.signals.score import Config as Score

CallT = TypeVar("CallT", bound=Call)


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


class OwnReward(Choice):
    """A rule of yours, a `RewardRule`: a function of the teacher's and the reward's advantage."""

    type: Literal["package.module:entry"] = "package.module:entry"

    @property
    def by_itself(self) -> Score:
        """Return the signal that remains without the teacher: the reward's advantage."""
        return Score(advantage=REWARDS[self.name].advantage)

    @property
    def share(self) -> float:
        """Return the factor of the reward's advantage that remains: 1."""
        return 1.0


def index_by_type(*classes: type[CallT]) -> dict[str, type[CallT]]:
    """Return the classes of one axis by the names that recipes use."""
    return {cls.model_fields["type"].default: cls for cls in classes}


AXES = {
    "estimators": index_by_type(Auto, Pathwise, ScoreFunction, K2Surrogate),
    "rewards": index_by_type(NoReward, AddAdvantage, Modulate),
}
"""The choices that are classes, by axis and name."""


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


@dataclass(frozen=True, slots=True)
class EntrySchema:
    """The JSON Schema of an entry of a table: its name, a call, or a mapping by `type`.

    It is made when it is asked for, so that a later `register` counts.
    """

    kind: str

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        """Return the schema."""
        call = {"type": "string", "pattern": r"^\s*[A-Za-z_][\w.]*\s*\("}
        dotted = {"type": "string", "pattern": r"^[A-Za-z_]\w*([.:][A-Za-z_]\w*)+$"}
        mapping = {"type": "object", "properties": {"type": {"type": "string"}}}
        names = {"enum": TABLES[self.kind][1].list_names()}
        return {"anyOf": [names, call, dotted, mapping | {"required": ["type"]}]}


def _read_choice(kind: str) -> BeforeValidator:
    return build_validator(kind, AXES[f"{kind}s"])


def _look_up(kind: str, name: str, choices: Mapping[str, type[Call]]) -> type[Call]:
    """Return the choice of an axis by name; raise ValueError with the nearest known name."""
    try:
        return choices[name]
    except KeyError:
        raise ValueError(
            REFUSED.get(name, f"no {kind} named {name!r}; {suggest_name(name, choices)}")
        ) from None


def _read_own_reward(raw: Any) -> Any:
    """Return a rule of the user's, read by its name or as a call; anything else as it is."""
    name = parse_call(raw)[0] if isinstance(raw, str) else ""
    is_own = isinstance(raw, RewardRule) or callable(raw)
    if name in REWARDS.list_names() or is_external(name) or is_own:
        return OwnReward(**read_entry("reward", raw))
    return raw


Reward = Annotated[
    NoReward | AddAdvantage | Modulate | OwnReward,
    _read_choice("reward"),
    # It comes first: validators before the type run from the last to the first.
    BeforeValidator(_read_own_reward),
    Field(discriminator="type"),
]
Estimator = Annotated[
    Auto | Pathwise | ScoreFunction | K2Surrogate,
    _read_choice("estimator"),
    Field(discriminator="type"),
]
DivergenceChoice = Annotated[
    Choice, BeforeValidator(partial(read_entry, "divergence")), EntrySchema("divergence")
]
CorrectionChoice = Annotated[
    Choice, BeforeValidator(partial(read_entry, "correction")), EntrySchema("correction")
]
WeightChoice = Annotated[
    Choice, BeforeValidator(partial(read_entry, "weight")), EntrySchema("weight")
]
SampleWeightChoice = Annotated[
    Choice, BeforeValidator(partial(read_entry, "sample weight")), EntrySchema("sample weight")
]
