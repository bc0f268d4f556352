"""Run every arm by `practicum compare`: first a sweep of learning rates, then the counted seeds."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeVar

import torch

from laboratory.results import TEACHER, Results, group_by_measure, name_before
from laboratory.study import Reproduction, ReproductionJob, Warned, is_map, resolve_stage_models
from practicum.core.notes import hide_notes
from practicum.errors import PracticumError
from practicum.models.config import MergeConfig, ScratchConfig
from practicum.models.merging import merge_models
from practicum.ports import Task
from practicum.recipe import Recipe, load_recipe, parse_recipe
from practicum.run_dir import read_json, write_json
from practicum.runs.opening import build_task, create_scratch_model
from practicum.runs.pipeline import name_model_folder
from practicum.runs.pipeline import run as run_pipeline
from practicum.runs.stages import parse_pipeline
from practicum.statistics import group_pairs, pass_at_k, unique_share
from practicum.studies.compare import ComparisonSettings, FailedRun, FinishedRuns, Outcome, run_arms
from practicum.studies.compare.arms import split_words
from practicum.studies.doctor import doctor
from practicum.types import FrozenConfig

R = TypeVar("R")

FindModel = Callable[[Mapping[str, Any]], str]
"""Return the model folder of `{stage: NAME}` or `{merge: [NAME, ...], base: NAME, scale: S}`."""

ReadMore = Callable[[Path], Mapping[str, float]]
"""Return extra readings of a finished run from its folder."""

TUNING_SEED = 1000
"""The seed of the sweep, counted from the first seed; no counted run has it."""

WIDENINGS = 2
"""The largest number of extensions of a sweep beyond an edge."""


class Config(FrozenConfig):
    """No settings."""

    type: Literal["runs"] = "runs"


def measure(config: Config, job: ReproductionJob) -> Results:
    """Make the models, sweep, run all arms, and read their results."""
    return measure_with(lambda folder: {}, job)


def measure_with(more: ReadMore, job: ReproductionJob) -> Results:
    """Measure with extra readings, which the sweep can also use as its criterion."""
    torch.set_num_threads(1)
    study, folder = job.study, job.folder
    find_model = prepare_models(job)
    tried: list[dict[str, Any]] = []
    failures: list[FailedRun] = []
    chosen: dict[str, float | None] = dict.fromkeys(study.spec.arms)
    rates = {
        name: arm.learning_rates or study.spec.learning_rates
        for name, arm in study.spec.arms.items()
    }
    swept = {name: several for name, several in rates.items() if len(several) > 1}
    if job.recorded:
        chosen |= {arm: best["learning_rate"] for arm, best in job.recorded.chosen.items()}
    elif swept and job.scale.sweep:
        tried, failures = sweep_rates(_list_tunings(job, find_model), swept, more)
        chosen |= {row["arm"]: row["learning_rate"] for row in tried if row["chosen"]}
    sources = {arm: write_arm(job, arm, chosen[arm], find_model) for arm in study.spec.arms}
    runs = folder / "runs"
    finished = _run_arms(sources, runs, job, seeds=len(job.seeds), first=job.seeds[0])
    failures += finished.failures
    readings = _group_by_arm(finished, lambda outcome: _read_outcome(runs, outcome, more))
    return Results(
        name=study.name,
        form="",
        seeds=job.seeds,
        readings={arm: group_by_measure(rows) for arm, rows in readings.items()}
        | _read_teacher(finished, runs),
        curves=_group_by_arm(finished, lambda outcome: list(outcome.curve)),
        alarms=_group_by_arm(finished, lambda outcome: read_alarms(runs / outcome.folder)),
        tried=tried,
        chosen={arm: {"learning_rate": rate} for arm, rate in chosen.items() if rate is not None},
        doctor={} if job.recorded else _examine_arms(sources, job),
        failed=[f"{failure.arm}, seed {failure.seed}: {failure.reason}" for failure in failures],
    )


def _list_tunings(
    job: ReproductionJob, find_model: FindModel
) -> list[tuple[ReproductionJob, FindModel]]:
    """Return a job for each seed of the sweep, with its models.

    A map has as many seeds at each rate as each arm has at its best rate.
    """
    start = job.first_seed + TUNING_SEED
    seeds = range(start, start + (job.scale.seeds if is_map(job.study) else 1))
    if not job.study.spec.draw_by_seed:
        return [(replace(job, only_seed=seed), find_model) for seed in seeds]
    # The folder of the whole study: no draw that counts has these models.
    tunings = [replace(job, folder=job.folder.parent).redraw(seed) for seed in seeds]
    return [(tuning, prepare_models(tuning)) for tuning in tunings]


def sweep_rates(
    jobs: Sequence[tuple[ReproductionJob, FindModel]],
    swept: Mapping[str, Sequence[float]],
    more: ReadMore,
) -> tuple[list[dict[str, Any]], list[FailedRun]]:
    """Run the arms at each rate, and at further rates where the best is at an edge.

    `jobs` has the job of each seed of the sweep; no counted run has one of these seeds. Returns the rows
    of `rank_rates` and the failed runs.
    """
    scores: dict[str, dict[int, dict[str, float]]] = {}
    alarms: dict[str, dict[str, None]] = {}
    failures: list[FailedRun] = []
    tried: list[dict[str, Any]] = []
    spec = jobs[0][0].study.spec
    rates, missing = {arm: sorted(several) for arm, several in swept.items()}, swept
    for number in range(1 + WIDENINGS):
        for job, find_model in jobs:
            sources = {
                f"{arm}-lr{rate:g}": write_arm(job, arm, rate, find_model)
                for arm, several in missing.items()
                for rate in several
            }
            [seed] = job.seeds
            folder = job.folder / f"sweep-{seed}{f'-wider-{number}' if number else ''}"
            finished = _run_arms(sources, folder, job, seeds=1, first=seed)
            for outcome in finished.outcomes:
                score = _read_outcome(folder, outcome, more)
                scores.setdefault(outcome.arm, {})[seed] = score
                names = read_alarms(folder / outcome.folder)
                alarms.setdefault(outcome.arm, {}).update(dict.fromkeys(names))
            failures += finished.failures
        tried = rank_rates(scores, alarms, rates, spec)
        missing = find_wider_rates(tried, spec)
        if not missing:
            break
        if number < WIDENINGS:
            rates = {
                arm: sorted([*several, *missing.get(arm, ())]) for arm, several in rates.items()
            }
    return tried, failures


def find_wider_rates(
    tried: Sequence[Mapping[str, Any]], spec: Reproduction
) -> dict[str, list[float]]:
    """Return, by arm, two rates beyond the edge if the best rate is there and beats its neighbour.

    A step is the ratio of the two outermost rates.
    """
    sign = 1 if spec.aim_at == "highest" else -1
    wider: dict[str, list[float]] = {}
    for arm in dict.fromkeys(row["arm"] for row in tried):
        rows = sorted(
            (row for row in tried if row["arm"] == arm), key=lambda row: row["learning_rate"]
        )
        for edge, inner in ((rows[0], rows[1]), (rows[-1], rows[-2])):
            is_better = inner[spec.aim] is None or (
                edge[spec.aim] is not None and sign * (edge[spec.aim] - inner[spec.aim]) > 0
            )
            if edge["chosen"] and is_better:
                rate, ratio = edge["learning_rate"], edge["learning_rate"] / inner["learning_rate"]
                wider[arm] = [float(f"{rate * ratio**step:.3g}") for step in (1, 2)]
    return wider


def _examine_arms(sources: Mapping[str, str], job: ReproductionJob) -> dict[str, dict[str, Any]]:
    """Return the doctor's verdict on each arm that a test asks about; an arm is examined once."""
    verdicts = {}
    warned = [test.warned for test in job.study.spec.tests if isinstance(test, Warned)]
    for arm in dict.fromkeys(warned):
        path = job.folder / "doctor" / f"{arm}.json"
        if not path.is_file():
            job.console.event(f"{arm}: the doctor looks at it")
            with hide_notes():
                file, *control = split_words(sources[arm])
                verdict = doctor(load_recipe(file, control)).verdict
            path.parent.mkdir(exist_ok=True)
            write_json(path, {"verdict": verdict.word, "because": list(verdict.because)})
        verdicts[arm] = read_json(path)
    return verdicts


