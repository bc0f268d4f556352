"""The outcome of a run: the content of summary.json, and the tables on the console."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from practicum.costs import ModelDims, summarize_costs
from practicum.monitors import compute_evaluation_readings
from practicum.recipe import Recipe, choose_setting, resolve_recipe
from practicum.report.outcome_verdict import (
    RunSettings,
    format_verdict,
    is_destroyed,
    judge_run,
    read_gain,
)
from practicum.report.tables import (
    ALL_DONE,
    build_comparison,
    build_completion_rows,
    describe_gain,
    describe_lost_rows,
    pair_completions,
)
from practicum.run_dir import BestTracker, RunDir, read_rows, shapes
from practicum.run_dir.best import COLLAPSED
from practicum.runs.console import Console
from practicum.statistics import Interval
from practicum.statistics.heldout import Evaluation, compare_accuracy, compare_drafts
from practicum.types import Metrics


@dataclass(frozen=True, slots=True)
class RunEvaluations:
    """The evaluations of the student before and after training and of its teacher, with costs.

    `searched` has the evaluations of the answers that the recipe's search chooses, by the same words.
    """

    before: Evaluation | None
    teacher: Evaluation | None
    after: Evaluation | None
    costs: Mapping[str, Metrics]
    searched: Mapping[str, Evaluation] = field(default_factory=dict)

    def summarize_search(self, seed: int) -> dict[str, Any]:
        """Return the field `search` of the summary; empty without a search.

        `gain` is the accuracy with the search minus the accuracy of plain answers after training.
        """
        if not self.searched:
            return {}
        numbers: dict[str, Any] = {key: part.summarize() for key, part in self.searched.items()}
        if self.after is not None and "after" in self.searched:
            gain = compare_accuracy(self.after, self.searched["after"], seed)
            numbers["gain"] = None if gain is None else asdict(gain)
        return {"search": numbers}


def build_readings(before: Evaluation | None, current: Evaluation, recipe: Recipe) -> Metrics:
    """Compute the readings of an evaluation, and if steps compete to be best, whether it can be."""
    readings = compute_evaluation_readings(before, current, recipe.seed)
    if recipe.train.metric_for_best_model is None or before is None:
        return readings
    numbers = {
        "before": before.summarize(),
        "after": current.summarize(),
        **_measure_gains(before, current, recipe),
        "alarms": {},
    }
    return {**readings, COLLAPSED: float(is_destroyed(numbers, _read_settings(recipe)))}


def _measure_gains(
    before: Evaluation | None, after: Evaluation | None, recipe: Recipe
) -> dict[str, Any]:
    """Return the `gain` in accuracy, None if unknown, and the `draft_gain` of a drafter's run."""
    if before is None or after is None:
        return {"gain": None}
    gains = {"gain": compare_accuracy(before, after, recipe.seed)}
    if recipe.student.drafter is not None:
        gains["draft_gain"] = compare_drafts(before, after, recipe.seed)
    return {name: None if gain is None else asdict(gain) for name, gain in gains.items()}


def build_summary(
    run_dir: RunDir,
    recipe: Recipe,
    evaluations: RunEvaluations,
    best: BestTracker,
    model_shapes: Mapping[str, ModelDims],
    end_reason: str | None,
    lost_rows: Mapping[str, int],
) -> dict[str, Any]:
    """Return the content of summary.json, without seconds; `end_reason` is the reason for an early
    end.

    `best` tracks the steps that were evaluated during training. `lost_rows` counts the rows that
    could not be written, by the name of the journal.
    """
    rows = list(read_rows(run_dir.metrics_jsonl, shapes.METRICS))
    alarms = Counter(row["id"] for row in read_rows(run_dir.alarms_jsonl, shapes.ALARM))
    before, teacher, after = evaluations.before, evaluations.teacher, evaluations.after
    readings: Metrics = {}
    if after is not None and best.metric is not None:
        readings = build_readings(before, after, recipe)
    best.update(rows[-1]["step"], readings)
    numbers = {
        "steps": rows[-1]["step"],
        "before": None if before is None else before.summarize(),
        "teacher": None if teacher is None else teacher.summarize(),
        "after": None if after is None else after.summarize(),
        **_measure_gains(before, after, recipe),
        "alarms": dict(sorted(alarms.items())),
        "best": best.summarize(readings),
    }
    evaluation_costs = {when: summarize_costs([cost]) for when, cost in evaluations.costs.items()}
    return {
        "name": recipe.name,
        "seed": recipe.seed,
        "ended": ALL_DONE if end_reason is None else end_reason,
        "rollouts": int(sum(row["rollouts"] for row in rows)),
        "tokens": int(sum(row["tokens"] for row in rows)),
        "skipped_updates": sum(bool(row.get("skipped") or row.get("nonfinite")) for row in rows),
        "empty_updates": int(
            sum(row.get("empty_updates", 0.0) for row in rows if not row.get("nonfinite"))
        ),
        **numbers,
        **evaluations.summarize_search(recipe.seed),
        "verdict": asdict(judge_run(numbers, _read_settings(recipe))),
        "lost_rows": dict(lost_rows),
        "cost": {**summarize_costs(rows), "evaluation": evaluation_costs},
        "scaling": build_scaling_record(model_shapes, rows, after),
        "samples": pair_completions(before, after),
    }


