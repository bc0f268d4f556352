"""Read a file with `stages:` into a pipeline, and report all mistakes at once.

All stages share the sections next to `stages`. A stage is a complete recipe: an ordinary run in its
own folder. Its final student is exported as a model folder for the stages after it.
`practicum.runs.pipeline` runs a pipeline; reading one loads no model library.
"""

import copy
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from practicum.core.calls import suggest_name
from practicum.errors import RecipeError
from practicum.models.config import MergeConfig, NewModelConfig
from practicum.recipe import (
    SECTIONS,
    WORDS,
    Recipe,
    TeacherSwitch,
    build_control,
    describe_control,
    explain_no_control,
    fill_setting,
    find_recipe,
    is_named,
    load_recipe,
    merge_recipes,
    override_all,
    parse_recipe,
    read_recipe,
    remove_switch,
    resolve_recipe,
    validate_fields,
)
from practicum.types import FrozenConfig

log = logging.getLogger(__name__)

BASE = "base"
"""The name of the recipe's own student, from which a stage may start and which may teach."""

START = "start"
"""The name that stands for the stage before, or for the stage named by `start`."""

PIPELINE_KEYS = ("name", *WORDS)
"""The keys that describe the pipeline itself; no stage inherits them."""

MODELS = ("student", "teacher", "reference", "scorers", "notes", "task", "train", "rollout")
"""The sections of a recipe that name models."""

PLACEHOLDER = "stage:"
"""The prefix of a stage's model while no run folder is known; no folder or hub name has it."""

ResolveModel = Callable[[Mapping[str, Any]], Any]
"""Resolve a model that is a mapping: `{stage: NAME}`, or the settings of a from-scratch model."""

STAGE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,59}")


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: `start` provides its initial student; `data` is its recipe.

    `start` is the name of a stage, a merge of several, or `{model: ...}`: a new model. Models in `data` may be `{stage: NAME}`.
    """

    number: int
    name: str
    start: str | Mapping[str, Any]
    data: Mapping[str, Any]

    @property
    def origin(self) -> str:
        """Return in words where the initial student is from."""
        if isinstance(self.start, str):
            return self.start
        if "model" in self.start:
            return "a new model"
        config = MergeConfig.model_validate(self.start)
        return f"{config.method} of {', '.join(config.merge)}"

    @property
    def folder(self) -> str:
        """Return the stage's folder name, such as `02-math_expert`."""
        return name_folder(self.number, self.name)

    def build_recipe(self, resolve_model: ResolveModel) -> Recipe:
        """Return the stage's recipe, with `resolve_model` applied to models that are mappings."""
        data = {**_replace_models(self.data, resolve_model), "name": self.folder}
        return parse_recipe(data, self.name)

    def resolve(self) -> dict[str, Any]:
        """Return the stage with all defaults, as JSON data for a pipeline."""
        recipe = resolve_recipe(self.build_recipe(_insert_placeholder))
        del recipe["student"]["model"]
        models = {key: _restore_references(recipe[key]) for key in MODELS if key in recipe}
        return {"name": self.name, "start": self.start, **drop_keys(recipe, "name"), **models}


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages in order; `recipe` is the first one's, with the pipeline's name, student and task."""

    recipe: Recipe
    stages: tuple[Stage, ...]
    shares_task: bool

    def build_recipes(self) -> dict[str, Recipe]:
        """Return each stage's recipe by name, with placeholders for the models of other stages."""
        return {stage.name: stage.build_recipe(_insert_placeholder) for stage in self.stages}

    def build_first_recipes(self) -> dict[str, Recipe]:
        """Return the same with the first model of each stage's student.

        The stage trains a model of its size, with its tokenizer.
        """
        recipes, models = self.build_recipes(), {BASE: self.recipe.student.model}
        for stage in self.stages:
            student = recipes[stage.name].student
            if isinstance(stage.start, str):
                models[stage.name] = models[stage.start]
            else:
                # The members of a merge have one size.
                merge = stage.start.get("merge")
                models[stage.name] = models[merge[0]] if merge else student.model
            update = {"student": student.model_copy(update={"model": models[stage.name]})}
            recipes[stage.name] = recipes[stage.name].model_copy(update=update)
        return recipes

    def resolve(self) -> dict[str, Any]:
        """Return the pipeline with all defaults as JSON data, which reads back to the same."""
        shared = {*PIPELINE_KEYS, "seed", "base_dir", "student"}
        if self.shares_task:
            shared.add("task")
        recipe = resolve_recipe(self.recipe)
        sections = {key: section for key, section in recipe.items() if key in shared}
        stages = [stage.resolve() for stage in self.stages]
        for stage in stages:
            # The folder of a stage's own task, if it has one; other stages inherit the folder.
            if stage["base_dir"] == sections["base_dir"]:
                del stage["base_dir"]
        return {**sections, "stages": stages}


