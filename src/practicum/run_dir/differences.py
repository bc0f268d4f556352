"""List the changes between a saved run and the present one, as lines for people."""

import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from practicum.core.plugins import load_plugin

NOT_COMPARED = re.compile(
    r"(base_dir|about|family|tracking|prices|task\.sandbox|train\.(checkpoint_every|keep_checkpoints|save_in_background"
    r"|metric_for_best_model))"
    r"([.\[].*)?"
    r"|(teacher|reference)\.(\S+\.)?"
    r"(url|api_key_env|allow_http|concurrency|timeout|tokens_per_second|retry_seconds"
    r"|token_budget|canary_every|budget|prices(\..*)?)"
)
"""Fields of a recipe that may differ between a run and its resume without changing what is
computed. The last fields set the address of a teacher's server, its timeouts and its limits. A
backend names its own fields."""

_ABSENT = object()


def collect_versions(packages: Sequence[str] = ()) -> dict[str, str | int]:
    """Return the versions and settings that a bit-exact resume depends on, in addition to the recipe.

    For example `{"torch": "2.13.0", "threads": 2, ...}`. `packages` are further packages of this
    run, such as the verifier's package.
    """
    names = ("transformers", "safetensors", "practicum", *packages)
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{name: _find_version(name) for name in names},
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }


def compare_versions(saved: Mapping[str, object], current: Mapping[str, object]) -> list[str]:
    """Return a warning for each version or setting that keeps a resume from being bit-exact."""
    return [
        f"{name} was {_show(before)} at the checkpoint and is {_show(after)} now: "
        "the resumed run may not be bit-exact"
        for name, before, after in _find_differences("", saved, current)
    ]


@dataclass(frozen=True, slots=True)
class Change:
    """An allowed change of a recipe's field during a run: its first step, and both values."""

    step: int
    field: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Difference:
    """A field that differs between a saved run and the present one; an absent value is None."""

    field: str
    before: Any
    after: Any
    line: str

    def __str__(self) -> str:
        return self.line

    def to_change(self, step: int) -> Change:
        """Return the difference as a change from a step on."""
        return Change(step, self.field, self.before, self.after)


def find_recipe_differences(
    saved: Mapping[str, object], current: Mapping[str, object]
) -> list[Difference]:
    """Return each field that differs, as `optimizer.learning_rate: 0.001 in the run, 0.01 now`."""
    return [
        Difference(
            field,
            None if before is _ABSENT else before,
            None if after is _ABSENT else after,
            f"{field}: {_show(before)} in the run, {_show(after)} now",
        )
        for field, before, after in _find_differences("", saved, current)
    ]


def find_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Difference]:
    """Return each field of a resolved recipe that changed and that the computation depends on."""
    places = _list_free_places(current)
    before, after = _reduce_monitors(saved), _reduce_monitors(current)
    return [
        difference
        for difference in find_recipe_differences(before, after)
        if not any(is_below(place, difference.field) for place in places)
        and NOT_COMPARED.fullmatch(difference.field) is None
    ]


def list_changed_fields(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return one line for each of `find_changes`."""
    return [str(difference) for difference in find_changes(saved, current)]


def is_below(place: str, field: str) -> bool:
    """Return True if a field is at a place of a recipe or below it."""
    return field == place or field.startswith((f"{place}.", f"{place}["))


def list_changed_parts(saved: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """Return a line for each file or input, except the recipe, that differs from its saved digest.

    For example `teacher/config.json changed`.
    """
    verbs = {(True, True): "changed", (True, False): "is gone", (False, True): "is new"}
    return [
        f"{name} {verbs[name in saved, name in current]}"
        for name in dict.fromkeys([*saved, *current])
        if saved.get(name) != current.get(name)
    ]


def _reduce_monitors(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe with only those settings of its monitors that change numbers."""
    if "monitors" not in recipe:
        return dict(recipe)
    sets = {
        name: {"set": settings["set"]}
        for name, settings in recipe["monitors"].items()
        if settings.get("set")
    }
    return {**recipe, "monitors": sets}


def _list_free_places(recipe: Mapping[str, Any]) -> list[str]:
    """Return the places that backend and engine let change, such as a number of processes."""
    engine = recipe.get("rollout", {}).get("engine")
    sections = {
        "backend": ("backends", recipe.get("backend")),
        "rollout.engine": ("practicum.engines", engine),
    }
    return [
        f"{place}.{name}"
        for place, (room, section) in sections.items()
        if section
        for name in sorted(load_plugin(room, section["type"]).Config.not_compared)
    ]


def _find_differences(
    field: str, saved: object, current: object
) -> Iterator[tuple[str, object, object]]:
    """Yield every leaf that differs, with its dotted name; lists of one length item by item."""
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        for key in dict.fromkeys([*saved, *current]):
            name = f"{field}.{_show(key)}" if field else _show(key)
            before, after = saved.get(key, _ABSENT), current.get(key, _ABSENT)
            yield from _find_differences(name, before, after)
    elif isinstance(saved, list) and isinstance(current, list) and len(saved) == len(current):
        for index, (before, after) in enumerate(zip(saved, current, strict=True)):
            yield from _find_differences(f"{field}[{index}]", before, after)
    elif saved != current:
        yield field, saved, current


def _show(value: object) -> str:
    if value is _ABSENT:
        return "absent"
    is_plain = isinstance(value, str) and value.isprintable()
    text = str(value) if is_plain else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _find_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
