"""The evaluations of one run: before its training, after it, and within it where the recipe says so."""

import logging
from dataclasses import asdict
from typing import Any

from practicum.errors import CheckpointError
from practicum.monitors import compute_evaluation_readings
from practicum.recipe import Recipe
from practicum.run_dir import RESTORE, RunDir, read_json, shapes, write_json
from practicum.runs.assembly import RunComponents
from practicum.runs.outcome import RunEvaluations
from practicum.training.evaluation import Evaluation, evaluate, evaluate_teacher
from practicum.types import Metrics

log = logging.getLogger(__name__)


class Examination:
    """Evaluates the student on the held-out prompts, writes down what it found, and counts what that cost."""

    def __init__(self, home: RunDir, recipe: Recipe, built: RunComponents) -> None:
        self._home = home
        self._recipe = recipe
        self._built = built
        self._before: Evaluation | None = None
        self._teacher: Evaluation | None = None
        self._costs: dict[str, Metrics] = {}

    def before(self, trained: bool) -> None:
        """Evaluate student and teacher once; a resumed run, whose weights have moved on, reads back what it found."""
        path = self._home.path / "before.json"
        if path.is_file():
            self._read_back()
        elif trained:
            log.warning(f"{path} is gone, so there is nothing to compare the trained student with")
        else:
            self._before = self._evaluate("before training")
            self._teacher = self._evaluate_teacher()
            cost = self._costs["before"] = self._built.parts.ledger.take()
            write_json(
                path,
                {"student": _json(self._before), "teacher": _json(self._teacher), "cost": cost},
            )

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation within the training follows this step."""
        every = self._recipe.evaluation.every
        return every is not None and step % every == 0 and step != self._recipe.train.steps

    def within(self, step: int) -> Metrics:
        """Return what an evaluation after a step adds to its metrics, nothing where none is due; its cost is not the step's."""
        if not self.is_due(step):
            return {}
        now = self._evaluate(f"after step {step}")
        self._built.parts.ledger.take()
        return (
            {} if now is None else compute_evaluation_readings(self._before, now, self._recipe.seed)
        )

    def after(self) -> RunEvaluations:
        """Evaluate the trained student, and return all that was found."""
        now = self._evaluate("after training")
        write_json(self._home.path / "after.json", {"student": _json(now)})
        self._costs["after"] = self._built.parts.ledger.take()
        return RunEvaluations(self._before, self._teacher, now, self._costs)

    def _evaluate(self, when: str) -> Evaluation | None:
        parts, settings = self._built.parts, self._built.evaluation
        if settings is None:
            return None
        log.info(f"evaluating {len(settings.prompts)} held-out prompts {when}")
        return evaluate(parts.sampler, parts.renderer, parts.task, parts.teacher, settings)

    def _evaluate_teacher(self) -> Evaluation | None:
        parts, settings = self._built.parts, self._built.evaluation
        if settings is None or not self._recipe.evaluation.teacher:
            return None
        log.info("evaluating the teacher in its own context")
        return evaluate_teacher(parts.teacher, self._built.learner.renderer, parts.task, settings)

    def _read_back(self) -> None:
        path, settings = self._home.path / "before.json", self._built.evaluation
        saved = read_json(path, shapes.BEFORE)
        self._costs["before"] = saved.get("cost", {})
        self._before, self._teacher = (
            None if saved[who] is None else Evaluation.from_json(saved[who])
            for who in ("student", "teacher")
        )
        asked = 0 if settings is None else len(settings.prompts) * settings.samples
        if self._before is not None and len(self._before.answers) != asked:
            raise CheckpointError(
                f"{path} is damaged (student.answers: {len(self._before.answers)} instead of {asked}); {RESTORE}"
            )


def _json(evaluation: Evaluation | None) -> dict[str, Any] | None:
    return None if evaluation is None else asdict(evaluation)