def load_pipeline_or_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Recipe | Pipeline:
    """Read a recipe or a pipeline from a file or by its packaged name.

    An override such as `train.steps=4` goes to every stage of a pipeline,
    `stages.NAME.train.steps=4` to one stage, and `teacher=off` to the stages that join a reward and
    a teacher. Raises RecipeError with every problem.
    """
    path = find_recipe(source)
    data = read_recipe(path, remove_switch(overrides)[0])
    if "stages" not in data:
        return load_recipe(source, overrides)
    data.setdefault("name", path.stem)
    return parse_pipeline(data, str(source), overrides)


def parse_pipeline(
    content: Mapping[str, Any], source: str, overrides: Sequence[str] = ()
) -> Pipeline:
    """Validate a pipeline; raises RecipeError with a line per problem, naming stage and field."""
    overrides, switch = remove_switch(overrides)
    entries = content["stages"]
    is_list = isinstance(entries, list) and all(isinstance(entry, Mapping) for entry in entries)
    if not is_list or not entries:
        raise RecipeError(
            f"{source}: stages: must be a list of stages, each a mapping with a `name`"
        )
    names = [str(entry.get("name")) for entry in entries]
    _check_overrides(overrides, names)
    general = [text for text in overrides if not text.startswith("stages.")]
    # Stages share overrides, so each note about an override is logged once.
    notes: dict[str, None] = {}
    common = _apply_overrides(drop_keys(content, "stages"), general, notes)
    shared = drop_keys(common, *PIPELINE_KEYS)
    stages = tuple(
        _build_stage(index, content, names, overrides, notes) for index in range(len(names))
    )
    # The pipeline's own recipe is checked as the first stage with the shared student and task, so
    # mistakes in sections that no stage inherits are also found.
    first = drop_keys(stages[0].data, *PIPELINE_KEYS, "student")
    keys = ("student", "task", "base_dir", *PIPELINE_KEYS)
    recipe = {**first, **{key: common[key] for key in keys if key in common}}
    problems = [
        line for line in _list_problems(recipe) if _get_section(line) in (*PIPELINE_KEYS, "student")
    ]
    problems += [
        f"{field}: a pipeline cannot start from the student of a stage; name a model"
        for field, _ in _find_references("student", recipe.get("student"))
    ]
    for stage, entry in zip(stages, entries, strict=True):
        where = f"stages[{stage.number - 1}] ({stage.name})."
        problems += [where + line for line in _list_stage_problems(stage, entry, names)]
        for line in _list_problems({**stage.data, "name": "stage"}):
            if line.startswith("student.model") and not isinstance(stage.start, str):
                continue  # it is a line of `start` too
            # A mistake in a shared section would be reported once per stage; without the name of the
            # stage these lines are the same, and only one of them is kept.
            is_shared = _is_shared(_get_section(line), stage, shared)
            problems.append(line if is_shared else where + line)
    if problems:
        raise RecipeError([f"{source}: {line}" for line in dict.fromkeys(problems)])
    for note in notes:
        log.info(f"{source}: {note}")
    parsed = parse_recipe(_replace_models(recipe, _insert_placeholder), source)
    pipeline = Pipeline(parsed, stages, shares_task="task" in content)
    if switch is not None:
        return _turn_teacher_off(pipeline, source, switch, has_name=is_named(overrides))
    return pipeline


def _turn_teacher_off(
    pipeline: Pipeline, source: str, switch: TeacherSwitch, *, has_name: bool
) -> Pipeline:
    """Replace each stage with its control if it has one; raises RecipeError if no stage has one."""
    controls = {
        name: build_control(recipe, switch.unlikely)
        for name, recipe in pipeline.build_recipes().items()
    }
    changed = {
        name: resolve_recipe(control) for name, control in controls.items() if control is not None
    }
    if not changed:
        raise explain_no_control(source, switch.unlikely)
    content = pipeline.resolve()
    stages = []
    for stage in content["stages"]:
        control = changed.get(stage["name"])
        if control is not None:
            stage = {**stage, **{key: control[key] for key in ("about", *SECTIONS)}}
        stages.append(stage)
    words = describe_control(content, is_free=switch.unlikely is not None)
    if has_name:
        words = drop_keys(words, "name")
    return parse_pipeline({**content, **words, "stages": stages}, source)


