"""Run the stages of a pipeline: each is a run in its own folder."""

import hashlib
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from practicum import runs
from practicum.core.calls import suggest_name
from practicum.core.faults import inject_fault
from practicum.core.options import spell_options
from practicum.core.stopping import Stop, catch_stop_signals
from practicum.errors import Interrupted, RecipeError
from practicum.models.config import MergeConfig, ModelConfig, ScratchConfig
from practicum.models.merging import merge_models
from practicum.models.sources import find_folder, locate
from practicum.recipe import Recipe
from practicum.recipe.methods import describe_method
from practicum.report.pipeline import write_pipeline_report
from practicum.report.tables import build_stage_rows
from practicum.run_dir import (
    RunDir,
    list_changed_fields,
    propose_flags,
    read_json,
    shapes,
    shorten_path,
    split_changes,
    write_json,
)
from practicum.runs import RunResult, open_student
from practicum.runs.console import Console
from practicum.runs.naming import choose_name, explain_name
from practicum.runs.opening import (
    build_task,
    create_scratch_model,
    is_launched,
    join_processes,
)
from practicum.runs.preflight import check_before_run
from practicum.runs.progress import show_progress
from practicum.runs.stages import (
    BASE,
    PIPELINE_KEYS,
    WORDS,
    Pipeline,
    Stage,
    drop_keys,
    load_pipeline_or_recipe,
    name_folder,
)


def run(  # noqa: PLR0913  (the options of a run, one by one)
    recipe: Recipe | Pipeline | str | Path,
    overrides: Sequence[str] = (),
    *,
    out: str | Path = "runs",
    resume: bool = False,
    allow_changed: Sequence[str] = (),
    overwrite: bool = False,
    progress: bool = True,
    console: Console | None = None,
) -> RunResult:
    """Run a recipe or a pipeline in a folder of `out` named after it, or resume it.

    `allow_changed` names recipe fields that may differ from the start of the run, such as
    `optimizer.learning_rate`, or `stages.NAME.optimizer.learning_rate` for the unfinished stage of
    a pipeline. If the run of that name is finished, the new run is NAME-2, NAME-3 and so on.
    `overwrite` replaces an earlier run in the folder. Progress is shown on the screen
    unless `progress` is off. Raises a PracticumError with its documented exit code; the results
    until then are in the run folder.
    """
    runs.check_resumes(resume, allow_changed, overwrite=overwrite)
    with show_progress(console, progress=progress) as screen:
        if not isinstance(recipe, Recipe | Pipeline):
            source, recipe = str(recipe), load_pipeline_or_recipe(recipe, overrides)
        else:
            source = None
        if not resume:
            check_before_run(recipe, source, overrides)
        if isinstance(recipe, Recipe):
            return runs.run(
                recipe,
                out=out,
                resume=resume,
                allow_changed=allow_changed,
                overwrite=overwrite,
                console=screen,
            )
        _check_stages(allow_changed, [stage.name for stage in recipe.stages])
        _check_backends(recipe)
        out, original = Path(out), recipe.recipe.name
        name = original if resume or overwrite else choose_name(out, original)
        recipe = replace(recipe, recipe=recipe.recipe.model_copy(update={"name": name}))
        with (
            explain_name(original, name),
            runs.record_loss(out / name),
            join_processes(recipe.recipe.backend) as leads,
        ):
            if not leads:
                return RunResult.read(out / name)
            run_dir = (
                RunDir.open_pipeline(out / name)
                if resume
                else RunDir.create_pipeline(out, name, overwrite=overwrite)
            )
            with run_dir.lock():
                return _PipelineRun(recipe, run_dir, screen, allow_changed).execute()


def _check_stages(allow_changed: Sequence[str], names: Sequence[str]) -> None:
    """Raise RecipeError if a change is allowed for a stage that does not exist."""
    for key in allow_changed:
        first, _, path = key.partition(".")
        name = path.partition(".")[0]
        if first == "stages" and name not in names:
            option = spell_options(allow_changed=[key])
            raise RecipeError(f"{option}: no stage named {name!r}; {suggest_name(name, names)}")


def _check_backends(pipeline: Pipeline) -> None:
    """Raise RecipeError if a stage needs other processes than the launcher started for all
    stages."""
    shared = pipeline.recipe.backend
    for name, recipe in pipeline.build_recipes().items():
        if recipe.backend != shared and (is_launched(shared) or is_launched(recipe.backend)):
            raise RecipeError(
                f"{pipeline.recipe.name}: stages.{name}.backend: the processes of a launcher run all "
                "stages; set one backend next to `stages`, and none in a stage"
            )


