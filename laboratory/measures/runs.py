"""Runs every arm by `practicum compare`: first a sweep over learning rates with a seed of its own, then the seeds that count."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict
from safetensors.torch import load_file, save_file

from laboratory.results import TEACHER, Results, before, by_measure
from laboratory.study import (
    LoadedReproduction,
    Reproduction,
    ReproductionScale,
    Warned,
    resolve_stage_models,
)
from practicum.core.notes import hide_notes
from practicum.errors import PracticumError
from practicum.models.config import ModelConfig, ScratchConfig
from practicum.ports import Task
from practicum.recipe import Recipe, load_recipe, parse_recipe
from practicum.run_dir import read_json, write_json
from practicum.runs.assembly import build_task, make_scratch
from practicum.runs.console import Console
from practicum.runs.pipeline import parse_pipeline
from practicum.runs.pipeline.running import run as run_pipeline
from practicum.statistics import group_pairs, pass_at_k, unique_share
from practicum.studies.compare import FailedRun, FinishedRuns, Outcome, Settings, run_arms
from practicum.studies.doctor import doctor

R = TypeVar("R")

ModelOf = Callable[[Mapping[str, Any]], str]

ReadMore = Callable[[Path], Mapping[str, float]]
"""Readings of a finished run, from its folder, besides those that every run leaves."""

TUNING_SEED = 1000
"""The seed of the sweep, which is none of those that count."""


class Config(BaseModel):
    """Nothing to set: the recipe and the arms say it all."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["runs"] = "runs"


def measure(
    config: Config,
    study: LoadedReproduction,
    form: ReproductionScale,
    home: Path,
    at_once: int,
    console: Console,
) -> Results:
    """Make the models, sweep, run, and read what the runs left."""
    return measure_with(lambda folder: {}, study, form, home, at_once, console)


def measure_with(
    more: ReadMore,
    study: LoadedReproduction,
    form: ReproductionScale,
    home: Path,
    at_once: int,
    console: Console,
) -> Results:
    """The same with more readings, by which the sweep can choose as by any other."""

    def read(home: Path, outcome: Outcome) -> dict[str, float]:
        return readings_of(home / outcome.folder, outcome) | dict(more(home / outcome.folder))

    torch.set_num_threads(1)
    model_of = models_of(study, home, console)
    tried: list[dict[str, Any]] = []
    failures: list[FailedRun] = []
    chosen: dict[str, float | None] = dict.fromkeys(study.spec.arms)
    rates = {
        name: arm.learning_rates or study.spec.learning_rates
        for name, arm in study.spec.arms.items()
    }
    swept = {name: several for name, several in rates.items() if form.sweep and len(several) > 1}
    if swept:
        files = {
            f"{arm}-lr{rate:g}": arm_file(study, arm, form, rate, model_of, home)
            for arm in swept
            for rate in swept[arm]
        }
        found = _compared(files, home / "sweep", study, 1, TUNING_SEED, at_once, console)
        scores = {outcome.arm: read(home / "sweep", outcome) for outcome in found.outcomes}
        alarms = {
            outcome.arm: alarms_of(home / "sweep" / outcome.folder) for outcome in found.outcomes
        }
        tried = rates_tried(scores, alarms, swept, study.spec)
        failures += found.failures
        chosen |= {row["arm"]: row["learning_rate"] for row in tried if row["chosen"]}
    files = {
        arm: arm_file(study, arm, form, chosen[arm], model_of, home) for arm in study.spec.arms
    }
    found = _compared(files, home / "runs", study, form.seeds, 0, at_once, console)
    readings = _by_arm(found, lambda outcome: read(home / "runs", outcome))
    return Results(
        name=study.name,
        form="",
        seeds=list(range(form.seeds)),
        readings={arm: by_measure(rows) for arm, rows in readings.items()}
        | _of_teacher(found, home / "runs"),
        curves=_by_arm(found, lambda outcome: list(outcome.curve)),
        alarms=_by_arm(found, lambda outcome: alarms_of(home / "runs" / outcome.folder)),
        tried=tried,
        chosen={arm: {"learning_rate": rate} for arm, rate in chosen.items() if rate is not None},
        doctor=_examined(study, files, home, console),
        failed=[
            f"{one.arm}, seed {one.seed}: {one.reason}" for one in (*failures, *found.failures)
        ],
    )


