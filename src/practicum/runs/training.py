"""The steps of a run: measured, judged by the monitors, and given to every observer in turn."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from practicum.errors import RecipeError, TeacherError, VerifierError
from practicum.monitors import Watch
from practicum.recipe import Recipe, override, parse_recipe, resolved
from practicum.recipe.schedule import ScheduleState
from practicum.run_dir import RunDir, read_rows, shapes
from practicum.runs.ending import Ending
from practicum.runs.examining import Examination
from practicum.runs.observers import FinishedStep, Observer, SaveCheckpoints
from practicum.training.asynchronous import Stages
from practicum.training.loop import StepResult


@dataclass(frozen=True, slots=True)
class Training:
    """Give every step to the monitors and then to each observer in turn; `saving` is one of them."""

    ahead: Stages
    watch: Watch
    examination: Examination
    ending: Ending
    saving: SaveCheckpoints
    observers: Sequence[Observer]

    def follow(self, results: Iterable[StepResult]) -> None:
        """Observe step after step until the run ends.

        Raises TeacherError or VerifierError, which says what is saved, where a teacher, a verifier or an environment fails.
        """
        done = learned = self.saving.saved
        try:
            for result in results:
                learned = result.step
                step = self._measure(result)
                done = result.step
                for observer in self.observers:
                    observer.on_step(step)
                if self.ending.comes_after(done):
                    return
        except (TeacherError, VerifierError) as error:
            # What fails within a step fails before anything is learned from it; a step that was learned but could not be
            # evaluated is begun anew from the newest checkpoint.
            if self.saving.saved < done == learned and self.ahead.whole():
                with suppress(
                    TeacherError
                ):  # a student at a service that failed cannot be saved there
                    self.saving.save(done)
            saved = self.saving.saved
            kept = f"the state after step {saved} is saved" if saved else "nothing was learned yet"
            kind = VerifierError if isinstance(error, VerifierError) else TeacherError
            raise kind(f"step {done + 1}: {error} ({kept}; go on with --resume)") from error

    def _measure(self, result: StepResult) -> FinishedStep:
        """Add the readings, and what an evaluation finds where one is due; judge them."""
        if self.examination.is_due(result.step):
            self.ahead.rest()
        measured = self.watch.read(result, self.examination.within(result.step))
        return FinishedStep(measured, self.watch.judge(measured.step, measured.metrics))


def open_watch(home: RunDir, recipe: Recipe, courses: ScheduleState, ending: Ending) -> Watch:
    """Return the monitors where they stood after the newest checkpoint, what they had changed by then changed again."""
    settings = resolved(recipe)

    def accepts(overrides: Sequence[str]) -> bool:
        """Return whether the recipe can be changed so."""
        data = resolved(recipe)
        try:
            for text in overrides:
                override(data, text)
            return resolved(parse_recipe(data, "patch")) != settings
        except RecipeError:
            return False

    watch = Watch(settings, recipe.monitors, accepts)
    for alarm in watch.replay(read_rows(home.metrics_jsonl, shapes.METRICS)):
        courses.change(alarm.set)
        ending.finish_by(alarm)
    return watch