def _check_overrides(overrides: Sequence[str], names: Sequence[str]) -> None:
    """Raise RecipeError if an override is for a stage that does not exist."""
    for text in overrides:
        first, _, path = text.partition("=")[0].partition(".")
        name, _, key = path.partition(".")
        if first == "stages" and not key:
            raise RecipeError(
                f"override {text!r} names no key of a stage; use for example "
                f"stages.{names[0]}.train.steps=4"
            )
        if first == "stages" and name not in names:
            raise RecipeError(
                f"override {text!r}: no stage named {name!r}; {suggest_name(name, names)}"
            )


def _apply_overrides(
    section: Mapping[str, Any], overrides: Sequence[str], notes: dict[str, None]
) -> dict[str, Any]:
    """Return a copy with the overrides applied, and add the notes about them."""
    changed = copy.deepcopy(dict(section))
    notes |= dict.fromkeys(override_all(changed, overrides))
    return changed


def _build_stage(
    index: int,
    pipeline: Mapping[str, Any],
    names: Sequence[str],
    overrides: Sequence[str],
    notes: dict[str, None],
) -> Stage:
    """Build a stage from the shared sections, its own sections, and the overrides of both."""
    name, prefix = names[index], f"stages.{names[index]}."
    shared = [text for text in overrides if not text.startswith("stages.")]
    general = [text for text in shared if not _is_pipeline_override(text)]
    special = [text.removeprefix(prefix) for text in overrides if text.startswith(prefix)]
    inherited = drop_keys(pipeline, "stages", *PIPELINE_KEYS)
    entry = pipeline["stages"][index]
    # `teacher.model=...` is for the shared teacher, not for a stage's teacher of another type.
    general = [text for text in general if not _is_replaced(text.split(".")[0], inherited, entry)]
    merged = merge_recipes(inherited, entry)
    stage = fill_setting(_apply_overrides(merged, general + special, notes))
    start = stage.pop("start", None) or (names[index - 1] if index else BASE)
    start = start if isinstance(start, Mapping) else str(start)
    base, student = pipeline.get("student"), stage.get("student")
    # A stage that inherits the pipeline's student starts from the student of an earlier stage; one
    # that names a model itself is reported as a problem later.
    if (
        isinstance(student, Mapping)
        and isinstance(base, Mapping)
        and student.get("model") == base.get("model")
    ):
        stage["student"] = {**student, "model": _build_start(start)}

    def name_start(model: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"stage": start} if model == {"stage": START} and isinstance(start, str) else model

    return Stage(index + 1, name, start, _replace_models(stage, name_start))


