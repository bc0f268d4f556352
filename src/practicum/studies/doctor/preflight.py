"""The checks of the doctor that load no model, for `practicum run` before its first step."""

from practicum.recipe import Recipe
from practicum.studies.doctor.plan import compare_with_table, judge_memory


def find_warnings(recipe: Recipe) -> list[str]:
    """Return a sentence for each check that warns or fails: memory and learning rate."""
    outcomes = {"P17 memory": judge_memory(recipe), "P19 settings": compare_with_table(recipe)}
    return [
        f"{name}: {outcome.sentence}"
        for name, outcome in outcomes.items()
        if outcome is not None and outcome.status in ("warn", "fail")
    ]