def prepare_models(job: ReproductionJob) -> FindModel:
    """Run the recipe's `stages` once for all arms and seeds; return a lookup of their models."""
    study, folder = job.study, job.folder
    stages: dict[str, Path] = {}
    if "stages" in study.recipe:
        pipeline = parse_pipeline({**study.recipe, "name": "stages"}, study.name)
        can_resume = (folder / "stages" / "pipeline.json").is_file()
        run_pipeline(pipeline, out=folder, resume=can_resume, console=job.console)
        stages = {
            stage.name: folder / "stages" / "stages" / stage.folder / "model"
            for stage in pipeline.stages
        }

    def find_model(model: Mapping[str, Any]) -> str:
        if "stage" in model:
            return str(stages[model["stage"]])
        config = MergeConfig.model_validate({**model, "method": "task_arithmetic"})
        merged = folder / "models" / name_model_folder("merge", config)
        if not merged.is_dir():
            models = [stages[name] for name in config.merge]
            merge_models(config, models, stages[config.base], merged)
        return str(merged)

    return find_model


def prepare_scratch_models(
    recipe_data: Mapping[str, Any], recipe: Recipe, folder: Path
) -> dict[str, Any]:
    """Return a recipe's data with every from-scratch model made and replaced by its folder.

    Another backend than the local one makes its own networks.
    """
    if recipe.backend.build_single().type != "local":
        return dict(recipe_data)
    task = build_task(recipe)
    roles = [role for role in ("student", "teacher", "reference") if role in recipe_data]
    made = {role: _replace_scratch_models(recipe_data[role], task, folder) for role in roles}
    return {**recipe_data, **made}


