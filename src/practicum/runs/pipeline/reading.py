"""From a file with `stages:` to stages, each a whole recipe, with every mistake of all of them reported at once."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from practicum.core.calls import did_you_mean
from practicum.errors import RecipeError
from practicum.recipe import (
    SECTIONS,
    WORDS,
    Recipe,
    control_words,
    find_recipe,
    is_named,
    load_recipe,
    merged,
    no_control,
    override,
    parse_recipe,
    read_recipe,
    resolve_path,
    resolved,
    teacher_off,
    without_switch,
)

BASE = "base"
"""The recipe's own student, where a stage may start and which may teach."""

OWN = ("name", *WORDS)
"""What a pipeline says about itself: no stage inherits it."""

MODELS = ("student", "teacher", "reference")
"""The sections of a recipe that name models."""

MARK = "stage:"
"""Begins what stands for the model of a stage while no run folder is known; no folder or hub name begins so."""

ModelOf = Callable[[Mapping[str, Any]], Any]
"""Finds a model that is written as a mapping: `{stage: NAME}`, or the settings of one from scratch."""

STAGE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,59}")


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: whose final student it starts from, and its recipe as data, in which models may be `{stage: NAME}`."""

    number: int
    name: str
    start: str
    data: Mapping[str, Any]

    @property
    def folder(self) -> str:
        """Its folder among those of the stages, such as `02-math_expert`."""
        return folder_of(self.number, self.name)

    def recipe(self, model_of: ModelOf) -> Recipe:
        """Its recipe, with the models that `model_of` finds for `{stage: NAME}` and for settings from scratch."""
        return parse_recipe(
            {**self.data, **_models(self.data, model_of), "name": self.folder}, self.name
        )

    def resolved(self) -> dict[str, Any]:
        """The stage with every default filled in, as it may stand in a pipeline."""
        data = resolved(self.recipe(_insert_placeholder))
        del data["base_dir"], data["student"]["model"]
        models = {key: _restore_references(data[key]) for key in MODELS if key in data}
        return {"name": self.name, "start": self.start, **omit_keys(data, "name"), **models}


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages in order; `recipe` is that of the first under the pipeline's own name, with the shared student and task."""

    recipe: Recipe
    stages: tuple[Stage, ...]
    shares_task: bool

    def recipes(self) -> dict[str, Recipe]:
        """Every stage's recipe by its name, with a mark where the model of another stage will stand."""
        return {stage.name: stage.recipe(_insert_placeholder) for stage in self.stages}

    def resolved(self) -> dict[str, Any]:
        """The pipeline with every default filled in, as JSON data that reads back to the same pipeline."""
        shared = {*OWN, "seed", "base_dir", "student"} | ({"task"} if self.shares_task else set())
        data = {key: value for key, value in resolved(self.recipe).items() if key in shared}
        return {**data, "stages": [stage.resolved() for stage in self.stages]}


def load_pipeline_or_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Recipe | Pipeline:
    """Read a recipe or a pipeline, from a file or by its packaged name; RecipeError with every problem found.

    An override such as `train.steps=4` goes to every stage of a pipeline, `stages.NAME.train.steps=4` to one, and `teacher=off`
    to those that join a reward and a teacher.
    """
    path = find_recipe(source)
    data = read_recipe(path)
    if "stages" not in data:
        return load_recipe(source, overrides)
    data.setdefault("name", path.stem)
    return parse_pipeline(data, str(source), overrides)