def _read_settings(recipe: Recipe) -> RunSettings:
    """Return the settings of a recipe that the verdict depends on."""
    terms = recipe.objective.losses
    choice = choose_setting(resolve_recipe(recipe))
    has_reward = any(term.learns_from_reward for term in terms)
    return RunSettings(
        learning_rate=recipe.optimizer.learning_rate,
        prompts=recipe.evaluation.prompts,
        steps=recipe.train.steps,
        aims_at_teacher=not has_reward and any(term.needs_teacher for term in terms),
        teacher_moves=recipe.teacher.capabilities().follows_student,
        usual_rate=choice.list_values()["optimizer.learning_rate"] if choice else None,
    )


def build_scaling_record(
    model_shapes: Mapping[str, ModelDims],
    rows: Sequence[Mapping[str, Any]],
    after: Evaluation | None,
) -> dict[str, Any]:
    """Return the quantities of a scaling law of distillation (Busbridge et al. 2502.08606).

    The quantities are the parameters of student and teachers, the D supervised tokens, the rollouts
    and their mean length T, and as results held-out accuracy and reverse KL. Unknown values are
    None.
    """
    rollouts = sum(row["rollouts"] for row in rows)
    return {
        "N_student": model_shapes["student"].parameters if "student" in model_shapes else None,
        "N_teacher": {
            name: shape.parameters for name, shape in model_shapes.items() if name != "student"
        },
        "D": sum(row["tokens"] for row in rows),
        "rollouts": rollouts,
        "T": sum(row["rollouts"] * row["length"] for row in rows) / rollouts,
        "result": {
            "accuracy": None if after is None or after.accuracy is None else after.accuracy.mean,
            "reverse_kl": None if after is None else after.reverse_kl,
        },
    }


def print_outcome(
    console: Console,
    evaluations: RunEvaluations,
    summary: Mapping[str, Any],
    extra_rows: Mapping[str, object],
    folder: str,
) -> None:
    """Show the end of a run: answers, numbers, gain, alarms, `extra_rows`, and last the verdict."""
    if summary["samples"]:
        columns = ["prompt", "before", "after"]
        cells = build_completion_rows(summary["samples"], columns)
        console.table("held-out prompts, before and after", columns, cells)
    if evaluations.before is not None and evaluations.after is not None:
        cells = build_comparison(evaluations.before, evaluations.after, evaluations.teacher)
        console.table("held-out evaluation", ["", "before", "after", "teacher"], cells)
    rows = {}
    name, gain = read_gain(summary)
    if gain is not None:
        prompts = summary["before"]["prompts"]
        rows[f"gain in {name}"] = describe_gain(Interval(**gain), prompts)
    for key, searched in evaluations.searched.items():
        if searched.accuracy is not None:
            rows[f"accuracy with search, {key}"] = str(searched.accuracy)
    if summary["alarms"]:
        counts = ", ".join(f"{name} ({count})" for name, count in summary["alarms"].items())
        rows["alarms"] = f"{counts}; see alarms.jsonl"
    if summary["lost_rows"]:
        rows["rows lost"] = describe_lost_rows(summary["lost_rows"])
    console.finish({**rows, **extra_rows, "verdict": format_verdict(summary["verdict"], folder)})
