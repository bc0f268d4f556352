"""The runner of stages: each is a run in a folder of its own, begun where an earlier one ended."""

import hashlib
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from practicum import runs
from practicum.core.calls import did_you_mean
from practicum.core.faults import fault
from practicum.core.notes import show_notes
from practicum.core.stopping import Stop, catch_stop_signals
from practicum.errors import Interrupted, RecipeError
from practicum.models.config import ModelConfig, ScratchConfig
from practicum.recipe import Recipe, bring_up
from practicum.recipe.methods import describe_method
from practicum.report.pipeline import write_pipeline_report
from practicum.report.tables import accuracy_by_stage
from practicum.run_dir import (
    FLAG,
    RunDir,
    changed_fields,
    near,
    proposal,
    read_json,
    shapes,
    split_changes,
    write_json,
)
from practicum.runs import RunResult, open_student
from practicum.runs.assembly import build_task, make_scratch
from practicum.runs.console import Console, SilentConsole
from practicum.runs.pipeline.reading import (
    BASE,
    OWN,
    WORDS,
    Pipeline,
    Stage,
    folder_of,
    load_pipeline_or_recipe,
    omit_keys,
)


def run(
    recipe: Recipe | Pipeline | str | Path,
    overrides: Sequence[str] = (),
    *,
    out: str | Path = "runs",
    resume: bool = False,
    allow_changed: Sequence[str] = (),
    console: Console | None = None,
) -> RunResult:
    """Run a recipe or a pipeline in a folder of `out` named after it; with `resume`, go on where it stopped.

    `allow_changed` names the places of the recipe that may be other than when the run began, such as
    `optimizer.learning_rate`, or `stages.NAME.optimizer.learning_rate` for the stage of a pipeline that is going on.
    Raises a PracticumError with its documented exit code; what was computed until then is in the run folder.
    """
    runs.check_resumes(resume, allow_changed)
    found = (
        recipe
        if isinstance(recipe, Recipe | Pipeline)
        else load_pipeline_or_recipe(recipe, overrides)
    )
    if isinstance(found, Recipe):
        return runs.run(found, out=out, resume=resume, allow_changed=allow_changed, console=console)
    _check_stages(allow_changed, [stage.name for stage in found.stages])
    name = found.recipe.name
    home = (
        RunDir.open_pipeline(Path(out) / name)
        if resume
        else RunDir.create_pipeline(Path(out), name)
    )
    notes = show_notes(console.event) if console else nullcontext()
    with notes, home.lock():
        return _PipelineRun(found, home, console or SilentConsole(), allow_changed).go()


def _check_stages(allow_changed: Sequence[str], names: Sequence[str]) -> None:
    """Raise RecipeError where a change is allowed to a stage that there is not."""
    for key in allow_changed:
        first, _, rest = key.partition(".")
        name = rest.partition(".")[0]
        if first == "stages" and name not in names:
            raise RecipeError(f"{FLAG} {key}: no stage named {name!r}; {did_you_mean(name, names)}")