def _examined(
    study: LoadedReproduction, files: Mapping[str, Path], home: Path, console: Console
) -> dict[str, dict[str, Any]]:
    """What the doctor says of the arms that a test asks it about, each examined once."""
    found = {}
    for arm in dict.fromkeys(test.warned for test in study.spec.tests if isinstance(test, Warned)):
        known = home / "doctor" / f"{arm}.json"
        if not known.is_file():
            console.event(f"{arm}: the doctor looks at it")
            with hide_notes():
                verdict = doctor(load_recipe(files[arm])).verdict
            known.parent.mkdir(exist_ok=True)
            write_json(known, {"verdict": verdict.word, "because": list(verdict.because)})
        found[arm] = read_json(known)
    return found


def models_of(study: LoadedReproduction, home: Path, console: Console) -> ModelOf:
    """Finds the models that the recipe's `stages` make, which are run once for all arms and seeds, and averages of them."""
    folders: dict[str, Path] = {}
    if "stages" in study.recipe:
        pipeline = parse_pipeline({**study.recipe, "name": "stages"}, study.name)
        begun = (home / "stages" / "pipeline.json").is_file()
        run_pipeline(pipeline, out=home, resume=begun, console=console)
        folders = {
            stage.name: home / "stages" / "stages" / stage.folder / "model"
            for stage in pipeline.stages
        }

    def model_of(model: Mapping[str, Any]) -> str:
        if "stage" in model:
            return str(folders[model["stage"]])
        return str(_average([folders[name] for name in model["average"]], home / "models"))

    return model_of


def _average(folders: Sequence[Path], models: Path) -> Path:
    """A model folder with the mean of the others' weights, made once (model soups, arXiv 2203.05482)."""
    name = hashlib.sha256("\n".join(map(str, folders)).encode()).hexdigest()[:12]
    folder = models / f"average-{name}"
    if not folder.is_dir():
        weights = [load_file(one / "model.safetensors") for one in folders]
        mean = {key: torch.stack([one[key] for one in weights]).mean(dim=0) for key in weights[0]}
        temporary = folder.with_name(f"{folder.name}.tmp")
        shutil.copytree(folders[0], temporary, dirs_exist_ok=True)
        save_file(mean, temporary / "model.safetensors", metadata={"format": "pt"})
        temporary.rename(folder)
    return folder


def with_models(data: Mapping[str, Any], recipe: Recipe, home: Path) -> dict[str, Any]:
    """Return the data of a recipe with a folder for every model from scratch."""
    task = build_task(recipe)
    roles = [role for role in ("student", "teacher", "reference") if role in data]
    return {
        **data,
        **{role: _with_scratch_models(data[role], recipe, task, home) for role in roles},
    }


def _with_scratch_models(section: Any, recipe: Recipe, task: Task, home: Path) -> Any:
    """The section with a folder for every model from scratch, each made once for all arms and seeds with the same held-out prompts.

    It is taught on the training prompts of the first arm that names it, so that arms with other prompts start where it does.
    """
    if not isinstance(section, Mapping):
        return section
    model = section.get("model")
    if not isinstance(model, Mapping) or "stage" in model:
        return {
            key: _with_scratch_models(value, recipe, task, home) for key, value in section.items()
        }
    config = ModelConfig(model=ScratchConfig.model_validate(dict(model)))
    assert isinstance(config.model, ScratchConfig)
    asked = [[message.content for message in prompt.messages] for prompt in task.heldout_prompts()]
    words = json.dumps([config.model.model_dump(mode="json"), asked])
    name = f"scratch-{hashlib.sha256(words.encode()).hexdigest()[:12]}"
    make_scratch(home / "models" / name, config.model, task)
    return {**section, "model": str(home / "models" / name)}


