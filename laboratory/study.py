"""What a reproduction is: a recipe, the arms that change it, and the claims that their runs decide.

It is one YAML file: a recipe (with `stages` where models have to be made first) and beside its keys those of `Reproduction`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from laboratory.results import TEACHER
from practicum.core.calls import did_you_mean
from practicum.core.plugins import Plugin, module_of
from practicum.errors import RecipeError
from practicum.recipe import merged, read_recipe, validated

FOLDER = Path(__file__).parent / "recipes"
"""The folder of the reproductions of this repository."""

Unit = Literal["steps", "flops", "tokens"]
At = Literal["start", "end", "equal_flops"] | int
"""Where a measure is taken: before the training, after it, when equal FLOPs were spent, or at a step."""


class _SpecModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Better(_SpecModel):
    """`better` exceeds `than` by at least `by` in a measure; the difference is paired over seeds."""

    kind: Literal["better"] = "better"
    better: str
    than: str
    by: float = Field(default=0.0, ge=0)
    measure: str = "accuracy"
    at: At = Field(default="end", description="or a step")


class Tie(_SpecModel):
    """The two differ by less than `within`: their interval lies between both."""

    kind: Literal["tie"] = "tie"
    tie: tuple[str, str]
    within: float = Field(gt=0)
    measure: str = "accuracy"
    at: At = "end"


class Reaches(_SpecModel):
    """An arm ends at or above `least`, or at or below `most`."""

    kind: Literal["reaches"] = "reaches"
    reaches: str
    least: float | None = None
    most: float | None = None
    measure: str = "accuracy"
    at: At = "end"


class Ratio(_SpecModel):
    """`ratio` over `over` in a measure is at least `least`, or at most `most`."""

    kind: Literal["ratio"] = "ratio"
    ratio: str
    over: str
    measure: str
    least: float | None = Field(default=None, gt=0)
    most: float | None = Field(default=None, gt=0)


class Rises(_SpecModel):
    """An arm's accuracy, in all or of a domain, rises from start to end by at least `by`; one below zero is how far it may fall."""

    kind: Literal["rises"] = "rises"
    rises: str
    by: float = 0.0
    measure: str = "accuracy"


class Cost(_SpecModel):
    """What `cost` spends over what `over` spends until the held-out accuracy is `level` for the first time.

    The ratio has to be `factor` or more, or `most` or less.
    """

    kind: Literal["cost"] = "cost"
    cost: str
    over: str
    level: float = Field(gt=0, le=1)
    factor: float | None = Field(default=None, gt=0)
    most: float | None = Field(default=None, gt=0)
    unit: Unit = "flops"


class Robust(_SpecModel):
    """Every learning rate within a factor of `within` of the arm's best one ends no more than `loses` below it, in the sweep."""

    kind: Literal["robust"] = "robust"
    robust: str
    within: float = Field(default=3.0, gt=1)
    loses: float = Field(default=0.1, ge=0)


class Warned(_SpecModel):
    """The doctor, asked about an arm's recipe before any training, comes to this verdict."""

    kind: Literal["warned"] = "warned"
    warned: str
    verdict: Literal["GO", "GO-WITH-CHANGES", "INCONCLUSIVE", "NO-GO"] = "NO-GO"


Test = Better | Tie | Reaches | Ratio | Rises | Cost | Robust | Warned


class Claim(_SpecModel):
    """What is said, by whom and in which setting, and the tests that decide it here; it holds where all of them do."""

    claim: str
    paper: str = Field(description="its arXiv number or address")
    theirs: str = Field(description="the paper's number and setting")
    tests: tuple[Test, ...] = Field(min_length=1)
    why: str = Field(default="", description="why it came out so")
    shown_by: str | None = Field(
        default=None, description="the arms that show the reason; none: it was not tested"
    )


class ReproductionArm(_SpecModel):
    """One arm: what it is, and what it changes in the recipe."""

    about: str
    set: dict[str, Any] = {}
    without: tuple[str, ...] = Field(
        default=(), description="stages of a pipeline that it leaves out"
    )
    learning_rates: tuple[float, ...] | None = Field(
        default=None, description="instead of the reproduction's"
    )


class ReproductionScale(_SpecModel):
    """How much is run: so many seeds after a sweep over learning rates with another seed, and what changes in every arm."""

    seeds: int = Field(default=3, ge=1)
    sweep: bool = True
    set: dict[str, Any] = {}


class Reproduction(_SpecModel):
    """A reproduction besides its recipe."""

    question: str
    measure: Plugin("laboratory.measures") = Field(default_factory=lambda: _compared())  # type: ignore[valid-type]
    set: dict[str, Any] = Field(
        default={}, description="what all arms change in the recipe, which its stages keep"
    )
    arms: dict[Annotated[str, Field(pattern=r"^[a-z0-9_]{1,30}$")], ReproductionArm]
    learning_rates: tuple[float, ...] = Field(
        default=(), description="tried for every arm; none: the recipe's own"
    )
    aim: str = Field(
        default="accuracy",
        description="the measure by which learning rates are chosen, and the plot's",
    )
    aim_at: Literal["highest", "lowest"] = "highest"
    quick: ReproductionScale = ReproductionScale(seeds=1, sweep=False)
    full: ReproductionScale = ReproductionScale()
    may_differ: tuple[str, ...] = Field(
        default=(), description="what arms need not share, `the training prompts`"
    )
    claims: tuple[Claim, ...] = Field(min_length=1)
    remarks: str = Field(
        default="", description="what else a reader has to know: regimes tried, limits"
    )

    @property
    def tests(self) -> list[Test]:
        """The tests of all claims."""
        return [test for claim in self.claims for test in claim.tests]


