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

from practicum.errors import CapabilityError, RecipeError
from practicum.model_config import StudentConfig
from practicum.objective import Objective, TopK
from practicum.objective.calls import did_you_mean
from practicum.plugins import Plugin, module_of
from practicum.ports import AdamParams, Capabilities
from practicum.types import SamplingParams

LARGEST_RECIPE = 1 << 20
LONGEST_REASON = 400
RUN_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,79}$"


Decay = Annotated[float, Field(ge=0, lt=1)]


class RolloutConfig(BaseModel):
    """Whose tokens are learned from, and how they are drawn."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    source: Literal["student"] = "student"
    n: int = Field(default=1, ge=1, description="completions of each prompt")
    max_new_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)

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


class TrainConfig(BaseModel):
    """How long, how much at once, how often saved."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    steps: int = Field(ge=1)
    prompts_per_step: int = Field(default=16, ge=1)
    checkpoint_every: int | None = Field(default=None, ge=1, description="steps; the last step is always saved")
    keep_checkpoints: int = Field(default=2, ge=1)
    micro_batch_tokens: int = Field(default=4096, ge=1, description="padded tokens whose graph is held at once")
    chunk_tokens: int = Field(default=256, ge=1, description="tokens whose [., V] log-probabilities are held at once")
    sampling_batch: int = Field(default=64, ge=1, description="completions decoded or scored together")
    threads: int | None = Field(default=None, ge=1, description="torch threads; none: torch's own choice")


class EvaluationConfig(BaseModel):
    """What is measured on held-out prompts before and after."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    prompts: int = Field(default=64, ge=0, description="at most this many held-out prompts; 0: no evaluation")
    samples: int = Field(default=1, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    max_new_tokens: int | None = Field(default=None, ge=1, description="none: as in rollout")
    teacher: bool = Field(default=True, description="also let the teacher answer, in its own context")


class Recipe(BaseModel):
    """A whole run. Unknown keys are errors; every default is a vetted value."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = Field(
        default="run", pattern=RUN_NAME, description="the run folder's name; the recipe file's by default"
    )
    about: str = ""
    paper: str | None = None
    seed: int = Field(default=0, ge=0)
    base_dir: str = Field(default=".", description="where relative paths start; set to the recipe's folder when read")
    student: StudentConfig
    teacher: Plugin("teachers")  # type: ignore[valid-type]
    task: Plugin("tasks")  # type: ignore[valid-type]
    rollout: RolloutConfig = RolloutConfig()
    objective: Objective = Objective()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    prompt_tokens: int = Field(default=2048, ge=1, description="longer prompts are rejected, and counted")

    @model_validator(mode="after")
    def _teacher_can(self) -> "Recipe":
        problems = capability_problems(self.objective, self.teacher.capabilities(), self.teacher.type)
        if problems:
            raise ValueError("; ".join(problems))
        return self


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a file or by its packaged name, with `key.sub=value` overrides.

    Raises RecipeError with every problem found.
    """
    path = find_recipe(source)
    data = read_yaml(path)
    for role in ("student", "teacher"):
        _anchor_models(data.get(role), path.parent.resolve())
    for text in overrides:
        override(data, text)
    data.setdefault("base_dir", str(path.parent.resolve()))
    data.setdefault("name", path.stem)
    return parse_recipe(data, str(source))


def _anchor_models(section: Any, folder: Path) -> None:
    """Let relative model folders start at the recipe's folder, as its other paths do."""
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
        return Recipe.model_validate(dict(data))
    except ValidationError as error:
        kind = CapabilityError if all(not entry["loc"] for entry in error.errors()) else RecipeError
        raise kind([f"{source}: {_line(entry, data)}" for entry in error.errors(include_url=False)]) from None


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
    """The packaged recipes, as `practicum run` takes them."""
    folder = packaged_recipes()
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))


def resolved(recipe: Recipe) -> dict[str, Any]:
    """The recipe with every default filled in, as JSON data that reads back to the same recipe."""
    return json.loads(recipe.model_dump_json())


def capability_problems(objective: Objective, capabilities: Capabilities, teacher: str) -> list[str]:
    """What the objective asks of a teacher that cannot give it, each with what it can."""
    can = ", ".join(sorted(capabilities.signals))
    problems = []
    for number, term in enumerate(objective.losses):
        where = f"objective.losses[{number}].signal"
        signal = term.signal
        if signal.type not in capabilities.signals:
            problems.append(f"{where}: teacher {teacher!r} cannot give signal {signal.type!r}; it can give: {can}")
        elif isinstance(signal, TopK) and signal.support not in capabilities.supports:
            supports = ", ".join(sorted(capabilities.supports))
            problems.append(f"{where}: teacher {teacher!r} cannot score support {signal.support!r}; it can: {supports}")
        elif isinstance(signal, TopK) and capabilities.largest_k is not None and signal.k > capabilities.largest_k:
            problems.append(f"{where}: teacher {teacher!r} answers at most k={capabilities.largest_k}, not {signal.k}")
    return problems


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
    for name in parents:
        if not isinstance(place.get(name), dict):
            place[name] = {}
        place = place[name]
    try:
        place[last] = yaml.load(value, _StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        place[last] = value


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
