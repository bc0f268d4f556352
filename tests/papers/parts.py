"""Switch off each characteristic part of every published method, and record what notices it, in results/parts.json.

    PYTHONPATH=tests python -m papers.parts [NAME ...] [--jobs 2]

The parts of a method are the keys of its recipe outside the setting. Without a part, the recipe is refused, or its gradient is
no longer the paper's formula, or a reading of a small run differs. A part that nothing notices should not be in the recipe.

A stage of a pipeline is a recipe, and its parts are found in the same way. A stage on which a later stage depends is a part too.
"""

import argparse
import copy
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from hashlib import sha256
from multiprocessing import Pool
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from benchmarks.papers import fingerprint
from practicum.core.calls import parse_call
from practicum.errors import PracticumError
from practicum.recipe import Recipe, find_recipe, list_recipe_names, parse_recipe, read_recipe
from practicum.recipe.layers import RecipeLayer, fit_layers, merge_layers, read_layers
from practicum.recipe.loader import put_term_in_list
from practicum.recipe.schema import WORDS
from practicum.recipe.yaml_files import read_yaml
from practicum.runs.stages import parse_pipeline

from .case import Case, library_and_formula
from .formulas import Formula, find_formula
from .small import ONLY, SmallRuns

METHODS = [
    name
    for name in list_recipe_names()
    if name.startswith(("papers/", "pipelines/", "served/", "teams/"))
    and "paper" in read_yaml(find_recipe(name))
]
"""The recipes and pipelines of published methods."""

REFUSED = "refused"
"""The witness of a part without which no run begins."""

FAULTS = (PracticumError, AssertionError, LookupError, TypeError, ValueError, RuntimeError)
"""What a loss raises that does not fit the batch of the formulas."""

Place = tuple[str | int, ...]
"""The keys that lead to a part of a recipe; the last may be an argument of a call."""

RESULTS = Path(__file__).resolve().parents[2] / "results" / "parts.json"
"""The recorded parts of every recipe."""

NO_PARTS = {
    *WORDS,
    *("base_dir", "name", "seed", "train_seed", "model", "type", "threads", "replay_size", "keep"),
    *("residency", "setting"),
}
"""Keys that are no parts: words, models, seeds, sizes and settings; a type is switched off with its whole section."""

CONTAINERS = ("scorers", "notes", "losses", "stages")
"""Keys with one part per entry."""


def main() -> None:
    """Examine the recipes that are named, or all, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="such as gkd or teams/qwen3; none: every method")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    names = [name if "/" in name else f"papers/{name}" for name in options.names] or METHODS
    if unknown := sorted({*names} - {*METHODS}):
        parser.error(f"no recipe {', '.join(unknown)}")
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    with Pool(options.jobs) as pool:
        for name, result in zip(names, pool.imap(examine, names), strict=True):
            results[name] = result
            for part, witness in result["parts"].items():
                print(f"{name}: {part}: {witness or 'nothing'}", flush=True)
            ordered = {name: results[name] for name in METHODS if name in results}
            RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def examine(name: str) -> dict[str, Any]:
    """Switch off each part of a recipe or pipeline in turn, and return what notices it."""
    torch.set_num_threads(1)
    layers = read_layers(find_recipe(name))
    setting = merge_layers([layer for layer in layers if layer.is_setting])
    method = _name_stages(merge_layers([layer for layer in layers if not layer.is_setting]))
    whole = parse_stages(_join(setting, method), name)
    formulas = {stage: _choose_formula(name, method, recipe) for stage, recipe in whole.items()}
    parts = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = SmallRuns(name, _join(setting, method), Path(folder))
        before = {stage: runs.read_whole(stage) for stage in whole}
        # Otherwise every part would seem to be noticed, or none.
        last, again = [*before.values()][-1], runs.read([*before][-1], _join(setting, method))
        assert formulas.get(ONLY, True), f"{name} is not its formula"
        assert not isinstance(last, str), f"{name} does not run: {last}"
        assert last == again, f"{name} differs from one run to the next"
        for place, words in list_parts(method, task=setting.get("task")):
            data = _join(setting, switch_off(method, place))
            try:
                stages = parse_stages(data, name)
            except PracticumError:
                parts[words] = REFUSED
                continue
            # A key with the value of the setting or of the default is no part.
            changed = [stage for stage, recipe in stages.items() if recipe != whole[stage]]
            witness = ""
            for stage in changed:
                formula, pair = formulas[stage], (stages[stage], whole[stage])
                witness = witness or (_compare_formula(*pair, formula) if formula else "")
                witness = witness or _compare_runs(before[stage], runs.read(stage, data))
                witness = witness or ("" if formula else _compare_gradients(*pair))
            # The k2 loss, for example, has the gradient of the default.
            if changed and (witness or place[-1] != "estimator"):
                parts[words] = witness
    return {"of": identify(whole), "parts": parts}


def load_stages(name: str) -> dict[str, Recipe]:
    """Return the recipes of a packaged pipeline's stages by name, or the only recipe."""
    return parse_stages(read_recipe(find_recipe(name)), name)


