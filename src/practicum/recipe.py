"""The recipe: the whole run as typed data, read from YAML with every mistake reported at once."""

import importlib.resources
import json
import os
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from practicum.diagnosis.monitors import MonitorsSection, number_at
from practicum.errors import CapabilityError, RecipeError
from practicum.model_config import StudentConfig
from practicum.objective import Draws, Full, Objective, Sampled, Term, TopK
from practicum.objective.calls import did_you_mean
from practicum.plugins import Plugin, module_of
from practicum.ports import AdamParams, Capabilities
from practicum.rollouts import Prefix, SourceChoice, StudentSource, source_problems
from practicum.schedule import SCHEDULED, Adaptive, Schedule, planned, put_in, taken_out
from practicum.types import SamplingParams

LARGEST_RECIPE = 1 << 20
LONGEST_REASON = 400
DEEPEST_EXTENDS = 8
RUN_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,79}$"


Decay = Annotated[float, Field(ge=0, lt=1)]


class RolloutConfig(BaseModel):
    """Whose tokens are learned from, and how they are drawn."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    source: SourceChoice = StudentSource()
    replay_size: int = Field(default=1000, ge=1, description="rollouts that `mix(other=replay)` chooses from")
    n: int = Field(default=1, ge=1, description="completions of each prompt")
    max_new_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _leaves_room(self) -> "RolloutConfig":
        if isinstance(self.source, Prefix) and self.source.length >= self.max_new_tokens:
            raise ValueError(
                f"a prefix of {self.source.length} tokens leaves the student none of its max_new_tokens, "
                f"{self.max_new_tokens}; write a shorter one, or raise max_new_tokens"
            )
        return self

    def sampling(self, stop_ids: frozenset[int]) -> SamplingParams:
        """These numbers with the student's stop tokens."""
        return SamplingParams(self.max_new_tokens, self.temperature, self.top_p, self.top_k, stop_ids)


class OptimizerConfig(BaseModel):
    """AdamW and the course of its learning rate."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    learning_rate: float = Field(default=1e-5, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)

    def adam(self, step: int, steps: int) -> AdamParams:
        """The parameters of one step, counted from 1."""
        return AdamParams(
            learning_rate=self.learning_rate * self._factor(step, steps),
            betas=self.betas,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )

    def _factor(self, step: int, steps: int) -> float:
        import math

        if step <= self.warmup_steps:
            return step / self.warmup_steps
        progress = (step - self.warmup_steps - 1) / max(steps - self.warmup_steps, 1)
        if self.schedule == "linear":
            return 1.0 - progress
        return 0.5 * (1.0 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1.0


class Budget(BaseModel):
    """What a run may spend: it ends at the first step that reaches any of these."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    flops: float | None = Field(default=None, gt=0, description="operations of all phases: see [plan](plan.md)")
    tokens: float | None = Field(default=None, gt=0, description="tokens learned from")
    seconds: float | None = Field(default=None, gt=0, description="of the steps alone; the one that a clock decides")

    def reached(self, flops: float, tokens: float, seconds: float) -> str | None:
        """The name of the first that is spent, or None."""
        spent = {"flops": flops, "tokens": tokens, "seconds": seconds}
        limits = {name: limit for name, limit in self if limit is not None}
        return next((name for name, limit in limits.items() if spent[name] >= limit), None)


class Prices(BaseModel):
    """What things cost, for the end of a run and its report; nothing is priced unless it is written here."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    currency: str = Field(default="USD", max_length=12)
    machine_hour: float | None = Field(default=None, ge=0, description="an hour of the machine that trains")
    million_sampled_tokens: float | None = Field(default=None, ge=0, description="a million tokens that teachers write")
    million_scored_tokens: float | None = Field(
        default=None, ge=0, description="a million tokens that teachers read to score, prompts included"
    )

    def money(self, cost: Mapping[str, Any], seconds: float) -> dict[str, float]:
        """What a run's `cost` (see `practicum.costs.cost_summary`) and its seconds come to, item by item."""
        sampled = cost["sample"]["teacher_tokens"] / 1e6
        scored = (cost["score"]["tokens"] + cost["score"]["prompt_tokens"]) / 1e6
        items = {
            "machine": (self.machine_hour, seconds / 3600),
            "sampled tokens": (self.million_sampled_tokens, sampled),
            "scored tokens": (self.million_scored_tokens, scored),
        }
        return {name: price * amount for name, (price, amount) in items.items() if price is not None}