def _build_start(start: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
    """Return the model that a stage starts from."""
    return {"stage": start} if isinstance(start, str) else start.get("model", start)


def _is_replaced(section: str, inherited: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    """Return True if a stage replaces a shared part by one of another type."""
    types = [
        part.get("type") if isinstance(part, Mapping) else None
        for part in (inherited.get(section), entry.get(section))
    ]
    return None not in types and types[0] != types[1]


def _is_pipeline_override(text: str) -> bool:
    """Return True if an override is for the pipeline itself or for its base student."""
    key = text.partition("=")[0]
    return key in (*PIPELINE_KEYS, "base_dir") or f"{key}.".startswith("student.model.")


def _list_stage_problems(
    stage: Stage, entry: Mapping[str, Any], names: Sequence[str]
) -> Iterator[str]:
    """Yield the problems of a stage that an ordinary recipe cannot have."""
    student, name = stage.data.get("student"), entry.get("name")
    if not isinstance(name, str) or not STAGE_NAME.fullmatch(name) or name in (BASE, START):
        yield (
            f"name: {name!r} cannot name a stage; use letters, digits, '_' and '-', "
            "at most 60, not 'base' or 'start'"
        )
    if stage.name in names[: stage.number - 1]:
        yield f"name: an earlier stage already has the name {stage.name!r}; names must be unique"
    if isinstance(student, Mapping) and student.get("model") != _build_start(stage.start):
        yield (
            "student.model: `start` selects the student of a stage; set the first model in the "
            "shared sections next to `stages`, or another model with start: {model: ...}"
        )
    yield from _list_start_problems(stage, names)
    for role in MODELS[1:]:
        for field, model in _find_references(role, stage.data.get(role)):
            if set(model) != {"stage"}:
                yield f"{field}: the model of a stage is written {{stage: NAME}} and nothing more"
            # These keys read what a run wrote, and the pipeline's first student has no run.
            if model["stage"] == BASE and field.endswith((".run.model", ".begin.model")):
                earlier = ", ".join(names[: stage.number - 1])
                yield f"{field}: 'base' has no run; name an earlier stage: {earlier or 'none'}"
            yield from _check_reference(field, str(model["stage"]), stage, names)


class _MergedStart(FrozenConfig):
    start: MergeConfig


class _NewStart(FrozenConfig):
    start: NewModelConfig


def _list_start_problems(stage: Stage, names: Sequence[str]) -> Iterator[str]:
    if isinstance(stage.start, str):
        yield from _check_reference("start", stage.start, stage, names)
        return
    kind = _NewStart if "model" in stage.start else _MergedStart
    try:
        config = validate_fields(kind, {"start": stage.start}, "").start
    except RecipeError as error:
        # A text and a mapping can both be a model; the last line is about the mapping.
        problems = error.problems[-1:] if kind is _NewStart else error.problems
        yield from (problem.removeprefix(": ") for problem in problems)
        return
    if isinstance(config, NewModelConfig):
        return
    for name in config.merge:
        yield from _check_reference("start.merge", name, stage, names)
    yield from _check_reference("start.base", config.base, stage, names)


def _check_reference(field: str, name: str, stage: Stage, names: Sequence[str]) -> Iterator[str]:
    """Yield a line if `name` is neither the base nor an earlier stage."""
    earlier = (BASE, *names[: stage.number - 1])
    if name in earlier:
        return
    if name in names:
        which = "this stage itself" if name == stage.name else "a later stage"
        yield f"{field}: {name!r} is {which}; name an earlier one: {', '.join(earlier)}"
    else:
        yield f"{field}: no stage named {name!r}; {suggest_name(name, earlier)}"


def _is_shared(section: str, stage: Stage, shared: Mapping[str, Any]) -> bool:
    """Return True if a stage uses a shared section unchanged, so that its mistakes are also shared."""
    of_stage, of_pipeline = stage.data.get(section), shared.get(section)
    if section == "student":
        return drop_keys(of_stage or {}, "model") == drop_keys(of_pipeline or {}, "model")
    return section in shared and of_stage == of_pipeline


def _list_problems(recipe: Mapping[str, Any]) -> list[str]:
    """Return the problems of a recipe, each beginning with its field."""
    try:
        parse_recipe(_replace_models(recipe, _insert_placeholder), "")
    except RecipeError as error:
        return [problem.removeprefix(": ") for problem in error.problems]
    return []


def _get_section(line: str) -> str:
    """Return the section of a recipe that a problem is about."""
    return re.split(r"[.:\[]", line, maxsplit=1)[0]


def _find_references(field: str, section: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every `model: {stage: NAME}` of a section, with its dotted name."""
    for key, entry in section.items() if isinstance(section, Mapping) else ():
        if key == "model" and isinstance(entry, Mapping) and "stage" in entry:
            yield f"{field}.{key}", entry
        yield from _find_references(f"{field}.{key}", entry)


def _replace_models(recipe: Mapping[str, Any], resolve_model: ResolveModel) -> dict[str, Any]:
    """Return a recipe with `resolve_model` applied to every model that is a mapping."""
    models = {key: _replace_in(recipe[key], resolve_model) for key in MODELS if key in recipe}
    return {**recipe, **models}


def _replace_in(section: Any, resolve_model: ResolveModel) -> Any:
    if not isinstance(section, Mapping):
        return section
    return {
        key: resolve_model(entry)
        if key == "model" and isinstance(entry, Mapping)
        else _replace_in(entry, resolve_model)
        for key, entry in section.items()
    }


def _insert_placeholder(model: Mapping[str, Any]) -> Any:
    """Return a placeholder for the model of stages, and the settings of a from-scratch model."""
    if "merge" in model:
        return f"{PLACEHOLDER}merge"
    return f"{PLACEHOLDER}{model['stage']}" if "stage" in model else model


def _restore_references(section: Any) -> Any:
    """Return a section with `{stage: NAME}` in place of each placeholder."""
    if isinstance(section, str) and section.startswith(PLACEHOLDER):
        return {"stage": section.removeprefix(PLACEHOLDER)}
    if isinstance(section, Mapping):
        return {key: _restore_references(entry) for key, entry in section.items()}
    return section


def name_folder(number: int, name: str) -> str:
    """Return the folder name of a stage, such as `02-math_expert`."""
    return f"{number:02}-{name}"


def drop_keys(mapping: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return the mapping without some of its keys."""
    return {key: entry for key, entry in mapping.items() if key not in keys}
