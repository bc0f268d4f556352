"""Text charts for a terminal."""

from collections.abc import Sequence

from practicum.recipe import Recipe
from practicum.recipe.schedule import First, Following, evaluate_schedules

HEIGHT, WIDTH = 6, 60
BLOCKS = " ▁▂▃▄▅▆▇█"


def draw_schedules(recipe: Recipe) -> list[str]:
    """Draw a recipe's learning rate and every scheduled number over the steps of the run."""
    steps = recipe.train.steps
    courses = dict(evaluate_schedules(recipe.schedules, steps))
    if "optimizer.learning_rate" not in courses:
        courses["optimizer.learning_rate"] = [
            recipe.optimizer.build_adam_params(step, steps).learning_rate
            for step in range(1, steps + 1)
        ]
    lines = []
    for path, values in courses.items():
        schedule = recipe.schedules.get(path)
        note = ""
        if isinstance(schedule, Following):
            course = "" if isinstance(schedule, First) else f", towards {schedule.end:g}"
            note = f" (adapts to {schedule.metric}{course})"
        lines += [f"{path}{note}", *draw_chart(values), ""]
    return lines[:-1]


def draw_chart(values: Sequence[float]) -> list[str]:
    """Draw values as columns of blocks, with the range at the left and the steps below."""
    width = min(len(values), WIDTH)
    columns = [values[column * len(values) // width] for column in range(width)]
    low, high = min(0.0, *columns), max(columns)
    spread = (high - low) or 1.0
    # A block character fills its cell in eighths, so a column's height is counted in eighths.
    eighths = [round((value - low) / spread * HEIGHT * 8) for value in columns]
    rows = []
    for row in range(HEIGHT - 1, -1, -1):
        label = f"{high:.4g}" if row == HEIGHT - 1 else f"{low:.4g}" if row == 0 else ""
        blocks = "".join(BLOCKS[max(0, min(8, eighth - 8 * row))] for eighth in eighths)
        rows.append(f"{label:>10} |{blocks}")
    first, last = "step 1", str(len(values))
    return [
        *rows,
        f"{'':>10} +{'-' * len(columns)}",
        f"{'':>12}{first}{last:>{max(len(columns) - len(first), 1)}}",
    ]
