"""Read a choice of a recipe as an entry of a table of `practicum.functional`, with its arguments."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import Field, model_serializer

from practicum.core.calls import bind, format_call, parse_call, suggest_name
from practicum.foreign import try_foreign
from practicum.functional.advantages import RewardRule
from practicum.functional.divergence_entry import Divergence
from practicum.functional.registry import TABLES, register
from practicum.functional.samples import SampleStatistics, SampleWeight
from practicum.functional.weights import TokenStatistics, Weight
from practicum.types import FrozenConfig

Arguments = dict[str, int | float | str]

REFUSED = {
    "kl": (
        "'kl' does not say which way; write forward_kl for KL(T || S) or reverse_kl for KL(S || T)"
    ),
}
"""The names that are refused, each with its real effect and what to write instead."""


class Choice(FrozenConfig):
    """An entry of a table of `practicum.functional` with its arguments, defaults filled in."""

    name: str
    arguments: Arguments = Field(default_factory=dict)

    @model_serializer(mode="plain")
    def _serialize(self) -> str:
        return format_call(self.name, self.arguments)


def read_entry(kind: str, raw: Any) -> dict[str, Any]:
    """Read a name, a call or a mapping as the fields of a `Choice` of a kind.

    Raise ValueError with a suggestion, also for a user-defined entry that fails in a trial call.
    The table is read every time, so that a later `register` has an effect. An entry object is
    registered under its name.
    """
    cls, table = TABLES[kind]
    if isinstance(raw, cls):
        is_known = raw.name in table and table[raw.name] is raw
        raw = raw.name if is_known else register(raw).name
    if isinstance(raw, str):
        name = parse_call(raw)[0]
        arguments = bind(kind, raw, list(look_up(kind, name).defaults))
    elif isinstance(raw, Choice):
        name, arguments = raw.name, raw.arguments
    elif isinstance(raw, Mapping) and "type" in raw:
        name = str(raw["type"])
        arguments = {key: argument for key, argument in raw.items() if key != "type"}
    else:
        raise ValueError(_explain_no_name(kind, raw))
    entry = look_up(kind, name)
    where = f"{kind} {name!r}"
    _check_defaults(where, entry.defaults)
    checked = {
        key: _check_argument(where, key, argument, entry.defaults)
        for key, argument in arguments.items()
    }
    arguments = {**entry.defaults, **checked}
    try_foreign(where, lambda: _TRIALS[kind](entry, arguments))
    return {"name": name, "arguments": arguments}


def look_up(kind: str, name: str) -> Any:
    """Return the entry of a kind by name; raise ValueError with the nearest known name."""
    cls, table = TABLES[kind]
    try:
        return table[name]
    except KeyError:
        advice = (
            f"; for one of your own write package.module:entry, or register({cls.__name__}(...))"
        )
        raise ValueError(
            REFUSED.get(
                name, f"no {kind} named {name!r}; {suggest_name(name, table.list_names())}{advice}"
            )
        ) from None


def check_advantage(name: str) -> str:
    """Return the name of an advantage; raise ValueError if it is unknown or its function fails."""
    entry = look_up("advantage", name)
    try_foreign(f"advantage {name!r}", lambda: _TRIALS["advantage"](entry, {}))
    return name


def _explain_no_name(kind: str, raw: Any) -> str:
    """Explain what to write instead of a function, an entry or any other value that is not a name."""
    cls, table = TABLES[kind]
    names = f"known: {', '.join(table)}"
    if callable(raw):
        name = cls.__name__
        return (
            f"a {kind} is an entry with a name, not a function; write entry = "
            f"practicum.functional.{name}('name', function, ...) and give the entry, or "
            f"package.module:entry; {names}"
        )
    return f"a {kind} is written as a name or a call, not as {raw!r}; {names}"


_KINDS = {str: ("a text", str), int: ("a whole number", int), float: ("a number", int | float)}
"""The type of a parameter by the type of its default: its description, and the accepted types."""


def _check_defaults(where: str, defaults: Mapping[str, Any]) -> None:
    """Raise ValueError if a recipe cannot write a parameter."""
    for key, default in defaults.items():
        if type(default) not in _KINDS:
            raise ValueError(
                f"{where}: the default of {key} is {default!r}; write a number or a text there"
            )


def _check_argument(where: str, key: str, argument: Any, defaults: Arguments) -> int | float | str:
    """Return the argument in the type of the parameter's default.

    Raise ValueError if there is no such parameter or the type is wrong.
    """
    if key not in defaults:
        raise ValueError(f"{where} has no parameter {key!r}; {suggest_name(key, defaults)}")
    kind, fits = _KINDS[type(defaults[key])]
    # A bool is an int in Python, and NaN differs from itself: neither is a number here.
    if not isinstance(argument, fits) or isinstance(argument, bool) or argument != argument:
        raise ValueError(
            f"{where}: {key} must be {kind}, for example {defaults[key]}, got {argument!r}"
        )
    return float(argument) if kind == "a number" else argument


def _try_divergence(entry: Divergence, arguments: Arguments) -> None:
    """Compute the value of two candidates, and check the parameter's range."""
    parameter = next((float(argument) for argument in arguments.values()), None)
    half = torch.full((1, 2), math.log(0.5))
    entry.value(half, half, parameter)


def _try_weight(entry: Weight, arguments: Arguments) -> None:
    """Weigh one token."""
    ones = torch.ones(1)
    statistics = TokenStatistics(
        loss_mask=ones,
        student_entropy=ones,
        teacher_entropy=ones,
        divergence=ones,
        logprobs=ones,
        teacher_logprobs=ones,
        reference_logprobs=ones,
        positions=ones.long(),
        rows=ones.long() - 1,
        sampled_rank=ones.long(),
        greedy_rank=ones.long(),
        drafted_rank=ones.long(),
        special=ones.bool(),
        turns=ones.long() - 1,
    )
    entry.needed(arguments)
    entry.function(statistics, **arguments)


def _try_sample_weight(entry: SampleWeight, arguments: Arguments) -> None:
    """Weigh one completion."""
    statistics = SampleStatistics(
        kept=(True,),
        rewards=(1.0,),
        texts=("",),
        student_nll=(1.0,),
        teacher_nll=(1.0,),
        reference_nll=(1.0,),
    )
    entry.needed(arguments)
    entry.function(statistics, **arguments)


def _try_reward(entry: RewardRule, arguments: Arguments) -> None:
    """Join the teacher and the reward at one token."""
    if entry.advantage:
        check_advantage(str(arguments["advantage"]))
    entry.join(torch.ones(1), torch.ones(1), torch.zeros(1), arguments)


_TRIALS: dict[str, Callable[[Any, Arguments], Any]] = {
    "divergence": _try_divergence,
    "weight": _try_weight,
    "sample weight": _try_sample_weight,
    "correction": lambda entry, arguments: entry.function(
        torch.zeros(1), torch.ones(1), **arguments
    ),
    "advantage": lambda entry, _: list(
        entry.function([1.0, 0.0], *([[0.0]] if entry.anchored else []))
    ),
    "reward": _try_reward,
}
"""A call of each kind of entry on the smallest input, which detects wrong signatures."""
