"""A run from its recipe to its report: evaluate, train, checkpoint, evaluate again, write everything down.

`metrics.jsonl`, `rollouts.jsonl` and `summary.json` hold nothing that depends on the clock, so a run that was killed and
resumed leaves the same bytes as one that was not; seconds go to `timings.jsonl`.
"""

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from torch import Tensor

from practicum import run_dir as folders
from practicum.assembly import Assembled, assemble_run, load_student
from practicum.asynchronous import Stages, stages
from practicum.costs import Spending
from practicum.diagnosis.monitors import Alarm, Pace, Watch, gravest, heldout
from practicum.diagnosis.report import write_report
from practicum.diagnosis.tables import FINISHED, SPENT, cost_lines, shown_sample, with_speed
from practicum.errors import AlarmError, CheckpointError, Interrupted, RecipeError, TeacherError
from practicum.evaluation import Evaluation, evaluate, evaluate_teacher
from practicum.loop import train
from practicum.objective import Objective
from practicum.outcome import Evaluations, show_outcome, summary_of
from practicum.ports import Backend, Learner
from practicum.recipe import Recipe, bring_up, load_recipe, override, parse_recipe, resolved
from practicum.records import Records, timings_jsonl
from practicum.rollouts import replays
from practicum.run_dir import Checkpoint, Journal, RunDir
from practicum.schedule import depends_on_steps
from practicum.stopping import Stop, stop_signals
from practicum.tracked import Tracked
from practicum.tracking import Console, Quiet
from practicum.types import Metrics

