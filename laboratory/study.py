"""Define a reproduction: a recipe, arms that change it, and claims that the runs decide.

It is one YAML file with the keys of a recipe and of `Reproduction`. The recipe has `stages` if
models have to be made first.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from laboratory.results import TEACHER, Results
from practicum.core.calls import suggest_name
from practicum.core.plugins import Plugin, load_plugin
from practicum.errors import RecipeError
from practicum.recipe import find_recipe, merge_recipes, read_recipe, validate_fields
from practicum.recipe.layers import merge_layers, read_layers
from practicum.recipe.schema import WORDS
from practicum.runs.console import Console
from practicum.types import FrozenConfig

FOLDER = Path(__file__).parent / "recipes"
"""The folder of the reproductions of this repository."""

Unit = Literal["steps", "flops", "tokens"]
At = Literal["start", "end", "equal_flops"] | int
"""The time of a measurement: before training, after it, at equal FLOPs, or at a step."""


class Better(FrozenConfig):
    """`better` exceeds `than` by at least `by` in a measure; differences are paired by seed."""

    better: str
    than: str
    by: float = Field(default=0.0, ge=0)
    measure: str = "accuracy"
    at: At = Field(default="end", description="start, end, equal_flops, or a step")


class Tie(FrozenConfig):
    """Two arms differ by less than `within`: the interval of the difference is inside that range."""

    tie: tuple[str, str]
    within: float = Field(gt=0)
    measure: str = "accuracy"
    at: At = "end"


class Reaches(FrozenConfig):
    """An arm ends at or above `least`, or at or below `most`."""

    reaches: str
    least: float | None = None
    most: float | None = None
    measure: str = "accuracy"
    at: At = "end"


class Ratio(FrozenConfig):
    """`ratio` over `over` in a measure is at least `least`, or at most `most`."""

    ratio: str
    over: str
    measure: str
    least: float | None = Field(default=None, gt=0)
    most: float | None = Field(default=None, gt=0)


class Rises(FrozenConfig):
    """An arm's accuracy, total or of a domain, rises by at least `by`; below 0 it may fall."""

    rises: str
    by: float = 0.0
    measure: str = "accuracy"


class Cost(FrozenConfig):
    """The ratio of two arms' spending until the accuracy first reaches `level`.

    `cost` divided by `over` is at least `factor`, or at most `most`.
    """

    cost: str
    over: str
    level: float = Field(gt=0, le=1)
    factor: float | None = Field(default=None, gt=0)
    most: float | None = Field(default=None, gt=0)
    unit: Unit = "flops"


class Robust(FrozenConfig):
    """Learning rates within a factor of `within` of an arm's best lose at most `loses` to it."""

    robust: str
    within: float = Field(default=3.0, gt=1)
    loses: float = Field(default=0.1, ge=0)


class Warned(FrozenConfig):
    """The doctor's verdict on an arm's recipe before training."""

    warned: str
    verdict: Literal["GO", "CHANGE-FIRST", "INCONCLUSIVE", "NO-GO"] = "NO-GO"


Test = Better | Tie | Reaches | Ratio | Rises | Cost | Robust | Warned


class Claim(FrozenConfig):
    """A claim of a paper and the tests that decide it; the claim holds if all tests do."""

    claim: str
    paper: str = Field(description="its arXiv number or address")
    theirs: str = Field(description="the paper's number and setting")
    tests: tuple[Test, ...] = Field(min_length=1)
    why: str = Field(default="", description="explanation of the result")
    shown_by: str | None = Field(
        default=None, description="arms that show the explanation; none: it was not tested"
    )


class ReproductionArm(FrozenConfig):
    """One arm: its description, and its changes of the recipe."""

    about: str
    set: dict[str, Any] = Field(default_factory=dict)
    control: str | None = Field(
        default=None,
        pattern=r"^teacher=(off|free(\(.*\))?)$",
        description="`teacher=free(0.1, -1)` or `teacher=off`: the control of this recipe",
    )
    without: tuple[str, ...] = Field(
        default=(), description="stages of a pipeline that the arm leaves out"
    )
    stages: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="changes of stages of a pipeline, by their names"
    )
    learning_rates: tuple[float, ...] | None = Field(
        default=None, description="learning rates instead of the reproduction's"
    )


class ReproductionScale(FrozenConfig):
    """The size of a reproduction: its seeds, its sweep with another seed, changes of all arms."""

    seeds: int = Field(default=3, ge=1)
    sweep: bool = True
    set: dict[str, Any] = Field(default_factory=dict)