def _compared() -> BaseModel:
    return module_of("laboratory.measures", "runs").Config()


class LoadedReproduction(_SpecModel):
    """A reproduction with its name and the data of its recipe, `stages` and all."""

    name: str
    file: Path
    recipe: dict[str, Any]
    spec: Reproduction

    def form(self, full: bool) -> ReproductionScale:
        """The quick form or the full one."""
        return self.spec.full if full else self.spec.quick

    def data_of(self, arm: str, form: ReproductionScale) -> dict[str, Any]:
        """The data of an arm's recipe; models may be `{stage: NAME}`."""
        base = {key: value for key, value in self.recipe.items() if key != "stages"}
        return merged(merged(merged(base, self.spec.set), form.set), self.spec.arms[arm].set)

    def pipeline_of(self, arm: str, form: ReproductionScale) -> dict[str, Any]:
        """The data of an arm that is a whole pipeline, without the stages that it leaves out."""
        left_out = self.spec.arms[arm].without
        stages = [stage for stage in self.recipe["stages"] if stage["name"] not in left_out]
        return {**self.data_of(arm, form), "stages": stages}


def reproduction_names() -> list[str]:
    """Return the names of the reproductions of this repository, in alphabetical order."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_reproduction(source: str | Path) -> LoadedReproduction:
    """Read a reproduction by its packaged name or from a file; RecipeError with every problem found."""
    path = Path(source)
    if not path.is_file():
        if str(source) not in reproduction_names():
            raise RecipeError(
                f"no reproduction {str(source)[:100]!r}: not a file and not one of the laboratory; "
                f"{did_you_mean(str(source), reproduction_names())}"
            )
        path = FOLDER / f"{source}.yaml"
    data = read_recipe(path)
    own = {key: data.pop(key) for key in Reproduction.model_fields if key in data}
    spec = validated(Reproduction, own, str(source))
    _check_arms(spec, str(source))
    _check_stages(spec, [stage["name"] for stage in data.get("stages", ())], str(source))
    return LoadedReproduction(name=path.stem, file=path, recipe=data, spec=spec)


def _check_arms(spec: Reproduction, source: str) -> None:
    """RecipeError where a test names an arm that there is not."""
    known = [*spec.arms, TEACHER]
    for place, claim in enumerate(spec.claims):
        for test in claim.tests:
            for arm in arms_of(test):
                if arm not in known:
                    raise RecipeError(
                        f"{source}: claims[{place}]: no arm named {arm!r}; {did_you_mean(arm, known)}"
                    )


def _check_stages(spec: Reproduction, stages: Sequence[str], source: str) -> None:
    """RecipeError where an arm leaves out a stage that there is not."""
    for arm, settings in spec.arms.items():
        for name in settings.without:
            if name not in stages:
                raise RecipeError(
                    f"{source}: arms.{arm}.without: no stage named {name!r}; {did_you_mean(name, stages)}"
                )


def arms_of(test: Test) -> tuple[str, ...]:
    """The arms that a test compares."""
    match test:
        case Better():
            return test.better, test.than
        case Tie():
            return test.tie
        case Reaches():
            return (test.reaches,)
        case Ratio():
            return test.ratio, test.over
        case Rises():
            return (test.rises,)
        case Robust():
            return (test.robust,)
        case Warned():
            return (test.warned,)
        case Cost():
            return test.cost, test.over


def is_map(study: LoadedReproduction) -> bool:
    """Whether the sweep over learning rates is the result, for a test asks how robust an arm is."""
    return any(isinstance(test, Robust) for test in study.spec.tests)


def measures_of(spec: Reproduction) -> list[str]:
    """The measures that the claims speak of, accuracy first."""
    wanted = [
        test.measure
        for test in spec.tests
        if isinstance(test, Better | Tie | Reaches | Ratio | Rises)
    ]
    return list(dict.fromkeys(["accuracy", *wanted]))


def starts_of(spec: Reproduction) -> list[str]:
    """The measures, besides accuracy in all, that the claims want to know from before the training."""
    wanted = [
        test.measure
        for test in spec.tests
        if isinstance(test, Rises)
        or (isinstance(test, Better | Tie | Reaches) and test.at == "start")
    ]
    return [measure for measure in dict.fromkeys(wanted) if measure != "accuracy"]


def resolve_stage_models(section: Any, model_of: Callable[[Mapping[str, Any]], str]) -> Any:
    """The section with a folder for every model that is written `{stage: NAME}` or `{average: [NAME, ...]}`."""
    if isinstance(section, Mapping):
        if set(section) in ({"stage"}, {"average"}):
            return model_of(section)
        return {key: resolve_stage_models(value, model_of) for key, value in section.items()}
    return section
