"""Runs every arm as a whole pipeline with every seed: what its stages come to together, where each ended, what each cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

from laboratory.measures.runs import alarms_of, readings_of, with_models
from laboratory.results import Results, by_measure
from laboratory.study import TEACHER, LoadedReproduction, ReproductionScale
from practicum.core.stopping import catch_stop_signals
from practicum.errors import PracticumError
from practicum.run_dir import RunDir, read_json
from practicum.runs.console import Console
from practicum.runs.pipeline import parse_pipeline
from practicum.statistics import group_pairs
from practicum.studies.compare import Outcome, Point, RunJob, read_outcome, run_all


class Config(BaseModel):
    """Nothing to set: the pipeline and the arms say it all. Learning rates are not swept."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["pipelines"] = "pipelines"


def measure(
    config: Config,
    study: LoadedReproduction,
    form: ReproductionScale,
    home: Path,
    at_once: int,
    console: Console,
) -> Results:
    """Run the pipelines that are not finished, and read what all of them left."""
    torch.set_num_threads(1)
    runs = home / "runs"
    jobs = [
        RunJob(arm, seed, data, runs)
        for seed in range(form.seeds)
        for arm, data in _pipelines(study, form, seed, home).items()
    ]
    runs.mkdir(exist_ok=True)
    with RunDir(runs).lock(), catch_stop_signals() as stop:
        failed = run_all(jobs, at_once, console, stop)
    done = [FinishedPipeline.read(job) for job in jobs if job not in failed]
    if not done:
        raise PracticumError(
            f"none of the {len(jobs)} pipelines finished; the first {next(iter(failed.values()))}"
        )
    arms = group_pairs((one.arm, one) for one in done)
    readings = {
        arm: by_measure({one.seed: one.readings() for one in mine}) for arm, mine in arms.items()
    }
    teacher = {one.seed: one.teacher for one in done if one.teacher is not None}
    return Results(
        name=study.name,
        form="",
        seeds=list(range(form.seeds)),
        readings={**readings, **({TEACHER: {"accuracy": teacher}} if teacher else {})},
        curves={arm: {one.seed: one.curve() for one in mine} for arm, mine in arms.items()},
        alarms={arm: {one.seed: one.alarms() for one in mine} for arm, mine in arms.items()},
        failed=[f"{job.arm}, seed {job.seed}: {reason}" for job, reason in failed.items()],
    )


def _pipelines(
    study: LoadedReproduction, form: ReproductionScale, seed: int, home: Path
) -> dict[str, dict[str, Any]]:
    """Every arm as a resolved pipeline. Models from scratch are made once for all arms, and for all seeds with the same prompts."""
    found = {}
    for arm in study.spec.arms:
        data = {**study.pipeline_of(arm, form), "name": f"seed-{seed}", "seed": seed}
        source = f"{study.name}, arm {arm}"
        data = with_models(data, parse_pipeline(data, source).recipe, home)
        found[arm] = parse_pipeline(data, source).resolved()
    return found


@dataclass(frozen=True, slots=True)
class FinishedPipeline:
    """A finished pipeline: its stages by name, each with its folder and what it came to, and the teacher's own accuracy."""

    arm: str
    seed: int
    stages: Mapping[str, tuple[Path, Outcome]]
    teacher: float | None

    @classmethod
    def read(cls, job: RunJob) -> "FinishedPipeline":
        """What a pipeline left in its folder."""
        summary = read_json(job.folder / "summary.json")
        folders = {stage["name"]: job.folder / stage["folder"] for stage in summary["stages"]}
        stages = {
            name: (folder, read_outcome(job.arm, job.seed, folder, job.home))
            for name, folder in folders.items()
        }
        teacher = summary["stages"][0]["teacher"]
        accuracy = None if teacher is None else teacher["accuracy"]
        return cls(job.arm, job.seed, stages, None if accuracy is None else accuracy["mean"])

    def readings(self) -> dict[str, float]:
        """Those of the last stage's end, what all stages spent, and for each its steps, operations and accuracy."""
        found = readings_of(*list(self.stages.values())[-1])
        found |= {f"spent/{unit}": amount for unit, amount in self._spent()[-1].items()}
        for name, (_, outcome) in self.stages.items():
            found |= {f"{unit}/{name}": outcome.spent[unit] for unit in ("steps", "flops")}
            if outcome.accuracy is not None:
                found[f"after/{name}"] = outcome.accuracy
        return found

    def curve(self) -> list[Point]:
        """The accuracy over all stages, with what had been spent since the first began."""
        return [
            Point(_sum(before, point.spent), point.accuracy)
            for place, ((_, outcome), before) in enumerate(
                zip(self.stages.values(), self._spent(), strict=False)
            )
            for point in outcome.curve[
                min(place, 1) :
            ]  # a stage starts where the one before it ended
        ]

    def alarms(self) -> list[str]:
        """The monitors that spoke in some stage, each once, in order of the stages."""
        return list(
            dict.fromkeys(name for folder, _ in self.stages.values() for name in alarms_of(folder))
        )

    def _spent(self) -> list[dict[str, float]]:
        """What had been spent before each stage, and in the end."""
        sums: list[dict[str, float]] = [{}]
        for _, outcome in self.stages.values():
            sums.append(_sum(sums[-1], outcome.spent))
        return sums


def _sum(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {unit: one.get(unit, 0.0) + other.get(unit, 0.0) for unit in {**one, **other}}
