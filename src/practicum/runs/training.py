"""Follow the steps of a run: measure, judge by the monitors, and call the observers in order."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from practicum.core.options import spell_options
from practicum.errors import RecipeError, TeacherError, VerifierError, WorkerLost
from practicum.monitors import Watch
from practicum.recipe import Recipe, override, parse_recipe, resolve_recipe
from practicum.recipe.schedule import ScheduleState
from practicum.run_dir import RunDir, read_rows, shapes
from practicum.runs.ending import Ending
from practicum.runs.examining import RunEvaluator
from practicum.runs.observers import FinishedStep, Observer, SaveCheckpoints
from practicum.training.asynchronous import StepRunner
from practicum.types import StepResult


@dataclass(frozen=True, slots=True)
class Training:
    """The monitors and observers of a run's steps; `saving` serves one of the observers."""

    runner: StepRunner
    watch: Watch
    evaluator: RunEvaluator
    ending: Ending
    saving: SaveCheckpoints
    observers: Sequence[Observer]

    def follow(self, results: Iterable[StepResult]) -> None:
        """Observe step after step until the run ends.

        If a teacher, a verifier, an environment or a process of a cluster fails, raises
        TeacherError, VerifierError or WorkerLost with the newest saved step.
        """
        measured_step = trained_step = self.saving.saved
        try:
            for result in results:
                trained_step = result.step
                step = self._measure(result)
                measured_step = result.step
                for observer in self.observers:
                    observer(step)
                if self.ending.is_last(result.step):
                    return
        except WorkerLost as loss:
            self.saving.finish()
            newest = f"of step {self.saving.saved}" if self.saving.saved else "none"
            reason = f"after step {measured_step}: {loss} (newest checkpoint: {newest})"
            raise WorkerLost(reason, loss.restarts) from loss
        except (TeacherError, VerifierError) as error:
            # A failure within a step comes before its update, so the weights are those after the
            # last measured step, which can be saved. If the update ran and the
            # evaluation failed, the step is repeated from the newest checkpoint.
            self.saving.finish()
            can_save = self.saving.saved < measured_step == trained_step
            if can_save and self.runner.has_all_rollouts():
                # A student at a service that failed cannot be saved there.
                with suppress(TeacherError):
                    self.saving.save(measured_step)
            saved = self.saving.saved
            state = f"the state after step {saved} is saved" if saved else "nothing was learned yet"
            kind = VerifierError if isinstance(error, VerifierError) else TeacherError
            go_on = f"resume with {spell_options(resume=True)}"
            reason = f"step {measured_step + 1}: {error} ({state}; {go_on})"
            raise kind(reason) from error

    def _measure(self, result: StepResult) -> FinishedStep:
        """Add the readings of the step and of an evaluation that is due, and judge them."""
        # An evaluation asks the teacher too, and only one thread at a time may use it.
        if self.evaluator.is_due(result.step):
            self.runner.wait_until_idle()
        measured = self.watch.read(result, self.evaluator.evaluate_if_due(result.step))
        return FinishedStep(measured, self.watch.judge(measured.step, measured.metrics))


def open_watch(
    run_dir: RunDir, recipe: Recipe, schedule_state: ScheduleState, ending: Ending
) -> Watch:
    """Return the monitors as after the newest checkpoint, and repeat their recipe changes."""
    settings = resolve_recipe(recipe)

    def accepts(overrides: Sequence[str]) -> bool:
        """Return True if the overrides change the recipe and it stays valid."""
        changed = resolve_recipe(recipe)
        try:
            for text in overrides:
                override(changed, text)
            return resolve_recipe(parse_recipe(changed, "patch")) != settings
        except RecipeError:
            return False

    watch = Watch(settings, recipe.monitors, accepts)
    # Alarms of earlier steps may have changed schedules, which a checkpoint does not record.
    for alarm in watch.replay(read_rows(run_dir.metrics_jsonl, shapes.METRICS)):
        schedule_state.change(alarm.set)
        ending.finish_by(alarm)
    return watch