def _replace_scratch_models(section: Any, task: Task, folder: Path) -> Any:
    if not isinstance(section, Mapping):
        return section
    model = section.get("model")
    if not isinstance(model, Mapping) or "stage" in model:
        return {key: _replace_scratch_models(inner, task, folder) for key, inner in section.items()}
    config = ScratchConfig.model_validate(dict(model))
    # The name holds the held-out prompts and not the training prompts: arms with other training
    # prompts share a model and start from the same weights. The first arm's prompts train it.
    prompts = [
        [message.content for message in prompt.messages] for prompt in task.heldout_prompts()
    ]
    template = section.get("template")
    identity = json.dumps([config.model_dump(mode="json"), prompts, template])
    path = folder / "models" / f"scratch-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    create_scratch_model(path, config, task, template)
    return {**section, "model": str(path)}


def write_arm(job: ReproductionJob, arm: str, rate: float | None, find_model: FindModel) -> str:
    """Write an arm's recipe with its learning rate and model folders.

    Returns the path and the arm's control, as `practicum compare` reads an arm.
    """
    recipe_data = resolve_stage_models(job.study.build_recipe(arm, job.scale), find_model)
    recipe = parse_recipe(recipe_data, f"{job.study.name}, arm {arm}")
    recipe_data = prepare_scratch_models(recipe_data, recipe, job.folder)
    if rate is not None:
        recipe_data["optimizer"] = {**recipe_data.get("optimizer", {}), "learning_rate": rate}
    path = job.folder / "recipes" / (f"{arm}.json" if rate is None else f"{arm}-lr{rate:g}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, recipe_data)
    control = job.study.spec.arms[arm].control
    return str(path) if control is None else f"{path},{control}"


def _run_arms(
    sources: Mapping[str, str], out: Path, job: ReproductionJob, *, seeds: int, first: int
) -> FinishedRuns:
    settings = ComparisonSettings(
        seeds=seeds,
        first_seed=first,
        max_parallel_runs=job.at_once,
        out=out,
        resume=any(out.glob("*/seed-*.json")),
        may_differ=frozenset(job.study.spec.may_differ),
    )
    return run_arms([f"{name}={source}" for name, source in sources.items()], settings, job.console)


def rank_rates(
    scores: Mapping[str, Mapping[int, Mapping[str, float]]],
    alarms: Mapping[str, Iterable[str]],
    swept: Mapping[str, Sequence[float]],
    spec: Reproduction,
) -> list[dict[str, Any]]:
    """Return a row per arm and learning rate with its mean scores and its alarms; the best one is `chosen`.

    `scores`, by seed, and `alarms` have the keys `ARM-lrRATE`. Raises PracticumError if an arm has no score.
    """
    aim, sign = spec.aim, 1 if spec.aim_at == "highest" else -1
    rows: list[dict[str, Any]] = []
    for arm, rates in swept.items():
        results = [(rate, group_by_measure(scores.get(f"{arm}-lr{rate:g}", {}))) for rate in rates]
        # A rate at which fewer seeds finished is never the best.
        scored = [
            (len(score[aim]), sign * fmean(score[aim].values()), rate)
            for rate, score in results
            if aim in score
        ]
        if not scored:
            raise PracticumError(
                f"no learning rate of arm {arm!r} finished a run with {aim!r}, which the sweep "
                "chooses by; look at the logs of the sweep, or write another aim"
            )
        best = max(scored)[-1]
        rows += [
            {
                "arm": arm,
                "learning_rate": rate,
                **{
                    name: fmean(score[name].values()) if name in score else None
                    for name in ("accuracy", aim)
                },
                # JSON has strings as keys.
                "by_seed": {str(seed): value for seed, value in score.get("accuracy", {}).items()},
                "chosen": rate == best,
                "alarms": list(alarms.get(f"{arm}-lr{rate:g}", [])),
            }
            for rate, score in results
        ]
    return rows


def _group_by_arm(finished: FinishedRuns, read: Callable[[Outcome], R]) -> dict[str, dict[int, R]]:
    """Read each run, and return the results by arm and seed."""
    by_arm: dict[str, dict[int, R]] = {}
    for outcome in sorted(finished.outcomes, key=lambda outcome: (outcome.arm, outcome.seed)):
        by_arm.setdefault(outcome.arm, {})[outcome.seed] = read(outcome)
    return by_arm


def read_alarms(folder: Path) -> list[str]:
    """Return the monitors that raised an alarm, each once, in order."""
    return list(read_json(folder / "summary.json")["alarms"])


def _read_outcome(runs: Path, outcome: Outcome, more: ReadMore) -> dict[str, float]:
    run_folder = runs / outcome.folder
    return read_run(run_folder, outcome) | dict(more(run_folder))


def read_run(folder: Path, outcome: Outcome) -> dict[str, float]:
    """Return the numbers at a run's end: accuracies, pass@k, divergence, length and spending.

    The accuracy of each domain before training is `before/accuracy/DOMAIN`.
    """
    after = read_json(folder / "after.json")["student"]
    numbers = {
        name: after[name] for name in ("reverse_kl", "length", "truncated", "student_entropy")
    }
    numbers |= _read_accuracies(after)
    start = _read_accuracies(read_json(folder / "before.json")["student"])
    numbers |= {name_before(name): share for name, share in start.items() if name != "accuracy"}
    numbers |= _compare_answers(after["answers"])
    numbers |= {f"spent/{unit}": amount for unit, amount in outcome.spent.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def _read_accuracies(evaluation: Mapping[str, Any] | None) -> dict[str, float]:
    """Return a saved evaluation's accuracies, in total and by domain; empty without rewards."""
    if evaluation is None or evaluation["accuracy"] is None:
        return {}
    by_domain = {
        f"accuracy/{domain}": interval["mean"]
        for domain, interval in evaluation["by_domain"].items()
    }
    return {"accuracy": evaluation["accuracy"]["mean"], **by_domain}


def _read_teacher(finished: FinishedRuns, runs: Path) -> dict[str, Any]:
    """Return the teacher's accuracies by measure and seed, from the first arm that has them."""
    accuracies: dict[str, dict[int, float]] = {}
    for outcome in finished.outcomes:
        evaluation = read_json(runs / outcome.folder / "before.json")["teacher"]
        for name, accuracy in _read_accuracies(evaluation).items():
            accuracies.setdefault(name, {}).setdefault(outcome.seed, accuracy)
    return {TEACHER: accuracies} if accuracies else {}


def _compare_answers(answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return pass@k and the share of distinct answers, if prompts have several answers."""
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
            chances = [pass_at_k(total, good, k) for total, good in right]
            numbers[f"pass@{k}"] = sum(chances) / len(chances)
    return numbers