def arm_file(
    study: LoadedReproduction,
    arm: str,
    form: ReproductionScale,
    rate: float | None,
    model_of: ModelOf,
    home: Path,
) -> Path:
    """An arm's recipe as a file, with its learning rate, and with a folder for every model."""
    data = resolve_stage_models(study.data_of(arm, form), model_of)
    data = with_models(data, parse_recipe(data, f"{study.name}, arm {arm}"), home)
    if rate is not None:
        data["optimizer"] = {**data.get("optimizer", {}), "learning_rate": rate}
    path = home / "recipes" / (f"{arm}.json" if rate is None else f"{arm}-lr{rate:g}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, data)
    return path


def _compared(
    files: Mapping[str, Path],
    out: Path,
    study: LoadedReproduction,
    seeds: int,
    first: int,
    at_once: int,
    console: Console,
) -> FinishedRuns:
    begun = any(out.glob("*/seed-*.json"))
    settings = Settings(
        seeds=seeds,
        first=first,
        at_once=at_once,
        out=out,
        resume=begun,
        may_differ=frozenset(study.spec.may_differ),
    )
    return run_arms([f"{name}={path}" for name, path in files.items()], settings, console)


def rates_tried(
    scores: Mapping[str, Mapping[str, float]],
    alarms: Mapping[str, Sequence[str]],
    swept: Mapping[str, Sequence[float]],
    spec: Reproduction,
) -> list[dict[str, Any]]:
    """Every learning rate of every arm with its accuracy, what is aimed at and the monitors that spoke, the best one marked.

    `scores` and `alarms` are those of the runs by `ARM-lrRATE`; PracticumError where an arm has no score.
    """
    aim, sign = spec.aim, 1 if spec.aim_at == "highest" else -1
    rows: list[dict[str, Any]] = []
    for arm, rates in swept.items():
        results = [(rate, scores.get(f"{arm}-lr{rate:g}", {})) for rate in rates]
        there = [(sign * score[aim], rate) for rate, score in results if aim in score]
        if not there:
            raise PracticumError(
                f"no learning rate of arm {arm!r} finished a run with {aim!r}, which the sweep chooses by; look at the "
                "logs of the sweep, or write another aim"
            )
        best = max(there)[1]
        rows += [
            {
                "arm": arm,
                "learning_rate": rate,
                "accuracy": score.get("accuracy"),
                aim: score.get(aim),
                "chosen": rate == best,
                "alarms": list(alarms.get(f"{arm}-lr{rate:g}", [])),
            }
            for rate, score in results
        ]
    return rows


def _by_arm(found: FinishedRuns, read: Callable[[Outcome], R]) -> dict[str, dict[int, R]]:
    """What is read of each run, by arm and seed."""
    ordered = sorted(found.outcomes, key=lambda outcome: (outcome.arm, outcome.seed))
    return {
        arm: {outcome.seed: read(outcome) for outcome in mine}
        for arm, mine in groupby(ordered, key=lambda outcome: outcome.arm)
    }


def alarms_of(folder: Path) -> list[str]:
    """The monitors that spoke, each once, in order."""
    return list(read_json(folder / "summary.json")["alarms"])


def readings_of(folder: Path, outcome: Outcome) -> dict[str, float]:
    """The numbers at the end of a run: held-out accuracy in all and by domain, pass@k, distance, length, what it cost.

    The accuracy of each domain is there from before the training too, under `before/accuracy/DOMAIN`.
    """
    after = read_json(folder / "after.json")["student"]
    numbers = {
        name: after[name] for name in ("reverse_kl", "length", "truncated", "student_entropy")
    }
    numbers |= _accuracies(after)
    start = read_json(folder / "before.json")["student"]
    numbers |= {
        before(name): value for name, value in _accuracies(start).items() if name != "accuracy"
    }
    numbers |= _over_answers(after["answers"])
    numbers |= {f"spent/{unit}": amount for unit, amount in outcome.spent.items()}
    return {name: value for name, value in numbers.items() if value is not None}


def _accuracies(evaluation: Mapping[str, Any] | None) -> dict[str, float]:
    """The accuracy of a saved evaluation, in all and by domain; none where there was nothing to verify."""
    if evaluation is None or evaluation["accuracy"] is None:
        return {}
    by_domain = {
        f"accuracy/{domain}": interval["mean"]
        for domain, interval in evaluation["by_domain"].items()
    }
    return {"accuracy": evaluation["accuracy"]["mean"], **by_domain}


def _of_teacher(found: FinishedRuns, home: Path) -> dict[str, Any]:
    """The teacher's own accuracies where an arm evaluated it; the first arm's teacher speaks for all."""
    scores: dict[str, dict[int, float]] = {}
    for outcome in found.outcomes:
        saved = read_json(home / outcome.folder / "before.json")["teacher"]
        for name, value in _accuracies(saved).items():
            scores.setdefault(name, {}).setdefault(outcome.seed, value)
    return {TEACHER: scores} if scores else {}


def _over_answers(answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """pass@k, and the share of a prompt's answers that differ, where prompts were answered several times."""
    groups: dict[str, list[Mapping[str, Any]]] = group_pairs(
        (answer["prompt"], answer) for answer in answers
    )
    count = min(map(len, groups.values()), default=0)
    if count < 2:
        return {}
    shares = [unique_share([answer["text"] for answer in group]) for group in groups.values()]
    numbers = {"distinct": sum(shares) / len(shares)}
    if all(answer["reward"] is not None for answer in answers):
        right = [
            (len(group), sum(answer["reward"] >= 1.0 for answer in group))
            for group in groups.values()
        ]
        for k in (size for size in (1, 2, 4, 8, 16, 32) if size <= count):
            numbers[f"pass@{k}"] = sum(pass_at_k(total, good, k) for total, good in right) / len(
                right
            )
    return numbers
