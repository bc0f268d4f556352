"""One run in its folder: built, gone back to where it stopped, evaluated, trained with observers after every step, summed up."""

import logging
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from practicum import run_dir as folders
from practicum.core.stopping import Stop
from practicum.errors import Interrupted
from practicum.monitors import PhaseSpeedMonitor
from practicum.recipe import Recipe
from practicum.report import write_report
from practicum.report.tables import cost_lines
from practicum.rollouts import replays
from practicum.run_dir import Journal, RunDir
from practicum.runs import state
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.runs.console import Console
from practicum.runs.ending import Ending
from practicum.runs.examining import Examination
from practicum.runs.observers import (
    CountSpending,
    HearSignals,
    LeaveRun,
    MoveSchedules,
    Observer,
    SaveCheckpoints,
    SendMetrics,
    ShowStep,
    SoundAlarms,
    WriteRows,
)
from practicum.runs.outcome import RunEvaluations, build_summary, print_outcome
from practicum.runs.records import RunJournals
from practicum.runs.resuming import changes_of, write_recipe
from practicum.runs.tracked import RunTracker
from practicum.runs.training import Training, open_watch
from practicum.training.asynchronous import open_step_runner
from practicum.training.loop import train

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunResult:
    """Where a run is and what it says about itself; `summary` is the content of summary.json."""

    folder: Path
    summary: dict[str, Any]


@dataclass(slots=True)
class Session:
    """A run from its folder to its summary; `observers` are asked after every step besides the run's own.

    `at_end` takes what is to be closed when the run is over, however it ends.
    """

    home: RunDir
    recipe: Recipe
    console: Console
    stop: Stop
    tracked: RunTracker
    at_end: ExitStack
    observers: Sequence[Observer] = ()
    started: float = field(default_factory=monotonic)

    def go(self, resume: bool, allow_changed: Sequence[str]) -> RunResult:
        """Begin the run, or go on with it, and see it through."""
        home, recipe = self.home, self.recipe
        changes = changes_of(home, recipe, allow_changed) if resume else []
        finished = self._read_finished(changed=bool(changes)) if resume else None
        if finished is not None:
            return finished
        built = assemble_run(recipe, home.models, home.rejected_jsonl, home.scores, self.at_end)
        checkpoint = state.find_newest(home, recipe) if resume else None
        first = 1 if checkpoint is None else checkpoint.step + 1
        write_recipe(home, recipe, built, changes, first)
        self._tell_too_long(built)
        state.restore(home, recipe, built, checkpoint)
        if first <= recipe.train.steps and recipe.backend.checkpoints_here:
            state.check_space(home, built)
        examination = Examination(home, recipe, built)
        examination.before(trained=checkpoint is not None)
        self._write_start(first, built)
        self._stop_before(first)
        ending = Ending(recipe.train)
        self._train(
            built,
            first,
            examination,
            ending,
            () if checkpoint is None else checkpoint.state.get("begun", ()),
        )
        return self._sum_up(built, examination.after(), ending)

    def _read_finished(self, changed: bool) -> RunResult | None:
        """Return the result of a run that has nothing left to do, or None."""
        if not self.home.summary_json.is_file():
            return None
        summary = folders.read_json(self.home.summary_json, folders.shapes.SUMMARY)
        if changed and self.recipe.train.steps > summary["steps"]:
            return None
        log.info(f"nothing to do: {self.home.path} is finished; see its summary.json")
        if not self.home.report_html.is_file():
            write_report(self.home.path)
        return RunResult(self.home.path, summary)

    def _tell_too_long(self, built: RunComponents) -> None:
        """Note how many prompts are left out."""
        if built.too_long:
            count, total = len(built.too_long), len(built.too_long) + len(built.parts.prompts)
            log.info(
                f"{count} of {total} prompts left out: longer than prompt_tokens ({self.recipe.prompt_tokens}) or no room to answer"
            )

    def _write_start(self, first: int, built: RunComponents) -> None:
        """Write down that the run began, or went on, at a step, and with which versions."""
        with closing(Journal(self.home.path / "starts.jsonl", essential=False)) as starts:
            starts.append({"first": first, "versions": folders.current_versions(built.packages)})

    def _stop_before(self, step: int) -> None:
        """Raise Interrupted where a signal came while nothing was being trained."""
        number = self.stop()
        if number is not None and step <= self.recipe.train.steps:
            name = signal.Signals(number).name
            raise Interrupted(
                number,
                f"stopped by {name} before step {step}; nothing is lost, go on with --resume",
            )

    def _train(
        self,
        built: RunComponents,
        first: int,
        examination: Examination,
        ending: Ending,
        begun: Sequence[Mapping[str, Any]],
    ) -> None:
        """Train to the end, each step followed by what its observers do; `begun` is what a checkpoint holds of later steps."""
        ending.recall_spending(self.home)
        watch = open_watch(self.home, self.recipe, built.courses, ending)
        if ending.reason is not None:
            return
        steps, lag = self.recipe.train.steps, self.recipe.rollout.max_staleness
        replayed = replays(self.recipe.rollout.source)
        self.console.begin(steps, first)
        with (
            RunJournals(self.home, built.parts.renderer, replayed) as records,
            open_step_runner(
                built.parts, built.settings, steps, lag, self._in_turn(), begun
            ) as ahead,
        ):
            save = partial(state.save, self.home, self.recipe, built, ahead)
            saving = SaveCheckpoints(
                records, save, self.recipe.train.checkpoint_every, ending, saved=first - 1
            )
            # The order is a contract. Rows are on the disk before a checkpoint, so no checkpoint is newer than its rows. An alarm
            # that stops the run raises before the state is saved, so the step that caused it is not kept; an alarm that
            # pauses, and a signal, raise after it, so a resumed run goes on from this step.
            observers = [
                WriteRows(records),
                SendMetrics(self.tracked),
                CountSpending(ending),
                MoveSchedules(built.courses),
                ShowStep(self.console, PhaseSpeedMonitor(overlapping=lag > 0)),
                SoundAlarms(records, built.courses, ending),
                *self.observers,
                HearSignals(self.stop, ending),
                saving,
                LeaveRun(ending),
            ]
            results = train(first, steps, built.parts, built.settings, ahead.step)
            Training(ahead, watch, examination, ending, saving, observers).follow(results)
        for line in records.losses():
            log.warning(line)
        for call in built.after_training:
            call()

    def _in_turn(self) -> list[str]:
        """Return the roles that follow the student, which are asked in the learner's thread."""
        roles = {"teacher": self.recipe.teacher, "reference": self.recipe.reference}
        return [
            role
            for role, config in roles.items()
            if config is not None and config.capabilities().follows_student
        ]

    def _sum_up(
        self, built: RunComponents, evaluations: RunEvaluations, ending: Ending
    ) -> RunResult:
        """Write the summary and the report, and show what came of the run."""
        summary = build_summary(
            self.home, self.recipe, evaluations, built.parts.ledger.shapes, ending.reason
        )
        folders.write_json(self.home.summary_json, summary)
        self.tracked.finish(summary)
        write_report(self.home.path)
        seconds = f"{monotonic() - self.started:.0f} s for {summary['rollouts']} rollouts"
        cost = cost_lines(summary, self.recipe, ending.spending)
        where = {"run folder": folders.near(self.home.path), "report": "report.html in it"}
        print_outcome(self.console, evaluations, summary, {"time": seconds, **cost, **where})
        return RunResult(self.home.path, summary)
