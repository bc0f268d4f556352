"""Evaluate a run's student before training, after it, and in between if the recipe asks for it."""

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from practicum.core.waits import show_wait
from practicum.errors import CheckpointError, RecipeError
from practicum.monitors import compute_evaluation_readings
from practicum.ports import (
    walk,
)
from practicum.ports.notes import Note
from practicum.recipe import Recipe
from practicum.run_dir import RESTORE, RunDir, read_json, shapes, write_json
from practicum.run_dir.best import METRICS, read_score
from practicum.runs.assembly import RunComponents
from practicum.runs.outcome import RunEvaluations, build_readings
from practicum.runs.thumbnails import Thumbnails
from practicum.statistics.heldout import Evaluation
from practicum.training.evaluation import (
    answer_heldout,
    evaluate_search,
    evaluate_teacher,
    examine_answers,
    show_notes_of,
)
from practicum.types import Metrics, Rollout

log = logging.getLogger(__name__)


class RunEvaluator:
    """The evaluations of one run on the held-out prompts, with their files and their costs."""

    def __init__(self, run_dir: RunDir, recipe: Recipe, components: RunComponents) -> None:
        self._run_dir = run_dir
        self._recipe = recipe
        self._components = components
        self._before: Evaluation | None = None
        self._teacher: Evaluation | None = None
        self._searched: dict[str, Evaluation] = {}
        """The evaluations of the answers that the recipe's search chooses, `before` and `after`."""
        self._costs: dict[str, Metrics] = {}
        self._newest: tuple[Evaluation | None, Metrics] | None = None
        """The evaluation of the present weights and its cost, until a step changes them."""
        self._notes = _select_notes(recipe, components.parts.notes)
        self._answers: list[Rollout] = []
        """The newest held-out answers, with their notes."""

    def evaluate_before(self, *, is_trained: bool) -> None:
        """Evaluate student and teacher once.

        The weights of a resumed run have changed, so it reads the saved evaluations instead.
        """
        path = self._run_dir.path / "before.json"
        if path.is_file():
            self._read_back()
        elif is_trained:
            log.warning(
                f"{path} is missing, so the trained student cannot be compared with the initial one"
            )
        else:
            self._before = self._evaluate("before", "before training")
            self._teacher = self._evaluate_teacher()
            cost = self._costs["before"] = self._components.parts.ledger.take()
            evaluations = {"student": _encode(self._before), "teacher": _encode(self._teacher)}
            write_json(path, {**evaluations, **self._encode_search("before"), "cost": cost})

    def check_metric(self) -> None:
        """Raise RecipeError if the metric that chooses the best step cannot be measured."""
        metric = self._recipe.train.metric_for_best_model
        if metric is None or self._before is None:
            return
        readings = compute_evaluation_readings(None, self._before, self._recipe.seed)
        if read_score(metric, readings) is None:
            names = [name for name in METRICS if read_score(name, readings) is not None]
            advice = f"write {names[0]}" if names else "leave it out"
            raise RecipeError(
                f"train.metric_for_best_model: the held-out answers have no finite {metric}; {advice}"
            )

    def is_due(self, step: int) -> bool:
        """Return True if this step is followed by an evaluation during training."""
        every = self._recipe.evaluation.every
        return every is not None and step % every == 0

    def evaluate_if_due(self, step: int) -> Metrics:
        """Return the metrics that an evaluation after this step adds, or none if none is due."""
        self._newest = None
        if not self.is_due(step):
            return {}
        evaluation = self._evaluate("after", f"after step {step}")
        # The budget only pays for training, so the cost of this evaluation leaves the ledger.
        self._newest = evaluation, self._components.parts.ledger.take()
        if evaluation is None:
            return {}
        readings = build_readings(self._before, evaluation, self._recipe)
        searched = self._searched.get("after")
        if searched is not None and searched.accuracy is not None:
            readings["heldout_search_accuracy"] = searched.accuracy.mean
        return readings

    def evaluate_after(self) -> RunEvaluations:
        """Evaluate the trained student, and return all evaluations of the run."""
        if self._newest is None:
            evaluation = self._evaluate("after", "after training")
            self._newest = evaluation, self._components.parts.ledger.take()
        evaluation, self._costs["after"] = self._newest
        content = {"student": _encode(evaluation), **self._encode_search("after")}
        write_json(self._run_dir.path / "after.json", content)
        return RunEvaluations(self._before, self._teacher, evaluation, self._costs, self._searched)

    def _evaluate(self, key: Literal["before", "after"], when: str) -> Evaluation | None:
        """Evaluate plain answers, and store the evaluation with the recipe's search if it has one."""
        parts, settings = self._components.parts, self._components.evaluation
        if settings is None:
            return None
        name = f"evaluating {len(settings.prompts)} held-out prompts {when}"
        log.info(name)
        searched = evaluate_search(parts.build_writers(parts.sampler), settings)
        if searched is not None:
            self._searched[key] = searched
        with show_wait(name):
            self._answers = answer_heldout(
                parts.sampler, parts.renderer, parts.task, settings, self._notes, rescored=True
            )
            Thumbnails(self._run_dir.path, parts.renderer.pictures).write(self._answers)
            return examine_answers(
                self._answers,
                parts.sampler,
                parts.renderer,
                parts.task,
                parts.teacher,
                settings,
                self._notes,
            )

    def _encode_search(self, key: Literal["before", "after"]) -> dict[str, Any]:
        """Return the evaluation with the search for a file; empty without a search."""
        return {"search": asdict(self._searched[key])} if key in self._searched else {}

    def _evaluate_teacher(self) -> Evaluation | None:
        parts, settings = self._components.parts, self._components.evaluation
        if settings is None or not self._recipe.evaluation.teacher:
            return None
        # Without a note of every prompt a teacher that shows one has no context before its answers.
        settings = show_notes_of(settings, self._answers, self._notes) or settings
        name = "evaluating the teacher in its own context"
        log.info(name)
        with show_wait(name):
            return evaluate_teacher(parts.teacher, parts.renderer, parts.task, settings)

    def _read_back(self) -> None:
        path, settings = self._run_dir.path / "before.json", self._components.evaluation
        self._before, self._teacher, searched, self._costs["before"] = read_evaluations(path)
        if searched is not None:
            self._searched["before"] = searched
        count = 0 if settings is None else len(settings.prompts) * settings.samples
        if self._before is not None and len(self._before.answers) != count:
            raise CheckpointError(
                f"{path} is damaged (student.answers: {len(self._before.answers)} instead of "
                f"{count}); {RESTORE}"
            )


def read_evaluations(
    path: Path,
) -> tuple[Evaluation | None, Evaluation | None, Evaluation | None, Metrics]:
    """Return before.json: the evaluations of student, teacher and search, and their cost."""
    saved = read_json(path, shapes.BEFORE)
    student, teacher, searched = (
        None if saved.get(who) is None else Evaluation.from_json(saved[who])
        for who in ("student", "teacher", "search")
    )
    return student, teacher, searched, saved["cost"]


def _select_notes(recipe: Recipe, notes: Mapping[str, Note]) -> Mapping[str, Note]:
    """Return the notes that held-out answers get: none if no teacher shows one."""
    # Held-out answers are written without the source, so they do not get its notes.
    shown_note = recipe.rollout.source.note_shown
    separate = {name: note for name, note in notes.items() if name != shown_note}
    is_shown = any(config.shows(separate) for _, config in walk(recipe.teacher))
    return separate if is_shown else {}


def _encode(evaluation: Evaluation | None) -> dict[str, Any] | None:
    return None if evaluation is None else asdict(evaluation)
