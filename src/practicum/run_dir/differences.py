"""What changed between a saved run and this one, as lines for people."""

import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from practicum.core.plugins import module_of

OPERATIONAL = re.compile(
    r"(teacher|reference)\.(\S+\.)?"
    r"(url|api_key_env|allow_http|concurrency|timeout|tokens_per_second|give_up_after|token_budget|canary_every)"
)
"""Fields of a teacher behind a server that say where it is and how patiently it is asked."""

NOT_COMPARED = (
    "base_dir",
    "about",
    "tracking",
    "prices",
    "task.sandbox",
    "train.checkpoint_every",
    "train.keep_checkpoints",
)
"""Fields of a recipe that may change between a run and its resume without changing what is computed; a backend names its own."""

_ABSENT = object()


def current_versions(more: Sequence[str] = ()) -> dict[str, str | int]:
    """Return what a bit-exact resume depends on besides the recipe, for example `{"torch": "2.13.0", "threads": 2, ...}`.

    `more` are packages that this run uses too, such as that of its verifier.
    """
    packages = {
        name: _installed(name) for name in ("transformers", "safetensors", "practicum", *more)
    }
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **packages,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }


def compare_versions(saved: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """One warning for each version or setting under which a bit-exact resume is no longer promised."""
    return [
        f"{name} was {_show(before)} at the checkpoint and is {_show(after)} now: the resumed run may not be bit-exact"
        for name, before, after in _differences("", saved, now)
    ]


@dataclass(frozen=True, slots=True)
class Change:
    """A field of the recipe that was let change while a run went on: the first step under the new value, and both values."""

    step: int
    field: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Difference:
    """A field that differs between a saved run and this one; `before` or `after` is None where it is absent."""

    field: str
    before: Any
    after: Any
    line: str

    def __str__(self) -> str:
        return self.line

    def at(self, step: int) -> Change:
        """Return the difference as a change from a step on."""
        return Change(step, self.field, self.before, self.after)


def recipe_differences(saved: Mapping[str, object], now: Mapping[str, object]) -> list[Difference]:
    """Return each field that differs; as text `optimizer.learning_rate: 0.001 in the run, 0.01 now`."""
    return [
        Difference(
            field,
            None if before is _ABSENT else before,
            None if after is _ABSENT else after,
            f"{field}: {_show(before)} in the run, {_show(after)} now",
        )
        for field, before, after in _differences("", saved, now)
    ]


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return each field of a resolved recipe that changed and that the computation depends on."""
    places = (*NOT_COMPARED, *_free_places(now))
    return [
        difference
        for difference in recipe_differences(_computed(saved), _computed(now))
        if not any(covers(place, difference.field) for place in places)
        and OPERATIONAL.fullmatch(difference.field) is None
    ]


def changed_fields(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line for each of `changes`."""
    return [str(difference) for difference in changes(saved, now)]


def covers(place: str, field: str) -> bool:
    """Tell whether a field is at a place of a recipe or below it."""
    return field == place or field.startswith((f"{place}.", f"{place}["))


def changed_parts(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return what a run depends on besides its recipe and that is other now: `teacher/config.json changed`."""
    verbs = {(True, True): "changed", (True, False): "is gone", (False, True): "is new"}
    names = dict.fromkeys([*saved, *now])
    return [
        f"{name} {verbs[name in saved, name in now]}"
        for name in names
        if saved.get(name) != now.get(name)
    ]


def _computed(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe with nothing of its monitors but what they may change."""
    if "monitors" not in recipe:
        return dict(recipe)
    sets = {
        name: {"set": settings["set"]}
        for name, settings in recipe["monitors"].items()
        if settings.get("set")
    }
    return {**recipe, "monitors": sets}


def _free_places(recipe: Mapping[str, Any]) -> list[str]:
    """Return the places of a recipe that its backend lets change: how many processes there are, how much one does at once."""
    if "backend" not in recipe:
        return []
    config = module_of("backends", recipe["backend"]["type"]).Config
    return [f"backend.{name}" for name in sorted(config.not_compared)]


def _differences(field: str, saved: object, now: object) -> Iterator[tuple[str, object, object]]:
    """Every leaf that differs, with its dotted name; lists of one length are compared item by item."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*saved, *now]):
            name = f"{field}.{_show(key)}" if field else _show(key)
            yield from _differences(name, saved.get(key, _ABSENT), now.get(key, _ABSENT))
    elif isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        for index, (before, after) in enumerate(zip(saved, now, strict=True)):
            yield from _differences(f"{field}[{index}]", before, after)
    elif saved != now:
        yield field, saved, now


def _show(value: object) -> str:
    if value is _ABSENT:
        return "absent"
    text = (
        value if isinstance(value, str) and value.isprintable() else json.dumps(value, default=str)
    )
    return text if len(text) <= 80 else text[:77] + "..."


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