def parse_stages(data: Mapping[str, Any], name: str) -> dict[str, Recipe]:
    """Validate the data of a recipe or pipeline; raises RecipeError."""
    data = {**data, "name": "small"}
    if "stages" not in data:
        return {ONLY: parse_recipe(data, name)}
    # The number of a stage is in its recipe's name, and changes if an earlier stage is switched off.
    return {
        stage: recipe.model_copy(update={"name": stage})
        for stage, recipe in parse_pipeline(data, name).build_recipes().items()
    }


def identify(stages: Mapping[str, Recipe]) -> str:
    """Return the fingerprint of a recipe, or one of all stages."""
    prints = [fingerprint(recipe) for recipe in stages.values()]
    return prints[0] if ONLY in stages else sha256("".join(prints).encode()).hexdigest()[:12]


def _name_stages(method: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method with its stages by name, or a single loss term in a list."""
    if "stages" not in method:
        return put_term_in_list(method)
    # A stage's objective is merged over the shared one, which a list of terms would replace.
    return {**method, "stages": {entry["name"]: entry for entry in method["stages"]}}


def _join(setting: Mapping[str, Any], method: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of a recipe or pipeline with its setting and its stages' settings."""
    if "stages" in method:
        method = {**method, "stages": [*method["stages"].values()]}
    layers = [RecipeLayer("setting", setting, is_setting=True), RecipeLayer("method", method)]
    return merge_layers(fit_layers(layers))


def _choose_formula(name: str, method: Mapping[str, Any], recipe: Recipe) -> Formula | None:
    """Return the formula of a recipe, or the first formula of the same paper that a stage follows."""
    is_paper = name.startswith("papers/")
    names = [name] if is_paper else _list_papers().get(method.get("paper"), [])
    formulas = map(find_formula, names)
    return next((found for found in formulas if not _compare_formula(recipe, recipe, found)), None)


@cache
def _list_papers() -> Mapping[str | None, list[str]]:
    """Return the names of papers' recipes by paper."""
    names: dict[str | None, list[str]] = {}
    for name in METHODS:
        if name.startswith("papers/"):
            names.setdefault(read_recipe(find_recipe(name))["paper"], []).append(name)
    return names


def _compare_formula(recipe: Recipe, whole: Recipe, formula: Formula) -> str:
    """Return "formula" if the gradient is no longer the paper's formula."""
    try:
        pairs = [library_and_formula(recipe, formula, step) for step in _list_steps(whole)]
        return "" if _are_equal(pairs) else "formula"
    except FAULTS:
        return "formula"


def _compare_gradients(recipe: Recipe, whole: Recipe) -> str:
    """Return "gradient" if two recipes have different gradients on the batch of the formulas."""
    try:
        one, other = (
            [library_and_formula(variant, _sum_tokens, step)[0] for step in _list_steps(whole)]
            for variant in (recipe, whole)
        )
        return "" if _are_equal(zip(one, other, strict=True)) else "gradient"
    except FAULTS:
        return ""


def _list_steps(recipe: Recipe) -> tuple[int, int, int]:
    """Return the first, middle and last step of a run."""
    steps = recipe.train.steps
    return 1, (steps + 1) // 2, steps


def _are_equal(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    return all(torch.allclose(one, other, rtol=1e-6, atol=1e-9) for one, other in pairs)


def _sum_tokens(case: Case) -> Tensor:
    """Return an arbitrary loss, for a recipe without a formula."""
    return torch.stack([token.lS for token in case.tokens()]).sum()


def _compare_runs(before: Any, after: Any) -> str:
    """Return the name of the first reading that differs."""
    if isinstance(after, str):
        return REFUSED
    for old, new in zip(before, after, strict=False):
        for reading in [*old, *sorted(new.keys() - old.keys())]:
            if old.get(reading) != new.get(reading):
                return f"`{reading}`"
    return ""


def list_parts(
    method: Any, place: Place = (), task: Mapping[str, Any] | None = None
) -> Iterator[tuple[Place, str]]:
    """Yield the parts of a method: the keys that lead to each part, and a description.

    A stage may repeat the `task` of the setting, which is no part of the method.
    """
    for key, content in method.items() if isinstance(method, Mapping) else enumerate(method):
        here = (*place, key)
        if key in NO_PARTS or (key == "task" and content == task):
            continue
        if key in CONTAINERS:
            for inner, _ in content.items() if isinstance(content, Mapping) else enumerate(content):
                if len(content) > 1:
                    value = None if key == "stages" else content[inner]
                    yield (*here, inner), _describe((*here, inner), value)
                yield from list_parts(content[inner], (*here, inner), task)
        elif isinstance(content, Mapping):
            if "type" in content or key == "start":
                yield here, _describe(here, content)
            yield from list_parts(content, here, task)
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
        default = "full" if "losses" in place else ", ".join(content)
        content = content.get("type", content.get("signal", default))
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