class TrainConfig(BaseModel):
    """How long, how much at once, how often saved."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    steps: int = Field(ge=1)
    prompts_per_step: int = Field(default=16, ge=1)
    updates_per_step: int = Field(default=1, ge=1, description="optimizer steps that a step's rollouts are split into")
    checkpoint_every: int | None = Field(default=None, ge=1, description="steps; the last step is always saved")
    keep_checkpoints: int = Field(default=2, ge=1)
    micro_batch_tokens: int | None = Field(
        default=None, ge=1, description="tokens that go through the student together; none: as many as graph_mib holds"
    )
    graph_mib: int = Field(
        default=1024,
        ge=1,
        description="memory for what a backward pass keeps; layers are recomputed if one text needs more",
    )
    chunk_tokens: int = Field(default=128, ge=1, description="tokens whose [., V] log-probabilities are held at once")
    sampling_batch: int = Field(default=64, ge=1, description="completions decoded at once")
    threads: int | None = Field(default=None, ge=1, description="torch threads; none: torch's own choice")
    budget: Budget | None = Field(default=None, description="ends the run before `steps` are done")


class EvaluationConfig(BaseModel):
    """What is measured on held-out prompts before and after."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    prompts: int = Field(default=64, ge=0, description="at most this many held-out prompts; 0: no evaluation")
    samples: int = Field(default=1, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    max_new_tokens: int | None = Field(default=None, ge=1, description="none: as in rollout")
    teacher: bool = Field(default=True, description="also let the teacher answer, in its own context")
    every: int | None = Field(
        default=None, ge=1, description="steps between evaluations while training; none: no others"
    )


class Recipe(BaseModel):
    """A whole run. Unknown keys are errors; every default is a vetted value."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = Field(
        default="run", pattern=RUN_NAME, description="the run folder's name; the recipe file's by default"
    )
    about: str = ""
    paper: str | None = Field(default=None, description="the arXiv number or the address of what it reproduces")
    claim: str | None = Field(default=None, description="what the paper reports, and in which setting")
    differs: str | None = Field(default=None, description="what this reproduction leaves out or does otherwise")
    slot: str | None = Field(default=None, description="its place in a pipeline, such as cold_start or consolidation")
    seed: int = Field(default=0, ge=0)
    base_dir: str = Field(default=".", description="where relative paths start; set to the recipe's folder when read")
    student: StudentConfig
    teacher: Plugin("teachers") = Field(default_factory=lambda: module_of("teachers", "none").Config())  # type: ignore[valid-type]
    reference: Plugin("teachers") | None = Field(  # type: ignore[valid-type]
        default=None, description="a second teacher, for terms with `against: reference` and targets that name it"
    )
    task: Plugin("tasks")  # type: ignore[valid-type]
    rollout: RolloutConfig = RolloutConfig()
    objective: Objective = Objective()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    monitors: MonitorsSection = Field(
        default={}, description="what is done differently about a monitor, by its id: see [monitors](monitors.md)"
    )
    tracking: Plugin("trackers") | None = Field(  # type: ignore[valid-type]
        default=None, description="a service that metrics go to besides the run folder"
    )
    prices: Prices | None = Field(default=None, description="what things cost, to show money beside the rest")
    prompt_tokens: int = Field(default=2048, ge=1, description="longer prompts are rejected, and counted")
    schedules: dict[str, Schedule] = Field(
        default={}, description="numbers that change from step to step, by their place; written there as `linear(1, 0)`"
    )

    @model_validator(mode="after")
    def _possible(self) -> "Recipe":
        problems = capability_problems(self.objective, self.teacher.capabilities(), self.teacher.type)
        if self.reference is not None:
            capabilities = self.reference.capabilities()
            problems += capability_problems(self.objective, capabilities, self.reference.type, "reference")
        elif self.objective.reference_signal is not None:
            problems.append(
                "objective: a term asks the reference and there is none; write reference: {type: self, weights: frozen} for the "
                "student as it began, or another teacher"
            )
        problems += source_problems(self.rollout.source, self.teacher.capabilities(), self.teacher.type)
        problem = truncation_problem(self.objective, self.rollout)
        if problems or problem:
            raise ValueError("; ".join([*problems, *([problem] if problem else [])]))
        return self

    @property
    def longest_answer(self) -> int:
        """The largest number of new tokens that a rollout or an evaluation may have at any step."""
        schedule = self.schedules.get("rollout.max_new_tokens")
        numbers = [] if schedule is None else [planned(schedule, step, self.train.steps) for step in self._steps]
        return max(self.rollout.max_new_tokens, self.evaluation.max_new_tokens or 0, *map(round, numbers))

    @property
    def _steps(self) -> range:
        return range(1, self.train.steps + 1)

    def at(self, numbers: Mapping[str, float]) -> "Recipe":
        """The recipe with some of its numbers set; RecipeError where that makes it impossible."""
        if not numbers:
            return self
        data = resolved(self)
        put_in(data, numbers)
        return _validated(data, self.name)


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a file or by its packaged name, with `key.sub=value` overrides.

    Raises RecipeError with every problem found.
    """
    path = find_recipe(source)
    data = read_recipe(path)
    if "stages" in data:
        raise RecipeError(
            f"{source}: a pipeline, since it has stages; run it with practicum.run, or read it with pipeline.load"
        )
    for text in overrides:
        override(data, whole_path(text, data))
    data.setdefault("name", path.stem)
    return parse_recipe(data, str(source))


def whole_path(text: str, data: Mapping[str, Any]) -> str:
    """An override with the place of a key that only a term has: `divergence=jsd(0.3)` is `objective.divergence=...`."""
    first = text.partition("=")[0].partition(".")[0]
    if first in Recipe.model_fields or first not in {*Term.model_fields, *Objective.model_fields}:
        return text
    losses = data.get("objective", {}).get("losses") if isinstance(data.get("objective"), dict) else None
    if losses is None or first in Objective.model_fields:
        return f"objective.{text}"
    if len(losses) > 1:
        raise RecipeError(
            f"override {text!r}: the objective has {len(losses)} terms; write objective.losses.0.{text} for the first"
        )
    return f"objective.losses.0.{text}"


def read_recipe(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The data of a recipe file, merged over the recipe that it `extends`.

    Relative paths start at the folder of the file that has the task.
    """
    data, folder = read_yaml(path), path.parent.resolve()
    for role in ("student", "teacher", "reference", "stages"):
        _anchor_models(data.get(role), folder)
    if "task" in data:
        data.setdefault("base_dir", str(folder))
    parent = data.pop("extends", None)
    if parent is not None:
        file = folder / str(parent)
        if not file.is_file():
            raise RecipeError(f"{path}: extends {str(parent)!r}, and there is no such file; it is relative to {folder}")
        if file in above or len(above) > DEEPEST_EXTENDS:
            raise RecipeError(f"{path}: extends {str(parent)!r}, which extends this one again")
        data = merged(read_recipe(file, (*above, path.resolve())), data)
    data.setdefault("base_dir", str(folder))
    return data


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`: mappings merge, anything else replaces, and so does a mapping of another `type`."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping) and _same_type(below, value):
            result[key] = merged(below, value)
        else:
            result[key] = value
    return result


def _same_type(below: Mapping[str, Any], over: Mapping[str, Any]) -> bool:
    if {"losses", "stage"} & (below.keys() | over.keys()):  # `model: {stage: NAME}` is whole
        return False
    return over.get("type", below.get("type")) == below.get("type")


def _anchor_models(section: Any, folder: Path) -> None:
    """Let relative model folders start at the recipe's folder, as its other paths do."""
    for inner in section if isinstance(section, list) else ():
        _anchor_models(inner, folder)
    if not isinstance(section, dict):
        return
    model = section.get("model")
    if isinstance(model, str) and (folder / model).is_dir():
        section["model"] = str(folder / model)
    for inner in section.values():
        _anchor_models(inner, folder)


def parse_recipe(data: Mapping[str, Any], source: str) -> Recipe:
    """Validate a recipe's data; RecipeError with one line a problem, each naming its field."""
    try:
        plain, schedules = taken_out(_with_losses(data))
    except ValueError as error:
        raise RecipeError(f"{source}: {error}") from None
    if schedules:
        plain["schedules"] = {**data.get("schedules", {}), **schedules}
    recipe = _validated(plain, source)
    for step in (1, (1 + recipe.train.steps) // 2, recipe.train.steps):
        _check_schedules(recipe, source, step)
    _check_changes(recipe, source)
    return recipe


def _validated(data: Mapping[str, Any], source: str) -> Recipe:
    try:
        return Recipe.model_validate(dict(data))
    except ValidationError as error:
        kind = CapabilityError if all(not entry["loc"] for entry in error.errors()) else RecipeError
        raise kind([f"{source}: {_line(entry, data)}" for entry in error.errors(include_url=False)]) from None


def _check_schedules(recipe: Recipe, source: str, step: int) -> None:
    """RecipeError where a schedule's number would be impossible at a step, or stands for nothing."""
    for path, schedule in recipe.schedules.items():
        ends = [schedule.end] if isinstance(schedule, Adaptive) else []
        for number in [planned(schedule, step, recipe.train.steps), *ends]:
            try:
                recipe.at({path: number})
            except (KeyError, IndexError, TypeError, AttributeError):
                raise RecipeError(
                    f"{source}: schedules: there is no number at {path!r}; write the schedule in the number's place"
                ) from None


def _check_changes(recipe: Recipe, source: str) -> None:
    """RecipeError where a monitor is to change what is no number, or a number that a schedule moves."""
    data = resolved(recipe)
    for name, settings in recipe.monitors.items():
        for path in settings.set:
            where = f"{source}: monitors.{name}.set: "
            if path in recipe.schedules:
                raise RecipeError(f"{where}{path} has a schedule; let one of the two change it")
            try:
                if path.partition(".")[0] not in SCHEDULED:
                    raise KeyError(path)
                recipe.at({path: number_at(data, path)})
            except (KeyError, IndexError, TypeError, ValueError, AttributeError):
                raise RecipeError(
                    f"{where}there is no number at {path!r}; write a place in {', '.join(SCHEDULED)}, for example "
                    "optimizer.learning_rate"
                ) from None


def _with_losses(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data with the objective's one term in a list, so that its numbers have one place whichever way it is written."""
    objective = data.get("objective")
    if not isinstance(objective, Mapping) or "losses" in objective:
        return dict(data)
    whole = {key: objective[key] for key in ("aggregate", "aggregate_norm") if key in objective}
    term = {key: value for key, value in objective.items() if key not in whole}
    return {**data, "objective": {**({"losses": [term]} if term else {}), **whole}}


def find_recipe(source: str | Path) -> Path:
    """The file of a recipe: a path, or the name of a packaged one such as `quickstart`."""
    if os.path.isfile(source):  # unlike Path.is_file, also False for names that no file can have
        return Path(source)
    name = str(source).removeprefix("recipes/").removesuffix(".yaml")
    if name in recipe_names():
        return packaged_recipes() / f"{name}.yaml"
    raise RecipeError(
        f"no recipe {str(source)[:100]!r}: not a file and not a packaged recipe; {did_you_mean(str(source), recipe_names())}"
    )


def packaged_recipes() -> Path:
    """The folder of the recipes that come with the package (the repository's own in a checkout)."""
    installed = Path(str(importlib.resources.files("practicum"))) / "packaged_recipes"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[2] / "recipes"


def recipe_names() -> list[str]:
    """The packaged recipes, as `practicum run` takes them; those in `base` are there to be extended."""
    folder = packaged_recipes()
    names = sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))
    return [name for name in names if not name.startswith("base/")]


def resolved(recipe: Recipe) -> dict[str, Any]:
    """The recipe with every default filled in, as JSON data that reads back to the same recipe."""
    return json.loads(recipe.model_dump_json())


def capability_problems(
    objective: Objective, capabilities: Capabilities, teacher: str, against: str = "teacher"
) -> list[str]:
    """What the objective asks of a teacher that cannot give it, each with what it can."""
    can = ", ".join(sorted(capabilities.signals))
    problems = []
    for number, term in enumerate(objective.losses):
        where = f"objective.losses[{number}].signal"
        signal = Full() if isinstance(term.signal, Draws) else term.signal
        if not term.asks or term.against != against:
            continue
        if not can:
            problems.append(
                f"{where}: {term.signal.type!r} asks a teacher and there is none; write teacher: ..., or a signal that asks "
                "nobody: score for the verifier's reward, text for the rollout's own tokens"
            )
        elif signal.type not in capabilities.signals:
            problems.append(f"{where}: {against} {teacher!r} cannot give signal {signal.type!r}; it can give: {can}")
        elif isinstance(signal, TopK) and signal.support not in capabilities.supports:
            supports = ", ".join(sorted(capabilities.supports))
            problems.append(f"{where}: teacher {teacher!r} cannot score support {signal.support!r}; it can: {supports}")
        elif isinstance(signal, TopK) and capabilities.largest_k is not None and signal.k > capabilities.largest_k:
            most = capabilities.largest_k
            problems.append(
                f"{where}: teacher {teacher!r} answers at most k={most}, not {signal.k}; write topk({most}, support=teacher), or "
                "sampled"
            )
    return problems


def truncation_problem(objective: Objective, rollout: RolloutConfig) -> str | None:
    """Why a sampled token's loss and a truncated sampler do not go together, where a recipe has both."""
    truncated = rollout.top_p < 1.0 or rollout.top_k > 0
    sampled = any(isinstance(term.signal, Sampled) and term.correction.name == "none" for term in objective.losses)
    if not (truncated and sampled):
        return None
    return (
        "rollout.top_p and rollout.top_k cut tokens off that signal 'sampled' can then never learn about; write top_p: 1 and "
        "top_k: 0, signal: full or topk, or a correction such as ratio for what was kept"
    )


class _StrictLoader(yaml.SafeLoader):
    """YAML without the two things that hide mistakes: repeated keys and aliases."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError(
                f"line {self.peek_event().start_mark.line + 1}: aliases (*name) are not read; write the value out"
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {str(key) for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: key {sorted(twice)[0]!r} stands twice")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; RecipeError where it is not one."""
    try:
        if path.stat().st_size > LARGEST_RECIPE:
            raise RecipeError(f"{path}: larger than 1 MiB, so not a recipe")
        data = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read ({error})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: not YAML ({' '.join(str(error).split())[:LONGEST_REASON]})") from error
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise RecipeError(f"{path}: a recipe is a mapping of names such as `student:` and `teacher:`")
    return data


def override(data: dict[str, Any], text: str) -> None:
    """Apply one `key.sub=value` to a recipe's data; RecipeError where it is not one."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise RecipeError(f"override {text!r} is not key=value; write for example train.steps=4")
    *parents, last = key.split(".")
    place = data
    for number, name in enumerate(parents):
        if isinstance(place.get(name), list):
            return _override_item(place[name], [*parents[number + 1 :], last], value, text)
        if not isinstance(place.get(name), dict):
            place[name] = {}
        place = place[name]
    place[last] = _parsed(value)


def _override_item(items: list[Any], path: list[str], value: str, text: str) -> None:
    """Set a value within one item of a list, `objective.losses.0.coefficient=2`."""
    place, *rest = path
    if not place.isdigit() or int(place) >= len(items):
        raise RecipeError(
            f"override {text!r}: the list has {len(items)} items; number one from 0, as in losses.0.coefficient=2"
        )
    if not rest:
        items[int(place)] = _parsed(value)
        return
    inner = items[int(place)]
    if not isinstance(inner, dict):
        raise RecipeError(f"override {text!r}: item {place} has no keys; write the whole item")
    override(inner, f"{'.'.join(rest)}={value}")


def _parsed(value: str) -> Any:
    try:
        return yaml.load(value, _StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return value


def _line(entry: Any, data: Mapping[str, Any]) -> str:
    """One problem as one line: the field, what is wrong, and what to write."""
    field = ".".join(str(part) for part in entry["loc"])
    message = entry["msg"].removeprefix("Value error, ")
    if entry["type"] == "extra_forbidden":
        known = _known_fields(entry["loc"][:-1], data)
        hint = f"; {did_you_mean(str(entry['loc'][-1]), known)}" if known else ""
        return f"{field}: no such key{hint}"
    if entry["type"] == "string_pattern_mismatch":
        return f"{field}: {entry['input']!r} cannot name a folder; write letters, digits, '.', '_' and '-', at most 80"
    if entry["type"] == "missing":
        return f"{field}: missing; write it"
    if entry["type"] in ("value_error", "literal_error") and not field:
        return message
    given = entry["input"]
    shown = (
        f" (given: {given!r})" if isinstance(given, str | int | float | bool) and entry["type"] != "value_error" else ""
    )
    return f"{field}: {message[:1].lower() + message[1:]}{shown}"


def _known_fields(loc: Sequence[int | str], data: Any) -> list[str]:
    """The field names of the model at a place in the recipe."""
    models: list[type[BaseModel]] = [Recipe]
    for part in loc:
        data = data[part] if isinstance(data, Mapping) and part in data else data
        if isinstance(data, Mapping) and part in ("teacher", "task") and "type" in data:
            models = [module_of(f"{part}s", str(data["type"])).Config]
        elif any(model.__name__ == part for model in models):
            models = [model for model in models if model.__name__ == part]
        else:
            annotations = [
                model.model_fields[str(part)].annotation for model in models if str(part) in model.model_fields
            ]
            models = [model for annotation in annotations for model in _models_in(annotation)] or models
    return sorted({name for model in models for name in model.model_fields})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        return [model for part in typing.get_args(annotation) for model in _models_in(part)]
    return []