class Reproduction(FrozenConfig):
    """The keys of a reproduction, in addition to the keys of its recipe."""

    question: str
    measure: Plugin("laboratory.measures") = Field(  # type: ignore[valid-type]
        default_factory=lambda: load_plugin("laboratory.measures", "runs").Config()
    )
    set: dict[str, Any] = Field(
        default={}, description="changes of the recipe for all arms, but not for its stages"
    )
    arms: dict[Annotated[str, Field(pattern=r"^[a-z0-9_]{1,30}$")], ReproductionArm]
    learning_rates: tuple[float, ...] = Field(
        default=(), description="learning rates to try for every arm; none: the recipe's own"
    )
    aim: str = Field(
        default="accuracy",
        description="measure that chooses the learning rates, and that the plot shows",
    )
    aim_at: Literal["highest", "lowest"] = "highest"
    quick: ReproductionScale = ReproductionScale(seeds=1, sweep=False)
    full: ReproductionScale = ReproductionScale()
    draw_by_seed: bool = Field(
        default=False,
        description="draw the from-scratch models and the task of each run by its seed",
    )
    may_differ: tuple[str, ...] = Field(
        default=(), description="properties that arms need not share, `the training prompts`"
    )
    claims: tuple[Claim, ...] = Field(min_length=1)
    remarks: str = Field(
        default="", description="notes for the reader, such as regimes tried and limits"
    )

    @property
    def tests(self) -> list[Test]:
        """The tests of all claims."""
        return [test for claim in self.claims for test in claim.tests]


class LoadedReproduction(FrozenConfig):
    """A reproduction with its name and its recipe's data, `stages` included."""

    name: str
    file: Path
    recipe: dict[str, Any]
    spec: Reproduction
    draw: int = 0
    """The number of a draw of models and task; draw 0 has the seeds of the file."""

    def redraw(self, draw: int) -> "LoadedReproduction":
        """Return the study with the models and the task of another draw."""
        further = draw - self.draw
        recipe = shift_seeds(self.recipe, further) | {"seed": draw}
        if "stages" in recipe:
            recipe["stages"] = [shift_seeds(stage, further) for stage in recipe["stages"]]
        return self.model_copy(update={"recipe": recipe, "draw": draw})

    def build_recipe(self, arm: str, scale: ReproductionScale) -> dict[str, Any]:
        """Return the data of an arm's recipe; a model may be `{stage: NAME}`."""
        recipe_data = {key: section for key, section in self.recipe.items() if key != "stages"}
        # The scale last: the quick form of an arm that is longer in the full form is short, too.
        for changes in (self.spec.set, self.spec.arms[arm].set, scale.set):
            recipe_data = merge_recipes(recipe_data, shift_seeds(changes, self.draw))
        return recipe_data

    def build_pipeline(self, arm: str, scale: ReproductionScale) -> dict[str, Any]:
        """Return the data of an arm that is a whole pipeline, with its changes of stages."""
        changes = self.spec.arms[arm]
        stages = [
            merge_recipes(stage, changes.stages.get(stage["name"], {}))
            for stage in self.recipe["stages"]
            if stage["name"] not in changes.without
        ]
        return {**self.build_recipe(arm, scale), "stages": stages}

    def digest_design(self, form: str) -> str:
        """Return a digest of the study's keys that change the runs: arms, recipe, stages, rates and measure.

        Descriptions, claims, the number of seeds, code and the rows of data files do not count.
        """
        scale = self.spec.full if form == "full" else self.spec.quick
        arms = {arm: _leave_out_words(self.build_recipe(arm, scale)) for arm in self.spec.arms}
        names = {"arms", "learning_rates", "measure", "aim", "aim_at", "set"}
        names |= {"draw_by_seed"} if self.spec.draw_by_seed else set()
        settings = self.spec.model_dump(mode="json", include=names)
        for arm in settings["arms"].values():
            del arm["about"], arm["set"]
            if not arm["stages"]:
                del arm["stages"]
        stages = [_leave_out_words(stage) for stage in self.recipe.get("stages", ())]
        design = {**settings, "recipes": arms, "stages": stages, "sweep": scale.sweep}
        return hashlib.sha256(json.dumps(design, sort_keys=True).encode()).hexdigest()[:16]


DRAW = 1000
"""The distance of the seeds of two draws; the seeds in a file are smaller."""


def shift_seeds(section: Any, draw: int) -> Any:
    """Return a part of a recipe with the seeds of another draw, for its from-scratch models and its task.

    Other seeds stay: the run's own is set by the comparison.
    """
    if not isinstance(section, Mapping):
        return section
    shifted = {key: shift_seeds(inner, draw) for key, inner in section.items()}
    for key in ("model", "task"):
        part = shifted.get(key)
        if isinstance(part, Mapping) and isinstance(part.get("seed"), int):
            shifted[key] = {**part, "seed": part["seed"] + DRAW * draw}
    return shifted


