"""Run every arm as a full pipeline with every seed, and read the results of its stages."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from laboratory.measures.runs import prepare_scratch_models, read_alarms, read_run
from laboratory.results import TEACHER, Results, group_by_measure
from laboratory.study import ReproductionJob
from practicum.core.stopping import catch_stop_signals
from practicum.errors import PracticumError
from practicum.run_dir import RunDir, read_json, write_json
from practicum.runs.stages import drop_keys, name_folder, parse_pipeline
from practicum.studies.compare import Outcome, Point, RunJob, open_starter, read_outcome, run_jobs
from practicum.types import FrozenConfig


class Config(FrozenConfig):
    """No settings. Learning rates are not swept."""

    type: Literal["pipelines"] = "pipelines"


def measure(config: Config, job: ReproductionJob) -> Results:
    """Run the pipelines that are not finished, and read the results of all."""
    torch.set_num_threads(1)
    study = job.study
    runs = job.folder / "runs"
    jobs = [
        RunJob(arm, seed, _build_pipeline(job, arm, seed), runs)
        for seed in job.seeds
        for arm in study.spec.arms
    ]
    runs.mkdir(exist_ok=True)
    arms = list(study.spec.arms)
    firsts = {run_job.seed: run_job for run_job in jobs if run_job.arm == arms[0]}
    with open_starter() as starter, RunDir(runs).lock(), catch_stop_signals() as stop:
        failed = run_jobs(list(firsts.values()), job.at_once, job.console, stop, starter)
        further = [run_job for run_job in jobs if run_job.arm != arms[0]]
        for run_job in further:
            copy_shared_stages(firsts[run_job.seed], run_job)
        failed |= run_jobs(further, job.at_once, job.console, stop, starter)
    pipelines = [FinishedPipeline.read(run_job) for run_job in jobs if run_job not in failed]
    if not pipelines:
        first_reason = next(iter(failed.values()))
        raise PracticumError(f"all {len(jobs)} pipelines failed; the first {first_reason}")
    readings: dict[str, dict[int, dict[str, float]]] = {}
    curves: dict[str, dict[int, list[Point]]] = {}
    alarms: dict[str, dict[int, list[str]]] = {}
    for pipeline in pipelines:
        readings.setdefault(pipeline.arm, {})[pipeline.seed] = pipeline.read_numbers()
        curves.setdefault(pipeline.arm, {})[pipeline.seed] = pipeline.join_curves()
        alarms.setdefault(pipeline.arm, {})[pipeline.seed] = pipeline.list_alarms()
    by_measure = {arm: group_by_measure(by_seed) for arm, by_seed in readings.items()}
    teacher = {
        pipeline.seed: pipeline.teacher for pipeline in pipelines if pipeline.teacher is not None
    }
    return Results(
        name=study.name,
        form="",
        seeds=job.seeds,
        readings=by_measure | ({TEACHER: {"accuracy": teacher}} if teacher else {}),
        curves=curves,
        alarms=alarms,
        failed=[
            f"{run_job.arm}, seed {run_job.seed}: {reason}" for run_job, reason in failed.items()
        ],
    )


def copy_shared_stages(first: RunJob, second: RunJob) -> None:
    """Give a pipeline that has not begun the finished stages that it has in common with `first`.

    They share the stages up to the first difference, and new runs would have the same bytes.
    """
    recipes = first.resolved_recipe, second.resolved_recipe
    base, changed = (drop_keys(recipe, "stages", "about") for recipe in recipes)
    if second.folder.exists() or base != changed:
        return
    folders = list[str]()
    for number, (stage, again) in enumerate(zip(*(r["stages"] for r in recipes), strict=False), 1):
        folder = f"stages/{name_folder(number, stage['name'])}"
        if stage != again or not (first.folder / folder / "model").is_dir():
            break
        folders.append(folder)
    for folder in folders:
        shutil.copytree(first.folder / folder, second.folder / folder)
    if folders:
        write_json(second.folder / "pipeline.json", dict(second.resolved_recipe))


def _build_pipeline(job: ReproductionJob, arm: str, seed: int) -> dict[str, Any]:
    """Return an arm as a resolved pipeline.

    From-scratch models are made once for all arms, and for all seeds with the same prompts.
    """
    source = f"{job.study.name}, arm {arm}"
    pipeline = {**job.study.build_pipeline(arm, job.scale), "name": f"seed-{seed}", "seed": seed}
    pipeline = prepare_scratch_models(pipeline, parse_pipeline(pipeline, source).recipe, job.folder)
    return parse_pipeline(pipeline, source).resolve()


@dataclass(frozen=True, slots=True)
class FinishedPipeline:
    """A finished pipeline: the folder and the outcome of each stage, and the teacher's accuracy."""

    arm: str
    seed: int
    stages: Mapping[str, tuple[Path, Outcome]]
    teacher: float | None

    @classmethod
    def read(cls, job: RunJob) -> "FinishedPipeline":
        """Read a pipeline from its folder."""
        summary = read_json(job.folder / "summary.json")
        folders = {stage["name"]: job.folder / stage["folder"] for stage in summary["stages"]}
        stages = {
            name: (folder, read_outcome(job.arm, job.seed, folder, job.parent_dir))
            for name, folder in folders.items()
        }
        teacher = summary["stages"][0]["teacher"]
        accuracy = None if teacher is None else teacher["accuracy"]
        return cls(job.arm, job.seed, stages, None if accuracy is None else accuracy["mean"])

    def read_numbers(self) -> dict[str, float]:
        """Return the last stage's readings, the total spending, and numbers of each stage."""
        numbers = read_run(*list(self.stages.values())[-1])
        total: dict[str, float] = {}
        for name, (_, outcome) in self.stages.items():
            total = _add(total, outcome.spent)
            numbers |= {f"{unit}/{name}": outcome.spent[unit] for unit in ("steps", "flops")}
            if outcome.accuracy is not None:
                numbers[f"after/{name}"] = outcome.accuracy
        return numbers | {f"spent/{unit}": amount for unit, amount in total.items()}

    def join_curves(self) -> list[Point]:
        """Return the accuracy over all stages, with the spending since the first began."""
        points: list[Point] = []
        total: dict[str, float] = {}
        for _, outcome in self.stages.values():
            # A stage starts with the student of the stage before it: keep one of the two points.
            start = 1 if total else 0
            points += [
                Point(_add(total, point.spent), point.accuracy) for point in outcome.curve[start:]
            ]
            total = _add(total, outcome.spent)
        return points

    def list_alarms(self) -> list[str]:
        """Return the monitors with an alarm in any stage, each once, in order of the stages."""
        alarms = [name for folder, _ in self.stages.values() for name in read_alarms(folder)]
        return list(dict.fromkeys(alarms))


def _add(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {unit: first.get(unit, 0.0) + second.get(unit, 0.0) for unit in {**first, **second}}