Section = Mapping[str, Any]
"""A section of a recipe as data, for example `{"type": "self", "weights": "frozen"}`."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """Where a run is and what it says about itself; `summary` is the content of summary.json."""

    folder: Path
    summary: dict[str, Any]


def run(
    recipe: Recipe | str | Path,
    overrides: Sequence[str] = (),
    *,
    out: str | Path = "runs",
    resume: bool = False,
    allow_changed: Sequence[str] = (),
    console: Console | None = None,
    stop: Stop | None = None,
) -> RunResult:
    """Run a recipe in a folder of `out` named after it; with `resume`, go on from its newest good checkpoint.

    `allow_changed` names the places of the recipe that may be other than when the run began, such as
    `optimizer.learning_rate`. `stop` is asked after every step; without it the run listens for SIGINT and SIGTERM itself.
    Raises a PracticumError with its documented exit code; what was computed until then is in the run folder.
    """
    console = console or Quiet()
    check_resumes(resume, allow_changed)
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    home = RunDir.open(Path(out) / recipe.name) if resume else RunDir.create(Path(out), recipe.name)
    signals = nullcontext(stop) if stop else stop_signals()
    with home.lock(), signals as asked, Tracked.open(recipe, home, console.event) as tracked, ExitStack() as ends:
        return _Run(home, recipe, console, asked, tracked, ends).go(resume, allow_changed)


def check_resumes(resume: bool, allow_changed: Sequence[str]) -> None:
    """Raise RecipeError where changes are allowed to a run that is to begin."""
    if allow_changed and not resume:
        raise RecipeError(f"{folders.FLAG} {allow_changed[0]}: a run that begins has nothing to change; add --resume")


def distill(  # noqa: PLR0913  (the sections of a recipe, by name)
    *,
    student: Section,
    teacher: Section,
    task: Section,
    objective: Section | Objective | None = None,
    rollout: Section | None = None,
    optimizer: Section | None = None,
    train: Section,
    evaluation: Section | None = None,
    monitors: Section | None = None,
    name: str = "distill",
    seed: int = 0,
    out: str | Path = "runs",
    resume: bool = False,
    allow_changed: Sequence[str] = (),
    console: Console | None = None,
) -> RunResult:
    """Run a recipe given as its sections, each as it stands in YAML; what is left out has the recipe's default.

    Example: `distill(student={"model": "Qwen/Qwen3-0.6B"}, teacher={"type": "model", "model": "Qwen/Qwen3-8B"},
    task={"type": "jsonl", "path": "prompts.jsonl"}, objective={"divergence": "jsd(0.3)"}, train={"steps": 100})`.
    Raises RecipeError with every problem found.
    """
    sections = {
        "student": student,
        "teacher": teacher,
        "task": task,
        "objective": objective.model_dump() if isinstance(objective, Objective) else objective,
        "rollout": rollout,
        "optimizer": optimizer,
        "train": train,
        "evaluation": evaluation,
        "monitors": monitors,
    }
    given = {key: section for key, section in sections.items() if section is not None}
    recipe = parse_recipe({"name": name, "seed": seed, **given}, "distill")
    return run(recipe, out=out, resume=resume, allow_changed=allow_changed, console=console)


def open_run(path: str | Path) -> tuple[RunDir, Recipe]:
    """Return an existing run folder and its recipe; CheckpointError where its recipe.json is damaged."""
    home = RunDir.open(Path(path))
    saved = folders.read_json(home.recipe_json, folders.SAVED_RUN)
    try:
        return home, parse_recipe(bring_up(saved["recipe"]), str(home.recipe_json))
    except RecipeError as error:
        more = f" and {len(error.problems) - 1} more" if len(error.problems) > 1 else ""
        raise CheckpointError(f"{error.problems[0]}{more}; {folders.RESTORE}") from error


def open_student(path: str | Path) -> tuple[Backend, Learner]:
    """Load the student of a run with the weights of its newest good checkpoint, and the backend that holds it."""
    home, recipe = open_run(path)
    checkpoint = _checkpoint_of(home)
    if not recipe.backend.checkpoints_here:
        where = ", ".join(checkpoint.tensors("student"))
        raise CheckpointError(
            f"{path}: the student is at a service, {where}, and its weights are not here; ask the service"
        )
    backend, student = load_student(recipe, home.models)
    backend.load(student, checkpoint.path, moments=False)
    return backend, student


def restored(home: RunDir, recipe: Recipe) -> Assembled:
    """The parts of a run with the weights of its newest good checkpoint."""
    built = assemble_run(recipe, home.models, None, lambda text: None)
    checkpoint = _checkpoint_of(home)
    built.backend.load(built.learner, checkpoint.path, moments=False)
    built.parts.teacher.load_state(teacher_tensors(checkpoint))
    return built


def _checkpoint_of(home: RunDir) -> Checkpoint:
    """Find the newest checkpoint that verifies; CheckpointError where there is none."""
    checkpoint, _ = folders.find_checkpoint(home)
    if checkpoint is None:
        raise CheckpointError(f"{home.path}: no checkpoint yet; resume the run, or give a model folder instead")
    return checkpoint


class _Run:
    """One run in progress."""

    def __init__(
        self, home: RunDir, recipe: Recipe, console: Console, stop: Stop, tracked: Tracked, ends: ExitStack
    ) -> None:
        self.home = home
        self.ends = ends
        self.tracked = tracked
        self.recipe = recipe
        self.console = console
        self.stop = stop
        self.started = monotonic()
        self._spending = Spending()
        self._evaluating: dict[str, Metrics] = {}
        self._finish: Alarm | None = None

    def go(self, resume: bool, allow_changed: Sequence[str]) -> RunResult:
        """All of it, in order."""
        changes = self._changes(allow_changed) if resume else []
        if resume and self.home.summary_json.is_file():
            summary = folders.read_json(self.home.summary_json, folders.SUMMARY)
            if not changes or self.recipe.train.steps <= summary["steps"]:
                self.console.event(f"nothing to do: {self.home.path} is finished; see its summary.json")
                if not self.home.report_html.is_file():
                    write_report(self.home.path)
                return RunResult(self.home.path, summary)
        built = assemble_run(
            self.recipe, self.home.models, self.home.rejected_jsonl, self.console.event, self.home.scores
        )
        self.ends.callback(built.close)
        checkpoint = self._newest_checkpoint() if resume else None
        first = 1 if checkpoint is None else checkpoint.step + 1
        self._write_recipe(built, changes, first)
        self._report_too_long(built)
        self._restore(built, checkpoint)
        if first <= self.recipe.train.steps and self.recipe.backend.checkpoints_here:
            of_teachers = _teacher_states(built, lambda role: None)
            size = sum(tensor.nbytes for named in of_teachers.values() for tensor in named.values())
            folders.check_space(self.home, built.learner.state_bytes + size)
        before, teacher = self._before(built, trained=checkpoint is not None)
        self._note_start(first, built.packages)
        self._stop_before(first)
        self._train(built, first, before, () if checkpoint is None else checkpoint.state.get("begun", ()))
        after = self._evaluate(built, "after training")
        folders.write_json(self.home.path / "after.json", {"student": _json(after)})
        self._evaluating["after"] = built.parts.ledger.take()
        evaluations = Evaluations(before, teacher, after, self._evaluating)
        summary = summary_of(self.home, self.recipe, evaluations, built.parts.ledger.shapes, self._end())
        folders.write_json(self.home.summary_json, summary)
        self.tracked.finish(summary)
        write_report(self.home.path)
        seconds = f"{monotonic() - self.started:.0f} s for {summary['rollouts']} rollouts"
        cost = cost_lines(summary, self.recipe, self._spending)
        where = {"run folder": near(self.home.path), "report": "report.html in it"}
        show_outcome(self.console, evaluations, summary, {"time": seconds, **cost, **where})
        return RunResult(self.home.path, summary)

    def _changes(self, allow_changed: Sequence[str]) -> list[folders.Difference]:
        """Return what was let change in the recipe; RecipeError, field by field, where anything else changed."""
        saved, now = resolved(open_run(self.home.path)[1]), resolved(self.recipe)
        changes, refused = folders.split_changes(saved, now, allow_changed)
        if refused:
            heading = f"{self.home.path}: the recipe changed since the run began; start a new run, or undo:"
            raise RecipeError([heading, *map(str, refused), *folders.proposal(refused, saved)])
        return changes

    def _newest_checkpoint(self) -> Checkpoint | None:
        """Find the newest checkpoint that verifies; RecipeError where the recipe ends before it."""
        checkpoint, warnings = folders.find_checkpoint(self.home)
        for warning in warnings:
            self.console.event(f"warning: {warning}")
        if checkpoint is not None and checkpoint.step > self.recipe.train.steps:
            raise RecipeError(
                f"train.steps is {self.recipe.train.steps}, and {self.home.path} has done {checkpoint.step} already; write at "
                f"least {checkpoint.step}"
            )
        return checkpoint

    def _write_recipe(self, built: Assembled, changes: Sequence[folders.Difference], first: int) -> None:
        """Write the resolved recipe, what the run depends on, and what was let change from step `first` on.

        Raises RecipeError where what the run depends on is not what is written there.
        """
        earlier: list[dict[str, Any]] = []
        identity = built.identify()
        if self.home.recipe_json.is_file():
            saved = folders.read_json(self.home.recipe_json, folders.SAVED_RUN)
            self._compare(saved.get("identity", {}), identity)
            # What is done again from an earlier checkpoint is done under the newer value.
            earlier = [{**change, "step": min(change["step"], first)} for change in saved.get("changes", [])]
        for change in changes:
            self.console.event(f"changed from step {first} on: {change}")
        self._tell_longer(changes)
        if changes:
            self.home.summary_json.unlink(missing_ok=True)  # a finished run that goes on is not finished
            self.home.report_html.unlink(missing_ok=True)
        folders.write_json(
            self.home.recipe_json,
            {
                "recipe": resolved(self.recipe),
                "identity": identity,
                "prompts": {"used": len(built.parts.prompts), "too_long": len(built.too_long)},
                "changes": earlier + [asdict(change.at(first)) for change in changes],
            },
        )

    def _compare(self, saved: Mapping[str, str], now: Mapping[str, str]) -> None:
        """Raise RecipeError where a model's file, the prompts or the held-out rows are not those that the run began with."""
        if not any("/" in name for name in saved):
            self.console.event(
                "warning: this run was begun before the files of models were written down one by one, so models and prompts are "
                "taken to be the same; from now on they are compared"
            )
            return
        changed = folders.changed_parts(saved, now)
        if changed:
            raise RecipeError(
                f"{self.home.path}: since the run began, {', '.join(changed)}; a run only resumes on the same models, prompts "
                "and held-out rows: put back what was there, or start a new run"
            )

    def _tell_longer(self, changes: Sequence[folders.Difference]) -> None:
        """Say which numbers follow another `train.steps`."""
        follow = [place for place, schedule in self.recipe.schedules.items() if depends_on_steps(schedule)]
        follow += [] if self.recipe.optimizer.schedule == "constant" else ["optimizer.schedule"]
        if follow and any(change.field == "train.steps" for change in changes):
            self.console.event(
                f"{' and '.join(follow)} from now on as if the run had been to have {self.recipe.train.steps} steps from the start"
            )

    def _report_too_long(self, built: Assembled) -> None:
        if built.too_long:
            count, total = len(built.too_long), len(built.too_long) + len(built.parts.prompts)
            self.console.event(
                f"{count} of {total} prompts left out: longer than prompt_tokens ({self.recipe.prompt_tokens}) or no room to answer"
            )

    def _restore(self, built: Assembled, checkpoint: Checkpoint | None) -> None:
        """Load a checkpoint, or none, and cut the journals back to it."""
        step = 0 if checkpoint is None else checkpoint.step
        with Records(self.home) as records:
            records.truncate_after(step)
        if checkpoint is None:
            return
        for line in folders.compare_versions(checkpoint.versions, folders.current_versions(built.packages)):
            self.console.event(f"warning: {line}; bit-exact resume is not promised")
        built.backend.load(built.learner, checkpoint.path)
        for role, teacher in built.teachers().items():
            teacher.load_state(teacher_tensors(checkpoint, role))
        built.courses.load_state(checkpoint.state.get("schedules", {}))
        if replays(self.recipe.rollout.source):
            rows = folders.read_rows(self.home.rollouts_jsonl, folders.ROLLOUT)
            built.parts.archive.restore(rows, built.parts.prompts, step)
        self.console.event(f"resumed after step {step}")

    def _before(self, built: Assembled, trained: bool) -> tuple[Evaluation | None, Evaluation | None]:
        """The evaluations before training, measured once and read back by a resumed run, whose weights have moved on."""
        path = self.home.path / "before.json"
        if path.is_file():
            saved = folders.read_json(path, folders.BEFORE)
            self._evaluating["before"] = saved.get("cost", {})
            student, teacher = (
                None if saved[who] is None else Evaluation.from_json(saved[who]) for who in ("student", "teacher")
            )
            asked = 0 if built.evaluation is None else len(built.evaluation.prompts) * built.evaluation.samples
            if student is not None and len(student.answers) != asked:
                raise CheckpointError(
                    f"{path} is damaged (student.answers: {len(student.answers)} instead of {asked}); {folders.RESTORE}"
                )
            return student, teacher
        if trained:
            self.console.event(f"warning: {path} is gone, so there is nothing to compare the trained student with")
            return None, None
        before = self._evaluate(built, "before training")
        teacher = None
        if before is not None and built.evaluation is not None and self.recipe.evaluation.teacher:
            self.console.event("evaluating the teacher in its own context")
            teacher = evaluate_teacher(built.parts.teacher, built.learner.renderer, built.parts.task, built.evaluation)
        cost = self._evaluating["before"] = built.parts.ledger.take()
        folders.write_json(path, {"student": _json(before), "teacher": _json(teacher), "cost": cost})
        return before, teacher

    def _note_start(self, first: int, packages: Sequence[str]) -> None:
        """Write down that the run began, or went on, at a step, and with which versions."""
        with closing(Journal(self.home.path / "starts.jsonl", essential=False)) as starts:
            starts.append({"first": first, "versions": folders.current_versions(packages)})

    def _stop_before(self, step: int) -> None:
        """Interrupted where a signal came while nothing was being trained."""
        number = self.stop()
        if number is not None and step <= self.recipe.train.steps:
            name = signal.Signals(number).name
            raise Interrupted(number, f"stopped by {name} before step {step}; nothing is lost, go on with --resume")

    def _evaluate(self, built: Assembled, when: str) -> Evaluation | None:
        if built.evaluation is None:
            return None
        self.console.event(f"evaluating {len(built.evaluation.prompts)} held-out prompts {when}")
        parts = built.parts
        return evaluate(parts.sampler, parts.renderer, parts.task, parts.teacher, built.evaluation)

    def _train(self, built: Assembled, first: int, before: Evaluation | None, begun: Sequence[Section]) -> None:
        steps = self.recipe.train.steps
        every = self.recipe.train.checkpoint_every
        self._recall_spending()
        watch = self._watch(built)
        if self._end() is not None:
            return
        self.console.begin(steps, first)
        lag = self.recipe.rollout.max_staleness
        pace = Pace(overlapping=lag > 0)
        done = saved = learned = first - 1
        shared = {"teacher": self.recipe.teacher, "reference": self.recipe.reference}
        here = [role for role, config in shared.items() if config is not None and config.capabilities().follows_student]
        with (
            Records(self.home, built.parts.renderer, replayed=replays(self.recipe.rollout.source)) as records,
            stages(built.parts, built.settings, steps, lag, here, begun) as ahead,
        ):
            try:
                for trained in train(first, steps, built.parts, built.settings, ahead.step):
                    learned = trained.step
                    if self._evaluates(learned):
                        ahead.rest()
                    result = watch.read(trained, self._heldout(built, trained.step, before))
                    records.write(result)
                    self.tracked.log(result.step, result.metrics)
                    self._spending.add(result.metrics)
                    built.courses.after_step(result.metrics)
                    done = result.step
                    self.console.step(done, with_speed(result.metrics), shown_sample(result.rollouts))
                    for line in pace.judge(result.metrics):
                        self.console.event(line)
                    alarms = watch.judge(done, result.metrics)
                    records.write_alarms(alarms)
                    self._sound(built, alarms)
                    ended = done == steps or self._end() is not None
                    number = self.stop()
                    regular = every is not None and done % every == 0
                    if ended or number is not None or regular or tag_of(alarms) is not None:
                        records.sync()
                        self._checkpoint(built, ahead, done, tag_of(alarms))
                        saved = done
                    self._pause(alarms)
                    if number is not None and not ended:
                        raise Interrupted(
                            number,
                            f"stopped by {signal.Signals(number).name} after step {done} of {steps}; the state is saved, "
                            "go on with --resume",
                        )
                    if ended:
                        break
            except TeacherError as error:
                # A teacher that fails within a step fails before anything is learned from it; a step that was learned but
                # could not be evaluated is begun anew from the newest checkpoint.
                if saved < done == learned and ahead.whole():
                    with suppress(TeacherError):  # a student at a service that failed cannot be saved there
                        records.sync()
                        self._checkpoint(built, ahead, done, None)
                        saved = done
                kept = f"the state after step {saved} is saved" if saved else "nothing was learned yet"
                raise TeacherError(f"step {done + 1}: {error} ({kept}; go on with --resume)") from error
        for line in records.losses():
            self.console.event(f"warning: {line}")
        for remark in built.remarks:
            self.console.event(remark())

    def _watch(self, built: Assembled) -> Watch:
        """The monitors, where they stood after the newest checkpoint, and what they had changed by then."""
        watch = Watch(resolved(self.recipe), self.recipe.monitors, self._accepts)
        for alarm in watch.replay(folders.read_rows(self.home.metrics_jsonl, folders.METRICS)):
            built.courses.change(alarm.set)
            self._note_finish(alarm)
        return watch

    def _accepts(self, overrides: Sequence[str]) -> bool:
        """Whether the recipe can be changed so."""
        data = resolved(self.recipe)
        try:
            for text in overrides:
                override(data, text)
            return resolved(parse_recipe(data, "patch")) != resolved(self.recipe)
        except RecipeError:
            return False

    def _heldout(self, built: Assembled, step: int, before: Evaluation | None) -> Metrics:
        """What an evaluation says where one is due within the training."""
        if not self._evaluates(step):
            return {}
        now = self._evaluate(built, f"after step {step}")
        built.parts.ledger.take()  # an evaluation is not what the step cost
        return {} if now is None else heldout(before, now, self.recipe.seed)

    def _evaluates(self, step: int) -> bool:
        """Whether an evaluation is due within the training."""
        every = self.recipe.evaluation.every
        return every is not None and step % every == 0 and step != self.recipe.train.steps

    def _sound(self, built: Assembled, alarms: Sequence[Alarm]) -> None:
        """Say what the monitors found, change what the recipe lets them change, and end the run where one asks for it."""
        for alarm in alarms:
            built.courses.change(alarm.set)
            if alarm.action != "log":
                self.console.event(f"alarm: {alarm.line()}")
            if self._note_finish(alarm):
                self.console.event(f"finished after step {alarm.step} of {self.recipe.train.steps}, as {alarm.id} asks")
        worst = gravest(alarms)
        if worst is not None and worst.action == "stop":
            raise AlarmError(
                f"stopped by {worst.line()}; this step's weights are not kept, the newest checkpoint is from before: go on from it "
                f"with --resume monitors.{worst.id}=warn, or start again with the change"
            )

    def _pause(self, alarms: Sequence[Alarm]) -> None:
        """AlarmError, after the state was saved, where a monitor asks to be looked at before the run goes on."""
        worst = gravest(alarms)
        if worst is not None and worst.action == "pause" and worst.step < self.recipe.train.steps:
            raise AlarmError(
                f"paused by {worst.line()}; the state is saved: look, then go on with --resume, or start again with the change"
            )

    def _note_finish(self, alarm: Alarm) -> bool:
        """Whether a monitor ends the run well here, before its last step; the first that did is remembered."""
        finishes = alarm.action == "finish" and alarm.step < self.recipe.train.steps
        if finishes and self._finish is None:
            self._finish = alarm
        return finishes

    def _end(self) -> str | None:
        """Why the run ends before all of its steps are done, or None."""
        if self._finish is not None:
            return f"{FINISHED} {self._finish.id} {self._finish.name}"
        spent = self._over_budget()
        return None if spent is None else f"{SPENT}: no further step fits its {spent}"

    def _recall_spending(self) -> None:
        """What the steps before the resume spent, from the rows about them."""
        for path, shape in ((self.home.metrics_jsonl, folders.METRICS), (timings_jsonl(self.home), folders.TIMINGS)):
            for row in folders.read_rows(path, shape) if path.is_file() else ():
                self._spending.add(row)

    def _over_budget(self) -> str | None:
        """Which part of the budget another step would exceed, or None; it is taken to cost as much as the dearest of late."""
        budget = self.recipe.train.budget
        return None if budget is None else budget.exceeded(self._spending.spent, self._spending.next_step)

    def _checkpoint(self, built: Assembled, ahead: Stages, step: int, tag: str | None) -> None:
        tensors = _teacher_states(built, ahead.teacher_state)
        state = {"step": step, "schedules": built.courses.save_state()}
        begun = ahead.save_state()
        if begun:
            state["begun"] = begun
        folders.save_checkpoint(
            self.home,
            step,
            tensors,
            state,
            writer=folders.Writer(lambda folder: built.backend.save(built.learner, folder), built.learner.state_bytes),
            keep=self.recipe.train.keep_checkpoints,
            tag=tag,
            packages=built.packages,
        )


def _teacher_states(
    built: Assembled, newest: Callable[[str], Mapping[str, Tensor] | None]
) -> dict[str, dict[str, Tensor]]:
    """Return what a checkpoint holds of the teachers; `newest` is the state of one that is asked ahead."""
    tensors: dict[str, dict[str, Tensor]] = {}
    for role, teacher in built.teachers().items():
        known = newest(role)
        own = teacher.save_state() if known is None else dict(known)
        if own:
            tensors[role] = own
    return tensors


def tag_of(alarms: Sequence[Alarm]) -> str | None:
    """Why the checkpoint of a step is to be kept, where an alarm says so."""
    lines = [alarm.line() for alarm in alarms if alarm.action in ("checkpoint", "finish", "pause")]
    return "\n".join(lines) if lines else None


def teacher_tensors(checkpoint: Checkpoint, role: str = "teacher") -> dict[str, Tensor]:
    """The own tensors of the teacher or of the reference, where it has any."""
    return checkpoint.tensors(role) if (checkpoint.path / f"{role}.safetensors").is_file() else {}


def _json(evaluation: Evaluation | None) -> dict[str, Any] | None:
    return None if evaluation is None else asdict(evaluation)


def near(path: Path) -> str:
    """The path as a person would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