class _PipelineRun:
    """One pipeline in progress."""

    def __init__(
        self, pipeline: Pipeline, run_dir: RunDir, console: Console, allow_changed: Sequence[str]
    ) -> None:
        self.pipeline = pipeline
        self.allow_changed = allow_changed
        self.run_dir = run_dir
        self.console = console
        self.started = monotonic()
        self.heading = "before the first stage"

    def execute(self) -> RunResult:
        """Run the unfinished stages in order, and summarize the pipeline."""
        is_unchanged = self._refuse_changes()
        if is_unchanged and self.run_dir.report_html.is_file():
            self.console.event(
                f"nothing to do: {self.run_dir.path} is finished; see its summary.json"
            )
            summary = read_json(self.run_dir.summary_json, shapes.PIPELINE_SUMMARY)
            return RunResult(self.run_dir.path, summary)
        write_json(self.run_dir.pipeline_json, self.pipeline.resolve())
        try:
            with catch_stop_signals() as stop:
                for stage in self.pipeline.stages:
                    self._run_stage(stage, stop)
        except Interrupted as error:
            raise Interrupted(error.exit_code - 128, f"{self.heading}: {error}") from None
        summary = self._build_summary()
        write_json(self.run_dir.summary_json, summary)
        write_pipeline_report(self.run_dir.path)
        self._show(summary)
        return RunResult(self.run_dir.path, summary)

    def _refuse_changes(self) -> bool:
        """Return True if the pipeline is unchanged since it began.

        Raises RecipeError if something changed that a stage has already trained with.
        """
        if not self.run_dir.pipeline_json.is_file():
            return False
        saved = read_json(self.run_dir.pipeline_json, shapes.PIPELINE)
        current = self.pipeline.resolve()
        refused, proposed, outdated = [], [], []
        for index, saved_stage in enumerate(saved["stages"]):
            name = saved_stage["name"]
            stage = current["stages"][index] if index < len(current["stages"]) else {}
            old, new = drop_keys(saved_stage, *WORDS), drop_keys(stage, *WORDS)
            folder = self.run_dir.stages / name_folder(index + 1, name)
            if any(folder.glob("checkpoints/step-*")):
                # Later stages may have started from the student of a finished one, so nothing of
                # it may change.
                is_finished = (folder / "report.html").is_file()
                allowed = () if is_finished else self._select_allowed(name)
                _, differences = split_changes(old, new, allowed)
                refused += [f"stages[{index}] ({name}).{line}" for line in differences]
                if not is_finished:
                    proposed += propose_flags(differences, old, f"stages.{name}.")
            elif list_changed_fields(old, new) and folder.is_dir():
                outdated.append(folder)
        if any(self.run_dir.stages.glob("*/checkpoints/step-*")):
            keys = ("stages", *PIPELINE_KEYS)
            refused += list_changed_fields(drop_keys(saved, *keys), drop_keys(current, *keys))
        if refused:
            heading = "the recipe changed since it began; start a new run, or undo:"
            raise RecipeError([f"{self.run_dir.path}: {heading}", *refused, *proposed])
        # A changed stage that has saved no step starts again.
        for folder in outdated:
            shutil.rmtree(folder)
        return saved == current

    def _select_allowed(self, stage: str) -> list[str]:
        """Return the fields that may change in a stage: fields of all stages and of this stage."""
        prefix = f"stages.{stage}."
        return [
            key.removeprefix(prefix)
            for key in self.allow_changed
            if not key.startswith("stages.") or key.startswith(prefix)
        ]

    def _run_stage(self, stage: Stage, stop: Stop) -> None:
        """Run or resume one stage, and export its student for the stages after it."""
        count = len(self.pipeline.stages)
        slot = f" ({stage.data['slot'].replace('_', ' ')})" if stage.data.get("slot") else ""
        self.heading = f"stage {stage.number} of {count}: {stage.name}{slot}"
        folder = self.run_dir.stages / stage.folder
        is_finished = (folder / "report.html").is_file()
        self.console.event(f"{self.heading}{', finished' if is_finished else ''}")
        if not is_finished:
            can_resume = (folder / "recipe.json").is_file()
            runs.run_in_folder(
                stage.build_recipe(self._resolve_model),
                self.run_dir.stages,
                self.console,
                resume=can_resume,
                allow_changed=self._select_allowed(stage.name) if can_resume else (),
                stop=stop,
            )
        # A stage may have been killed between its report and its export, so the export is tried
        # each time.
        inject_fault("stage.done")
        _export_student(folder)
        inject_fault("stage.exported")
        number = stop()
        if number is not None and stage.number < count:
            name = signal.Signals(number).name
            go_on = f"resume with {spell_options(resume=True)}"
            raise Interrupted(number, f"stopped by {name} after its last step; {go_on}")

    def _resolve_model(self, model: Mapping[str, Any]) -> str:
        """Return the folder of a stage's student or of a from-scratch model, or the base's name."""
        if "merge" in model:
            return self._merge_models(MergeConfig.model_validate(model))
        if "stage" not in model:
            return self._create_scratch_model(ScratchConfig.model_validate(model))
        if model["stage"] == BASE:
            base = self.pipeline.recipe.student.model
            return base if isinstance(base, str) else self._create_scratch_model(base)
        (stage,) = (stage for stage in self.pipeline.stages if stage.name == model["stage"])
        return str(self.run_dir.stages / stage.folder / "model")

    def _merge_models(self, config: MergeConfig) -> str:
        """Return the folder of merged students; the first call merges them."""
        folder = self.run_dir.models / name_model_folder("merge", config)
        if not folder.is_dir():
            self.console.event(f"merging models: {config.method} of {', '.join(config.merge)}")
            models = [Path(self._resolve_model({"stage": name})) for name in config.merge]
            base = None
            if config.method != "mean":
                model = self._resolve_model({"stage": config.base})
                base = find_folder(locate(ModelConfig(model=model)))
            merge_models(config, models, base, folder)
        return str(folder)

    def _create_scratch_model(self, config: ScratchConfig) -> str:
        """Return the folder of a from-scratch model; all stages share it and the task."""
        name = name_model_folder("scratch", config)
        folder = self.run_dir.models / name
        if not folder.is_dir():
            recipe = self.pipeline.recipe
            if recipe.train.threads is not None:
                torch.set_num_threads(recipe.train.threads)
            self.console.event(f"making a model from scratch: {name}")
            create_scratch_model(folder, config, build_task(recipe), recipe.student.template)
        return str(folder)

    def _build_summary(self) -> dict[str, Any]:
        """Return each stage's summary, and the accuracy after each stage on each domain."""
        recipes = self.pipeline.build_recipes()
        summaries = []
        for stage in self.pipeline.stages:
            path = self.run_dir.stages / stage.folder / "summary.json"
            head = {
                "name": stage.name,
                "start": stage.origin,
                "method": describe_method(recipes[stage.name]),
                "folder": f"stages/{stage.folder}",
            }
            summary = read_json(path, shapes.SUMMARY)
            summaries.append({**head, **drop_keys(summary, "samples", "name")})
        evaluations = {BASE: summaries[0]["before"]}
        for stage, summary in zip(self.pipeline.stages, summaries, strict=True):
            if not isinstance(stage.start, str):
                evaluations[f"start of {stage.name}"] = summary["before"]
            evaluations[stage.name] = summary["after"]
        accuracy = [
            {"stage": name, "all": evaluation["accuracy"], "by_domain": evaluation["by_domain"]}
            for name, evaluation in evaluations.items()
            if evaluation is not None
        ]
        domains = dict.fromkeys(domain for row in accuracy for domain in row["by_domain"])
        return {
            "name": self.pipeline.recipe.name,
            "seed": self.pipeline.recipe.seed,
            "stages": summaries,
            "domains": list(domains),
            "accuracy": accuracy,
        }

    def _show(self, summary: Mapping[str, Any]) -> None:
        """Show the end of a pipeline: accuracy by stage, time and folder."""
        if summary["accuracy"]:
            columns = ["after", "accuracy", *summary["domains"], "steps", "ended"]
            self.console.table("held-out accuracy by stage", columns, build_stage_rows(summary))
        seconds = f"{monotonic() - self.started:.0f} s for {len(summary['stages'])} stages"
        folder = shorten_path(self.run_dir.path)
        rows = {"time": seconds, "run folder": folder, "report": "report.html in it"}
        self.console.finish(rows)


def name_model_folder(kind: str, config: ScratchConfig | MergeConfig) -> str:
    """Return the folder name of a model with these settings."""
    return f"{kind}-{hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:12]}"


def _export_student(folder: Path) -> None:
    """Export the final student of a stage as a model folder, unless it exists."""
    if (folder / "model").is_dir():
        return
    for leftover in folder.glob("model.tmp-*"):
        shutil.rmtree(leftover)
    backend, student = open_student(folder)
    backend.export(student, folder / "model")
