"""One run in its folder: assemble, restore, evaluate, train with observers, and summarize."""

import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from practicum import run_dir as folders
from practicum.core.options import spell_options
from practicum.core.stopping import Stop
from practicum.errors import Interrupted
from practicum.monitors import PhaseSpeedMonitor
from practicum.ports.scoring import (
    name_role,
)
from practicum.recipe import Recipe
from practicum.report import write_report
from practicum.report.markup import format_duration
from practicum.report.tables import describe_cost
from practicum.run_dir import BestTracker, Checkpoint, Journal, RunDir
from practicum.runs import state
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.runs.console import Console
from practicum.runs.ending import Ending
from practicum.runs.examining import RunEvaluator
from practicum.runs.identity import note_dtypes, warn_of_equal_teacher
from practicum.runs.observers import (
    SECONDS_BETWEEN_CHECKPOINTS,
    CheckpointInterval,
    Observer,
    SaveCheckpoints,
    check_signals,
    leave_run,
    show_step,
    sound_alarms,
)
from practicum.runs.outcome import RunEvaluations, build_summary, print_outcome
from practicum.runs.records import RunJournals, count_lost_rows
from practicum.runs.result import RunResult
from practicum.runs.resuming import check_changes, write_recipe
from practicum.runs.tracked import RunTracker
from practicum.runs.traffic_file import open_traffic
from practicum.runs.training import Training, open_watch
from practicum.training.asynchronous import StepRunner, open_step_runner
from practicum.training.loop import train

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Session:
    """One run from its folder to its summary.

    `observers` are called after every step, in addition to the run's own. `exit_stack` closes
    everything that was opened, however the run ends.
    """

    run_dir: RunDir
    recipe: Recipe
    console: Console
    stop: Stop
    tracker: RunTracker
    exit_stack: ExitStack
    observers: Sequence[Observer] = ()
    started: float = field(default_factory=monotonic)

    def execute(self, allow_changed: Sequence[str] = (), *, resume: bool = False) -> RunResult:
        """Start or resume the run, and finish it."""
        run_dir, recipe = self.run_dir, self.recipe
        changes = check_changes(run_dir, recipe, allow_changed) if resume else []
        finished = self._read_finished(has_changed=bool(changes)) if resume else None
        if finished is not None:
            return finished
        checkpoint = state.find_newest(run_dir, recipe) if resume else None
        components = assemble_run(
            recipe,
            run_dir.models,
            run_dir.rejected_jsonl,
            run_dir.scores,
            self.exit_stack,
            keeps_records=True,
        )
        first = 1 if checkpoint is None else checkpoint.step + 1
        # The recipe is checked before the journals are cut, so a refused resume loses no rows.
        identity = write_recipe(run_dir, recipe, components, changes, first, allow_changed)
        note_dtypes(identity)
        if checkpoint is None:
            warn_of_equal_teacher(recipe, identity)
        components = open_traffic(run_dir, recipe, components, self.exit_stack)
        self._log_skipped_prompts(components)
        state.restore(run_dir, recipe, components, checkpoint)
        if first <= recipe.train.steps and recipe.backend.checkpoints_here:
            state.check_space(run_dir, components)
        evaluator = RunEvaluator(run_dir, recipe, components)
        evaluator.evaluate_before(is_trained=checkpoint is not None)
        evaluator.check_metric()
        self._write_start(first, components)
        self._raise_if_interrupted(first)
        ending = Ending(recipe.train)
        best = folders.recall_best(run_dir, recipe.train.metric_for_best_model)
        lost_rows = self._train(components, checkpoint, evaluator, ending, best)
        return self._summarize(components, evaluator.evaluate_after(), ending, best, lost_rows)

    def _read_finished(self, *, has_changed: bool) -> RunResult | None:
        """Return the result of a run that is already finished, or None."""
        if not self.run_dir.summary_json.is_file():
            return None
        summary = folders.read_json(self.run_dir.summary_json, folders.shapes.SUMMARY)
        if has_changed and self.recipe.train.steps > summary["steps"]:
            return None
        log.info(f"nothing to do: {self.run_dir.path} is finished; see its summary.json")
        if not self.run_dir.report_html.is_file():
            write_report(self.run_dir.path)
        return RunResult(self.run_dir.path, summary, self.recipe)

    def _log_skipped_prompts(self, components: RunComponents) -> None:
        """Log the number of training prompts that are left out."""
        if components.skipped_prompts:
            count = len(components.skipped_prompts)
            log.info(
                f"{count} of {count + len(components.parts.prompts)} prompts left out: longer than prompt_tokens "
                f"({self.recipe.prompt_tokens}) or no room to answer"
            )

    def _write_start(self, first: int, components: RunComponents) -> None:
        """Record the step at which the run started or resumed, and the package versions."""
        with closing(Journal(self.run_dir.path / "starts.jsonl", essential=False)) as starts:
            versions = folders.collect_versions(components.packages)
            starts.append({"first": first, "versions": versions})

    def _raise_if_interrupted(self, step: int) -> None:
        """Raise Interrupted if a signal arrived before training."""
        number = self.stop()
        if number is not None and step <= self.recipe.train.steps:
            reason = f"stopped by {signal.Signals(number).name} before step {step}"
            go_on = f"resume with {spell_options(resume=True)}"
            raise Interrupted(number, f"{reason}; nothing is lost, {go_on}")

    def _train(
        self,
        components: RunComponents,
        checkpoint: Checkpoint | None,
        evaluator: RunEvaluator,
        ending: Ending,
        best: BestTracker,
    ) -> dict[str, int]:
        """Train to the end from a checkpoint, if there is one.

        Returns the number of rows that could not be written, by the name of the journal.
        """
        first = 1 if checkpoint is None else checkpoint.step + 1
        in_flight = () if checkpoint is None else checkpoint.state.get("begun", ())
        ending.recall_spending(self.run_dir)
        watch = open_watch(self.run_dir, self.recipe, components.schedule_state, ending)
        if ending.reason is not None:
            log.info(f"no step is left to train: {ending.reason}")
            return count_lost_rows(checkpoint)
        steps, lag = self.recipe.train.steps, self.recipe.rollout.max_staleness
        rollouts_required = self.recipe.rollout.source.replays
        roles = self._find_synchronous_roles()
        self.console.begin(steps, first)
        with (
            RunJournals(
                self.run_dir,
                components.parts.renderer,
                rollouts_required=rollouts_required,
                checkpoint=checkpoint,
            ) as records,
            open_step_runner(
                components.parts, components.settings, steps, lag, roles, in_flight
            ) as runner,
            closing(
                self._open_saving(components, records, runner, ending, first - 1, best)
            ) as saving,
        ):
            # The order is a contract. Rows are on the disk before a checkpoint, so no checkpoint is
            # newer than its rows. An alarm that stops the run raises before the state is saved, so
            # the step that caused it is not kept; an alarm that pauses, and a signal, raise after
            # the save, so a resumed run continues from this step.
            observers: list[Observer] = [
                lambda step: records.write(step.result),
                lambda step: self.tracker.log(step.number, step.metrics),
                lambda step: ending.spending.add(step.metrics),
                lambda step: components.schedule_state.update(step.metrics),
                partial(show_step, self.console, PhaseSpeedMonitor(overlapping=lag > 0)),
                partial(sound_alarms, records, components.schedule_state, ending),
                *self.observers,
                partial(check_signals, self.stop, ending),
                saving.on_step,
                partial(leave_run, ending),
            ]
            results = train(first, steps, components.parts, components.settings, runner.step)
            Training(runner, watch, evaluator, ending, saving, observers).follow(results)
        for call in components.after_training:
            call()
        return records.lost_rows

    def _open_saving(
        self,
        components: RunComponents,
        records: RunJournals,
        runner: StepRunner,
        ending: Ending,
        saved: int,
        best: BestTracker,
    ) -> SaveCheckpoints:
        """Return the observer that saves checkpoints, after those up to `saved`."""
        train = self.recipe.train

        def prepare(step: int, tag: str | None = None, *, is_copied: bool) -> Callable[[], None]:
            return state.prepare_save(
                self.run_dir,
                self.recipe,
                components,
                runner,
                records,
                step,
                tag,
                kept_step=best.step,
                is_copied=is_copied,
            )

        return SaveCheckpoints(
            records,
            lambda step, tag: prepare(step, tag, is_copied=False)(),
            self._choose_interval(),
            ending,
            saved,
            copy=partial(prepare, is_copied=True) if train.save_in_background else None,
            best=best,
        )

    def _choose_interval(self) -> CheckpointInterval:
        """Return the recipe's steps between checkpoints, or ten minutes if it sets none."""
        steps = self.recipe.train.checkpoint_every
        # A service deletes no checkpoint, so only the recipe decides how many there are.
        is_timed = steps is None and self.recipe.backend.checkpoints_here
        return CheckpointInterval(steps, SECONDS_BETWEEN_CHECKPOINTS if is_timed else None)

    def _find_synchronous_roles(self) -> list[str]:
        """Return the roles that follow the student; only the training thread may query them."""
        teachers = {"teacher": self.recipe.teacher, "reference": self.recipe.reference}
        followers = [
            role
            for role, config in teachers.items()
            if config is not None and config.capabilities().follows_student
        ]
        return followers + [
            name_role(name)
            for name, config in self.recipe.scorers.items()
            if config.follows_student
        ]

    def _summarize(
        self,
        components: RunComponents,
        evaluations: RunEvaluations,
        ending: Ending,
        best: BestTracker,
        lost_rows: Mapping[str, int],
    ) -> RunResult:
        """Write the summary and the report, and show the outcome of the run."""
        model_shapes = components.parts.ledger.dims
        summary = build_summary(
            self.run_dir, self.recipe, evaluations, best, model_shapes, ending.reason, lost_rows
        )
        folders.write_json(self.run_dir.summary_json, summary)
        self.tracker.finish(summary)
        write_report(self.run_dir.path)
        # Two clocks with different names: the report shows the first, which continues after a resume.
        training = format_duration(ending.spending.totals["seconds"])
        total = format_duration(monotonic() - self.started)
        times = {
            "training time": f"{training} for {summary['rollouts']} rollouts",
            "since the start": f"{total}, with loading and evaluations",
        }
        cost = describe_cost(summary, self.recipe, ending.spending)
        folder = folders.shorten_path(self.run_dir.path)
        rows = {**times, **cost, "run folder": folder, "report": "report.html in it"}
        print_outcome(
            self.console, evaluations, summary, rows, folders.shorten_path(self.run_dir.path)
        )
        return RunResult(self.run_dir.path, summary, self.recipe)