def parse_pipeline(data: Mapping[str, Any], source: str, overrides: Sequence[str] = ()) -> Pipeline:
    """Validate a pipeline's data; RecipeError with one line a problem, each naming its stage and field."""
    overrides, off = without_switch(overrides)
    written = data["stages"]
    if (
        not isinstance(written, list)
        or not written
        or not all(isinstance(entry, Mapping) for entry in written)
    ):
        raise RecipeError(f"{source}: stages: write a list of stages, each a mapping with a `name`")
    names = [str(entry.get("name")) for entry in written]
    _check_overrides(overrides, names)
    whole = _overridden(
        omit_keys(data, "stages"), [text for text in overrides if not text.startswith("stages.")]
    )
    shared = omit_keys(whole, *OWN)
    stages = tuple(_stage(place, data, names, overrides) for place in range(len(names)))
    first = omit_keys(stages[0].data, *OWN, "student")
    whole = {**first, **{key: whole[key] for key in ("student", "task", *OWN) if key in whole}}
    problems = [line for line in _problems(whole) if _section(line) in (*OWN, "student")]
    problems += [
        f"{field}: the student that a pipeline starts from is that of no stage; name a model"
        for field, _ in _references("student", whole.get("student"))
    ]
    for stage, entry in zip(stages, written, strict=True):
        where = f"stages[{stage.number - 1}] ({stage.name})."
        problems += [where + line for line in _own_problems(stage, entry, names)]
        for line in _problems({**stage.data, "name": "stage"}):
            problems.append(line if _is_shared(_section(line), stage, shared) else where + line)
    if problems:
        raise RecipeError([f"{source}: {line}" for line in dict.fromkeys(problems)])
    pipeline = Pipeline(
        parse_recipe({**whole, **_models(whole, _insert_placeholder)}, source),
        stages,
        "task" in data,
    )
    return _teacher_off(pipeline, source, is_named(overrides)) if off else pipeline


def _teacher_off(pipeline: Pipeline, source: str, named: bool) -> Pipeline:
    """Return the pipeline with every stage that has a control as that control; RecipeError where none has."""
    controls = {name: teacher_off(recipe) for name, recipe in pipeline.recipes().items()}
    changed = {name: resolved(control) for name, control in controls.items() if control is not None}
    if not changed:
        raise no_control(source)
    data = pipeline.resolved()
    stages = [
        {**stage, **{key: changed[stage["name"]][key] for key in ("about", *SECTIONS)}}
        if stage["name"] in changed
        else stage
        for stage in data["stages"]
    ]
    words = control_words(data)
    return parse_pipeline(
        {**data, **(omit_keys(words, "name") if named else words), "stages": stages}, source
    )


def _check_overrides(overrides: Sequence[str], names: Sequence[str]) -> None:
    """RecipeError where an override is for a stage that there is not."""
    for text in overrides:
        first, _, rest = text.partition("=")[0].partition(".")
        name, _, key = rest.partition(".")
        if first == "stages" and not key:
            raise RecipeError(
                f"override {text!r} names no key of a stage; write for example stages.{names[0]}.train.steps=4"
            )
        if first == "stages" and name not in names:
            raise RecipeError(
                f"override {text!r}: no stage named {name!r}; {did_you_mean(name, names)}"
            )


