"""Switch off each characteristic part of every paper's recipe, and record what notices it, in results/parts.json.

    PYTHONPATH=tests python -m papers.parts [NAME ...] [--jobs 2]

The parts of a method are the keys of its recipe outside the setting. Without a part, the recipe is refused, or its gradient is
no longer the paper's formula, or a reading of a small run differs. A part that nothing notices should not be in the recipe.
"""

import argparse
import copy
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import Pool
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from toy import rows

from benchmarks.papers import fingerprint
from practicum.core.calls import parse_call
from practicum.errors import PracticumError
from practicum.recipe import Recipe, find_recipe, list_recipe_names, merge_recipes, parse_recipe
from practicum.recipe.layers import merge_layers, read_layers
from practicum.recipe.loader import put_term_in_list
from practicum.recipe.schema import WORDS
from practicum.runs import run

from .case import library_and_formula
from .formulas import find_formula
from .small import REAL, make_two_models, shrink

REFUSED = "refused"
"""The witness of a part without which no run begins."""

Place = tuple[str | int, ...]
"""The keys that lead to a part of a recipe; the last may be an argument of a call."""

RESULTS = Path(__file__).resolve().parents[2] / "results" / "parts.json"
"""The recorded parts of every recipe."""

NO_PARTS = {*WORDS, "base_dir", "name", "seed", "model", "type", "threads", "replay_size", "keep"}
"""Keys that are no parts: words, models, seeds and sizes; a type is switched off with its whole section."""


def main() -> None:
    """Examine the recipes that are named, or all, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="such as gkd; none: every paper's recipe")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    packaged = [name for name in list_recipe_names() if name.startswith("papers/")]
    names = [f"papers/{name}" for name in options.names] or packaged
    if unknown := sorted({*names} - {*packaged}):
        parser.error(f"no recipe {', '.join(unknown)}")
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    with Pool(options.jobs) as pool:
        for name, result in zip(names, pool.imap(examine, names), strict=True):
            results[name] = result
            for part, witness in result["parts"].items():
                print(f"{name}: {part}: {witness or 'nothing'}", flush=True)
            ordered = {name: results[name] for name in packaged if name in results}
            RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def examine(name: str) -> dict[str, Any]:
    """Switch off each part of a recipe in turn, and return what notices it."""
    torch.set_num_threads(1)
    layers = read_layers(find_recipe(name))
    setting = merge_layers([layer for layer in layers if layer.is_setting])
    method = put_term_in_list(merge_layers([layer for layer in layers if not layer.is_setting]))
    whole = parse_recipe({"name": "small", **merge_recipes(setting, method)}, name)
    parts = {}
    with tempfile.TemporaryDirectory() as folder:
        read_small_run = _prepare_small_runs(name, Path(folder))
        before = read_small_run(merge_recipes(setting, method))
        # Otherwise every part would seem to be noticed, or none.
        assert not _compare_formula(name, whole, whole), f"{name} is not its formula"
        assert not isinstance(before, str), f"{name} does not run: {before}"
        for place, words in list_parts(method):
            data = merge_recipes(setting, switch_off(method, place))
            try:
                recipe = parse_recipe({"name": "small", **data}, name)
            except PracticumError:
                parts[words] = REFUSED
                continue
            # A key with the value of the setting or of the default is no part.
            if recipe != whole:
                witness = _compare_formula(name, recipe, whole)
                witness = witness or _compare_runs(before, read_small_run(data))
                # The k2 loss, for example, has the gradient of the default.
                if witness or place[-1] != "estimator":
                    parts[words] = witness
    return {"of": fingerprint(whole), "parts": parts}


def _prepare_small_runs(name: str, folder: Path) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function that runs variants of a recipe with a few small steps.

    It returns the metrics of each step, or the error that ended the run.
    """
    models, steps = (None, REAL[name]) if name in REAL else (make_two_models(folder), None)

    def read_small_run(recipe_data: Mapping[str, Any]) -> Any:
        try:
            small = parse_recipe(shrink(name, recipe_data, models, steps), name)
            with tempfile.TemporaryDirectory(dir=folder) as out:
                return rows(run(small, out=out, progress=False).folder / "metrics.jsonl")
        except PracticumError as error:
            return str(error)

    return read_small_run


def _compare_formula(name: str, recipe: Recipe, whole: Recipe) -> str:
    """Return "formula" if the gradient is no longer the paper's formula."""
    steps = whole.train.steps
    for step in (1, (steps + 1) // 2, steps):
        try:
            ours, theirs = library_and_formula(recipe, find_formula(name), step)
        except (PracticumError, AssertionError, LookupError, TypeError, ValueError, RuntimeError):
            return "formula"
        if not torch.allclose(ours, theirs, rtol=1e-6, atol=1e-9):
            return "formula"
    return ""


def _compare_runs(before: Any, after: Any) -> str:
    """Return the name of the first reading that differs."""
    if isinstance(after, str):
        return REFUSED
    for old, new in zip(before, after, strict=False):
        for reading in [*old, *(new.keys() - old.keys())]:
            if old.get(reading) != new.get(reading):
                return f"`{reading}`"
    return ""


def list_parts(method: Any, place: Place = ()) -> Iterator[tuple[Place, str]]:
    """Yield the parts of a method: the keys that lead to each, and what it is in words."""
    for key, content in method.items() if isinstance(method, Mapping) else enumerate(method):
        here = (*place, key)
        if key in NO_PARTS:
            continue
        if key in ("scorers", "notes", "losses"):
            for inner, _ in content.items() if isinstance(content, Mapping) else enumerate(content):
                if len(content) > 1:
                    yield (*here, inner), _describe((*here, inner), content[inner])
                yield from list_parts(content[inner], (*here, inner))
        elif isinstance(content, Mapping):
            if "type" in content:
                yield here, _describe(here, content)
            yield from list_parts(content, here)
        else:
            yield here, _describe(here, content)
            for argument, value in _list_arguments(content).items():
                yield (*here, argument), f"{_describe(here)}: {argument}={value}"


def _describe(place: Place, content: Any = None) -> str:
    """Return a part in words: its keys, and the value, or the type of a section."""
    name = ".".join(map(str, place)).replace("objective.losses.", "losses.")
    if content is None:
        return name
    if isinstance(content, Mapping):
        content = content.get("type", content.get("signal", "full"))
    return f"{name}: {shorten(str(content), 48, placeholder=' ...')}"


def switch_off(method: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Return the method without a part."""
    changed: Any = copy.deepcopy(dict(method))
    section = changed
    for number, key in enumerate(place[:-1]):
        if isinstance(section[key], str):
            assert number == len(place) - 2
            call, positional, keywords = parse_call(section[key])
            del keywords[place[-1]]
            named = [f"{name}={value}" for name, value in keywords.items()]
            section[key] = f"{call}({', '.join([*map(str, positional), *named])})"
            return changed
        section = section[key]
    del section[place[-1]]
    return changed


def _list_arguments(content: Any) -> dict[str, Any]:
    """Return the named arguments of a call."""
    if not isinstance(content, str) or not content.endswith(")"):
        return {}
    try:
        return parse_call(content)[2]
    except ValueError:
        return {}


if __name__ == "__main__":
    main()