def _leave_out_words(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's data without descriptions, and without the place of its file."""
    return {key: value for key, value in data.items() if key not in {*WORDS, "base_dir"}}


@dataclass(frozen=True, slots=True)
class ReproductionJob:
    """A reproduction to run: its scale, its folder, and the number of runs at a time."""

    study: LoadedReproduction
    scale: ReproductionScale
    folder: Path
    at_once: int
    console: Console
    recorded: Results | None = None
    """Results of the first seeds, which are not run again."""
    only_seed: int | None = None
    """The only seed to run, where each seed draws its models."""
    first_seed: int = 0
    """The smallest seed, from which the seed of the sweep is counted, too."""

    @property
    def seeds(self) -> list[int]:
        """The seeds to run."""
        if self.only_seed is not None:
            return [self.only_seed]
        num_recorded = len(self.recorded.seeds) if self.recorded else 0
        return list(range(self.first_seed + num_recorded, self.first_seed + self.scale.seeds))

    def redraw(self, seed: int) -> "ReproductionJob":
        """Return the job of one seed, with its models, its task and its folder."""
        folder = self.folder / f"draw-{seed}"
        folder.mkdir(exist_ok=True)
        return replace(self, study=self.study.redraw(seed), folder=folder, only_seed=seed)


def list_reproductions() -> list[str]:
    """Return the names of the reproductions, in alphabetical order."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_reproduction(source: str | Path) -> LoadedReproduction:
    """Read a reproduction by its packaged name or from a file.

    Raises RecipeError that lists all problems.
    """
    path = Path(source)
    if not path.is_file():
        if str(source) not in list_reproductions():
            raise RecipeError(
                f"no reproduction {str(source)[:100]!r}: not a file and not one of the laboratory; "
                f"{suggest_name(str(source), list_reproductions())}"
            )
        path = FOLDER / f"{source}.yaml"
    recipe_data = _read_study(path)
    fields = {key: recipe_data.pop(key) for key in Reproduction.model_fields if key in recipe_data}
    spec = validate_fields(Reproduction, fields, str(source))
    _check_tests(spec, str(source))
    _check_stages(spec, [stage["name"] for stage in recipe_data.get("stages", ())], str(source))
    return LoadedReproduction(name=path.stem, file=path, recipe=recipe_data, spec=spec)


def _read_study(path: Path) -> dict[str, Any]:
    """Return the data of a reproduction, merged over the whole recipe that it is `of`, setting included."""
    recipe_data = merge_layers(read_layers(path))
    studied = recipe_data.pop("of", None)
    if studied is not None:
        recipe_data = merge_recipes(read_recipe(find_recipe(studied)), recipe_data)
    recipe_data.setdefault("base_dir", str(path.parent.resolve()))
    return recipe_data


def _check_tests(spec: Reproduction, source: str) -> None:
    """Raise RecipeError if a test names an unknown arm, or a measure at a time at which it is not taken."""
    arms = [*spec.arms, TEACHER]
    for index, claim in enumerate(spec.claims):
        for test in claim.tests:
            if (
                isinstance(test, Better | Tie | Reaches)
                and test.at not in ("start", "end")
                and test.measure != "accuracy"
            ):
                raise RecipeError(
                    f"{source}: claims[{index}]: {test.measure} is only measured at a run's start "
                    "and end; set `at: start` or `at: end`"
                )
        for arm in chain.from_iterable(map(get_arms, claim.tests)):
            if arm not in arms:
                raise RecipeError(
                    f"{source}: claims[{index}]: no arm named {arm!r}; {suggest_name(arm, arms)}"
                )


def _check_stages(spec: Reproduction, stages: Sequence[str], source: str) -> None:
    """Raise RecipeError if an arm leaves out or changes an unknown stage."""
    for arm, settings in spec.arms.items():
        for name in (*settings.without, *settings.stages):
            if name not in stages:
                raise RecipeError(
                    f"{source}: arms.{arm}: no stage named {name!r}; {suggest_name(name, stages)}"
                )


def get_arms(test: Test) -> tuple[str, ...]:
    """Return the arms that a test compares."""
    match test:
        case Tie(tie=arms):
            return arms
        case Better(better=first, than=second):
            return first, second
        case Ratio(ratio=first, over=second) | Cost(cost=first, over=second):
            return first, second
        case Reaches(reaches=arm) | Rises(rises=arm) | Robust(robust=arm) | Warned(warned=arm):
            return (arm,)


def is_map(study: LoadedReproduction) -> bool:
    """Return True if a test asks for robustness, so that the sweep itself is the result."""
    return any(isinstance(test, Robust) for test in study.spec.tests)


def list_measures(spec: Reproduction) -> list[str]:
    """Return the measures in the claims, accuracy first."""
    measures = [
        test.measure
        for test in spec.tests
        if isinstance(test, Better | Tie | Reaches | Ratio | Rises)
    ]
    return list(dict.fromkeys(["accuracy", *measures]))


def list_start_measures(spec: Reproduction) -> list[str]:
    """Return the measures that the claims need before training, except total accuracy."""
    measures = [
        test.measure
        for test in spec.tests
        if isinstance(test, Rises)
        or (isinstance(test, Better | Tie | Reaches) and test.at == "start")
    ]
    return [measure for measure in dict.fromkeys(measures) if measure != "accuracy"]


def resolve_stage_models(section: Any, find_model: Callable[[Mapping[str, Any]], str]) -> Any:
    """Replace `{stage: NAME}` and `{merge: [NAME, ...], base: NAME, scale: S}` in a section by model folders."""
    if isinstance(section, Mapping):
        if set(section) in ({"stage"}, {"merge", "base", "scale"}):
            return find_model(section)
        return {key: resolve_stage_models(inner, find_model) for key, inner in section.items()}
    return section