def _overridden(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of the data with the overrides in it."""
    changed = copy.deepcopy(dict(data))
    for text in overrides:
        override(changed, resolve_path(text, changed))
    return changed


def _stage(
    place: int, data: Mapping[str, Any], names: Sequence[str], overrides: Sequence[str]
) -> Stage:
    """A stage from the shared sections, its own and the overrides of both, in this order."""
    entry = data["stages"][place]
    mine = f"stages.{names[place]}."
    general = [
        text
        for text in overrides
        if not text.startswith("stages.") and not _is_pipeline_override(text)
    ]
    special = [text.removeprefix(mine) for text in overrides if text.startswith(mine)]
    changed = _overridden(merged(omit_keys(data, "stages", *OWN), entry), general + special)
    start = str(changed.pop("start", None) or (names[place - 1] if place else BASE))
    first, student = data.get("student"), changed.get("student")
    if (
        isinstance(student, Mapping)
        and isinstance(first, Mapping)
        and student.get("model") == first.get("model")
    ):
        changed["student"] = {**student, "model": {"stage": start}}
    return Stage(place + 1, names[place], start, changed)


def _is_pipeline_override(text: str) -> bool:
    """Whether an override is about the pipeline itself or the student that it starts from."""
    key = text.partition("=")[0]
    return key in (*OWN, "base_dir") or f"{key}.".startswith("student.model.")


def _own_problems(stage: Stage, entry: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    """What is wrong with a stage besides what could be wrong with any recipe."""
    student = stage.data.get("student")
    if (
        not isinstance(entry.get("name"), str)
        or not STAGE_NAME.fullmatch(stage.name)
        or stage.name == BASE
    ):
        yield f"name: {entry.get('name')!r} cannot name a stage; write letters, digits, '_' and '-', at most 60, not 'base'"
    if stage.name in names[: stage.number - 1]:
        yield f"name: an earlier stage has the name {stage.name!r} too; give each its own"
    if isinstance(student, Mapping) and student.get("model") != {"stage": stage.start}:
        yield "student.model: a stage's student is that of its `start`; write the model of the first beside `stages`"
    yield from _unknown("start", stage.start, stage, names)
    for role in ("teacher", "reference"):
        for field, model in _references(role, stage.data.get(role)):
            if set(model) != {"stage"}:
                yield f"{field}: the model of a stage is written {{stage: NAME}} and nothing more"
            yield from _unknown(field, str(model["stage"]), stage, names)


def _unknown(field: str, name: str, stage: Stage, names: Sequence[str]) -> Iterator[str]:
    """One line where `name` is not that of an earlier stage or of the base."""
    earlier = (BASE, *names[: stage.number - 1])
    if name in earlier:
        return
    if name in names:
        which = "this stage itself" if name == stage.name else "a later stage"
        yield f"{field}: {name!r} is {which}; name an earlier one: {', '.join(earlier)}"
    else:
        yield f"{field}: no stage named {name!r}; {did_you_mean(name, earlier)}"


def _is_shared(section: str, stage: Stage, shared: Mapping[str, Any]) -> bool:
    """Whether a stage has a section just as it is shared, so that its mistakes are those of the shared one."""
    if section == "student":
        return omit_keys(stage.data.get(section) or {}, "model") == omit_keys(
            shared.get(section) or {}, "model"
        )
    return section in shared and stage.data.get(section) == shared[section]


def _problems(data: Mapping[str, Any]) -> list[str]:
    """The problems of a recipe's data, each beginning with its field."""
    try:
        parse_recipe({**data, **_models(data, _insert_placeholder)}, "")
    except RecipeError as error:
        return [problem.removeprefix(": ") for problem in error.problems]
    return []


def _section(line: str) -> str:
    """The section of a recipe that a problem is in."""
    return re.split(r"[.:\[]", line, maxsplit=1)[0]


def _references(field: str, section: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every `model: {stage: NAME}` of a section, with its dotted name."""
    for key, value in section.items() if isinstance(section, Mapping) else ():
        if key == "model" and isinstance(value, Mapping) and "stage" in value:
            yield f"{field}.{key}", value
        yield from _references(f"{field}.{key}", value)


def _with_models(section: Any, model_of: ModelOf) -> Any:
    """The section with what `model_of` finds in the place of every model that is a mapping."""
    if not isinstance(section, Mapping):
        return section
    return {
        key: model_of(value)
        if key == "model" and isinstance(value, Mapping)
        else _with_models(value, model_of)
        for key, value in section.items()
    }


def _models(data: Mapping[str, Any], model_of: ModelOf) -> dict[str, Any]:
    """The sections that name models, with those that `model_of` finds."""
    return {key: _with_models(data[key], model_of) for key in MODELS if key in data}


def _insert_placeholder(model: Mapping[str, Any]) -> Any:
    """A mark for the model of a stage, the settings of one from scratch as they are."""
    return f"{MARK}{model['stage']}" if "stage" in model else model


def _restore_references(section: Any) -> Any:
    """The section with `{stage: NAME}` again for every mark."""
    if isinstance(section, str) and section.startswith(MARK):
        return {"stage": section.removeprefix(MARK)}
    return (
        {key: _restore_references(value) for key, value in section.items()}
        if isinstance(section, Mapping)
        else section
    )


def folder_of(number: int, name: str) -> str:
    """The folder of a stage among those of the others, such as `02-math_expert`."""
    return f"{number:02}-{name}"


def omit_keys(data: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """The mapping without some of its keys."""
    return {key: value for key, value in data.items() if key not in keys}
