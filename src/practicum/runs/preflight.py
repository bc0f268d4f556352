"""The checks of a new run that load no model: its files, its memory and its learning rate."""

import logging
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from practicum.errors import PracticumError
from practicum.models.config import ScratchConfig
from practicum.models.size import count_parameters
from practicum.recipe import Recipe, choose_setting, resolve_recipe
from practicum.runs.check_outcome import CheckOutcome, skip_check
from practicum.runs.inputs import list_recipes, refuse_missing_inputs
from practicum.runs.plan import choose_device, plan, read_memory_limit
from practicum.runs.stages import PLACEHOLDER, Pipeline
from practicum.statistics import Interval, group_pairs
from practicum.text import make_printable

log = logging.getLogger(__name__)

GIB = 2**30
MEMORY_SHARE = (0.7, 0.95)
RATE_RATIOS = (3.0, 8.0)
"""The learning rate over the table's, above which it is a warning, and above which it destroys a pretrained model."""

MIN_RATE_RATIO = 1 / 200
"""The learning rate over the table's below which a run hardly moves its student."""

FEW_PARAMETERS = 10_000_000
"""Models below this size need no estimate of memory, which takes seconds."""


def check_before_run(
    loaded: Recipe | Pipeline, source: str | None = None, overrides: Sequence[str] = ()
) -> None:
    """Refuse missing inputs, and warn of each setting that the doctor would not pass.

    `source` is the file or the name that the recipe was read from, for the command that shows more;
    None for a recipe that was built in Python. Raises RecipeError for inputs that cannot be used.
    """
    name = (loaded.recipe if isinstance(loaded, Pipeline) else loaded).name
    refuse_missing_inputs(loaded, source or name)
    command = (
        f"practicum doctor {shlex.join([source, *overrides])}"
        if source
        else "practicum.doctor(recipe)"
    )
    # The doctor examines recipes, and a pipeline is several.
    advice = "" if isinstance(loaded, Pipeline) else f"; {command} shows more before the first step"
    for warning in find_warnings(loaded):
        log.warning(make_printable(f"{warning}{advice}"))


def find_warnings(loaded: Recipe | Pipeline) -> list[str]:
    """Return a sentence for each check that warns or fails, after the stage that it is about.

    The checks are of memory and learning rate. Notes about shared sections are logged once.
    """
    recipes = list_recipes(loaded)
    stages_by_warning = group_pairs(
        (warning, name) for name, recipe in recipes.items() for warning in _yield_warnings(recipe)
    )
    return [
        warning if len(names) == len(recipes) else f"{', '.join(names)}: {warning}"
        for warning, names in stages_by_warning.items()
    ]


def _yield_warnings(recipe: Recipe) -> Iterator[str]:
    outcomes = {"P19 settings": compare_with_table(recipe)}
    if recipe.student.drafter is None and not _is_small(recipe):
        outcomes["P17 memory"] = judge_memory(recipe)
    for name, outcome in outcomes.items():
        if outcome is not None and outcome.status in ("warn", "fail"):
            yield f"{name}: {outcome.sentence}"


def _is_small(recipe: Recipe) -> bool:
    """Return True if all models of a recipe together have few parameters."""
    configs = [recipe.student, *recipe.frozen_models.values()]
    counts = [_count(config.model, Path(recipe.base_dir)) for config in configs]
    return None not in counts and sum(filter(None, counts)) < FEW_PARAMETERS


def _count(model: str | ScratchConfig, folder: Path) -> int | None:
    """Return the parameters of a model, about right for one from scratch; None if they are unknown."""
    if isinstance(model, str):
        # A model of another stage is as large as the student, which is counted already.
        return 0 if model.startswith(PLACEHOLDER) else count_parameters(model, folder)[0]
    rows = model.padded_vocabulary or 1000
    return 12 * model.layers * model.hidden_size**2 + rows * model.hidden_size


def judge_memory(recipe: Recipe) -> CheckOutcome:
    """Judge the memory of a recipe, without loading a model."""
    available = read_memory_limit(choose_device(recipe))
    good, bad = MEMORY_SHARE
    try:
        cost = plan(recipe, limit=int(good * available), process=0)
    except PracticumError as error:
        return skip_check(f"it cannot be planned: {error}")
    needed, share = cost.memory.peak / GIB, cost.memory.peak / available
    status = "fail" if share > bad else "warn" if share > good else "pass"
    text = f"about {needed:.1f} of {available / GIB:.0f} GiB; see practicum plan"
    details = {phase: cost.memory.of(phase) / GIB for phase in cost.memory.phases}
    exact = Interval(needed, needed, needed)
    return CheckOutcome(status, text, exact, "GiB", cost.change or (), details=details)


def compare_with_table(recipe: Recipe) -> CheckOutcome | None:
    """Return a warning or failure if the learning rate is far from the table's; None otherwise."""
    choice = choose_setting(resolve_recipe(recipe))
    if choice is None or choice.setting.parameters is None:
        return None
    rate = recipe.optimizer.learning_rate
    usual = choice.list_values()["optimizer.learning_rate"]
    high, destructive = RATE_RATIOS
    if MIN_RATE_RATIO * usual <= rate <= high * usual:
        return None
    is_low = rate < usual
    ratio = f"1/{usual / rate:.0f} of" if is_low else f"{rate / usual:.0f} times"
    text = (
        f"learning rate {rate:g} is {ratio} the rate of the table of settings "
        f"for this student: {choice.describe()}"
    )
    status = "fail" if is_low or rate > destructive * usual else "warn"
    return CheckOutcome(status, text, fix=(f"optimizer.learning_rate={usual:g}",))