class _PipelineRun:
    """One pipeline in progress."""

    def __init__(
        self, pipeline: Pipeline, home: RunDir, console: Console, allow_changed: Sequence[str]
    ) -> None:
        self.pipeline = pipeline
        self.allow_changed = allow_changed
        self.home = home
        self.console = console
        self.started = monotonic()
        self.heading = "before the first stage"

    def go(self) -> RunResult:
        """All stages that are not finished, in order, and then the whole."""
        unchanged = self._refuse_changes()
        if unchanged and self.home.report_html.is_file():
            self.console.event(f"nothing to do: {self.home.path} is finished; see its summary.json")
            return RunResult(
                self.home.path, read_json(self.home.summary_json, shapes.PIPELINE_SUMMARY)
            )
        write_json(self.home.pipeline_json, self.pipeline.resolved())
        try:
            with catch_stop_signals() as stop:
                for stage in self.pipeline.stages:
                    self._run(stage, stop)
        except Interrupted as stopped:
            raise Interrupted(stopped.exit_code - 128, f"{self.heading}: {stopped}") from None
        summary = self._summary()
        write_json(self.home.summary_json, summary)
        write_pipeline_report(self.home.path)
        self._show(summary)
        return RunResult(self.home.path, summary)

    def _refuse_changes(self) -> bool:
        """Whether the pipeline is as it began; RecipeError where what changed has already been trained with."""
        if not self.home.pipeline_json.is_file():
            return False
        saved, now = read_json(self.home.pipeline_json, shapes.PIPELINE), self.pipeline.resolved()
        saved = {**saved, "stages": [bring_up(stage) for stage in saved["stages"]]}
        refused, proposed, changed = [], [], []
        for place, before in enumerate(saved["stages"]):
            after = now["stages"][place] if place < len(now["stages"]) else {}
            old, new = omit_keys(before, *WORDS), omit_keys(after, *WORDS)
            folder = self.home.stages / folder_of(place + 1, before["name"])
            if any(folder.glob("checkpoints/step-*")):
                finished = (
                    folder / "report.html"
                ).is_file()  # others may have begun from where it ended
                _, left = split_changes(old, new, () if finished else self._allowed(before["name"]))
                refused += [f"stages[{place}] ({before['name']}).{line}" for line in left]
                proposed += [] if finished else proposal(left, old, f"stages.{before['name']}.")
            elif changed_fields(old, new) and folder.is_dir():
                changed.append(folder)
        if any(self.home.stages.glob("*/checkpoints/step-*")):
            refused += changed_fields(
                omit_keys(saved, "stages", *OWN), omit_keys(now, "stages", *OWN)
            )
        if refused:
            heading = (
                f"{self.home.path}: the recipe changed since it began; start a new run, or undo:"
            )
            raise RecipeError([heading, *refused, *proposed])
        for folder in changed:
            shutil.rmtree(folder)  # a stage that has saved no step begins anew
        return saved == now

    def _allowed(self, stage: str) -> list[str]:
        """Return the places that may have changed in a stage: those of all stages and its own."""
        own = f"stages.{stage}."
        return [
            key.removeprefix(own)
            for key in self.allow_changed
            if not key.startswith("stages.") or key.startswith(own)
        ]

    def _run(self, stage: Stage, stop: Stop) -> None:
        """Run one stage, or go on with it, and write its student for the stages after it."""
        count = len(self.pipeline.stages)
        slot = f" ({stage.data['slot'].replace('_', ' ')})" if stage.data.get("slot") else ""
        self.heading = f"stage {stage.number} of {count}: {stage.name}{slot}"
        folder = self.home.stages / stage.folder
        finished = (folder / "report.html").is_file()
        self.console.event(f"{self.heading}{', finished' if finished else ''}")
        if not finished:
            recipe, begun = stage.recipe(self._model_of), (folder / "recipe.json").is_file()
            allowed = self._allowed(stage.name) if begun else ()
            runs.run(
                recipe,
                out=self.home.stages,
                resume=begun,
                allow_changed=allowed,
                console=self.console,
                stop=stop,
            )
        fault("stage.done")
        _export_student(folder)
        fault("stage.exported")
        number = stop()
        if number is not None and stage.number < count:
            name = signal.Signals(number).name
            raise Interrupted(number, f"stopped by {name} after its last step; go on with --resume")

    def _model_of(self, model: Mapping[str, Any]) -> str:
        """The folder of a stage's final student or of a model from scratch, or the name of what the pipeline starts from."""
        if "stage" not in model:
            return self._make_scratch_folder(ModelConfig(model=ScratchConfig.model_validate(model)))
        if model["stage"] == BASE:
            student = self.pipeline.recipe.student
            return (
                student.model
                if isinstance(student.model, str)
                else self._make_scratch_folder(student)
            )
        (stage,) = (stage for stage in self.pipeline.stages if stage.name == model["stage"])
        return str(self.home.stages / stage.folder / "model")

    def _make_scratch_folder(self, config: ModelConfig) -> str:
        """The folder of a model from scratch, made once for all stages, on the task that they share."""
        assert isinstance(config.model, ScratchConfig)
        name = f"scratch-{hashlib.sha256(config.model.model_dump_json().encode()).hexdigest()[:12]}"
        folder = self.home.models / name
        if not folder.is_dir():
            recipe = self.pipeline.recipe
            if recipe.train.threads is not None:
                torch.set_num_threads(recipe.train.threads)
            self.console.event(f"making a model from scratch: {name}")
            task = build_task(recipe)
            make_scratch(folder, config.model, task)
        return str(folder)

    def _summary(self) -> dict[str, Any]:
        """Every stage's own summary, and the accuracy after each stage on each domain."""
        methods = {
            name: describe_method(recipe) for name, recipe in self.pipeline.recipes().items()
        }
        summaries = []
        for stage in self.pipeline.stages:
            found = read_json(self.home.stages / stage.folder / "summary.json", shapes.SUMMARY)
            own = {"name": stage.name, "start": stage.start, "method": methods[stage.name]}
            summaries.append(
                {**own, "folder": f"stages/{stage.folder}", **omit_keys(found, "samples", "name")}
            )
        measured = [
            (BASE, summaries[0]["before"]),
            *((summary["name"], summary["after"]) for summary in summaries),
        ]
        accuracy = [
            {"stage": name, "all": evaluation["accuracy"], "by_domain": evaluation["by_domain"]}
            for name, evaluation in measured
            if evaluation is not None
        ]
        return {
            "name": self.pipeline.recipe.name,
            "seed": self.pipeline.recipe.seed,
            "stages": summaries,
            "domains": list(
                dict.fromkeys(domain for row in accuracy for domain in row["by_domain"])
            ),
            "accuracy": accuracy,
        }

    def _show(self, summary: Mapping[str, Any]) -> None:
        """The end of a pipeline as a person wants to see it."""
        if summary["accuracy"]:
            columns = ["after", "accuracy", *summary["domains"], "steps", "ended"]
            self.console.table("held-out accuracy by stage", columns, accuracy_by_stage(summary))
        seconds = f"{monotonic() - self.started:.0f} s for {len(summary['stages'])} stages"
        self.console.finish(
            {"time": seconds, "run folder": near(self.home.path), "report": "report.html in it"}
        )


def _export_student(folder: Path) -> None:
    """Write the final student of a stage as a model folder, once."""
    if (folder / "model").is_dir():
        return
    for leftover in folder.glob("model.tmp-*"):
        shutil.rmtree(leftover)
    backend, student = open_student(folder)
    backend.export(student, folder / "model")
