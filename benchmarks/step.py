"""Compare whole training steps (rollout, teacher, full-vocabulary reverse KL, AdamW) with TRL's two trainers: speed and memory.

    python -m benchmarks step [--config fixed mixed toy] [--peer trl] [--peer-python PATH]

Random weights, the same folders, prompts and stop tokens for all. Every contender has a separate process, they alternate, and the
first step of each is dropped. Answer tokens per processor second and peak memory are compared. On given answers the loss has to
equal TRL's.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import ceilings, models, peers
from benchmarks.measuring import (
    Session,
    build_parser,
    build_reading,
    compute_ratios,
    format_table,
    interleave,
    open_session,
    run_in_process,
    spread,
)

TRAINERS = ("gkd", "distillation")
PROCESSES = 3
"""The number of processes of each contender, which take turns."""


@dataclass(frozen=True, slots=True)
class Config:
    """One workload: the pair, how many prompts in how large a batch, how long answers get, and the mean where they differ."""

    name: str
    student: str
    teacher: str
    prompts: int
    batch: int
    new_tokens: int
    mean: int = 0
    steps: int = 2


CONFIGS = {
    config.name: config
    for config in (
        Config("fixed", "17m", "57m", 8, 8, 128),
        Config("mixed", "17m", "57m", 32, 8, 256, 64),
        Config("toy", "toy", "toy-teacher", 32, 32, 128),
    )
}
QUICK = {
    "fixed": Config("fixed", "toy", "toy-teacher", 8, 8, 32, steps=1),
    "mixed": Config("mixed", "toy", "toy-teacher", 8, 4, 48, 16, steps=1),
    "toy": Config("toy", "tiny", "tiny-teacher", 8, 8, 16, steps=1),
}


def main() -> None:
    """Report one line for each workload."""
    parser = build_parser(__doc__)
    parser.add_argument(
        "--config", nargs="+", choices=sorted(CONFIGS), default=list(CONFIGS), help="only these"
    )
    peers.add_options(parser, ("trl",))
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else PROCESSES)
    session = open_session("step", options, ceilings.measure_briefly())
    installed = peers.find_installed(options.peer, options.peer_python)
    for name in options.config:
        _measure(
            session,
            (QUICK if options.quick else CONFIGS)[name],
            TRAINERS if installed else (),
            options,
        )


def _measure(
    session: Session, config: Config, trainers: Sequence[str], options: argparse.Namespace
) -> None:
    """Alternate the contenders on one workload."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in ("ours", *trainers)}
    with tempfile.TemporaryDirectory() as folder:
        _write(config, Path(folder))

        def run(name: str) -> float:
            job = _write_job(config, Path(folder), name, len(answers[name]))
            module = "benchmarks.step_ours" if name == "ours" else "benchmarks.step_trl"
            python = {} if name == "ours" else {"python": options.peer_python}
            answers[name].append(run_in_process(module, job, **python))
            return _compute_speed(answers[name][-1])

        speed = interleave(
            {name: lambda name=name: run(name) for name in answers}, session.rounds, 0
        )
    peak = {name: [answer["peak_mib"] for answer in rows] for name, rows in answers.items()}
    rows = [
        [
            name,
            spread(speed[name])["median"],
            spread([_average(answer["seconds"]) for answer in answers[name]])["median"],
            spread([_average(answer["sample"]) for answer in answers[name]])["median"],
            spread(peak[name])["median"],
            answers[name][0]["loss"],
        ]
        for name in answers
    ]
    print(
        f"{config.name}: {config.student} <- {config.teacher}, {config.prompts} prompts, at most {config.new_tokens} new"
    )
    print(
        format_table(
            ["contender", "tokens/s", "s a step", "of it rollout", "peak MiB", "loss"], rows
        )
    )
    phases = _compute_phases(answers["ours"])
    print(
        format_table(
            ["phase", "share"], [[phase, share["median"]] for phase, share in phases.items()]
        )
    )
    ideal = _compute_roofline(config, answers["ours"], dict(session.ceilings))
    session.report(
        _build_readings(config, speed, peak, answers, phases, ideal),
        config=config.name,
        pair=[config.student, config.teacher],
        prompts=config.prompts,
        batch=config.batch,
        new_tokens=config.new_tokens,
        mean=config.mean,
        tokens_per_second={name: spread(values) for name, values in speed.items()},
        ratios={name: compute_ratios(speed["ours"], speed[name]) for name in trainers},
        peak_mib={name: spread(values) for name, values in peak.items()},
        imports_mib={
            name: spread([answer["imports_mib"] for answer in rows])
            for name, rows in answers.items()
        },
        rollout_seconds={
            name: spread([_average(answer["sample"]) for answer in rows])
            for name, rows in answers.items()
        },
        step_seconds={
            name: spread([_average(answer["seconds"]) for answer in rows])
            for name, rows in answers.items()
        },
        phases=phases,
        roofline=ideal,
        loss={name: rows[0]["loss"] for name, rows in answers.items()},
        measured_steps=config.steps,
        peers=peers.read_versions(["trl"] if trainers else [], options.peer_python),
    )


def _write(config: Config, folder: Path) -> None:
    stops = _draw_stops(config)
    models.write_folder(models.SHAPES[config.student], folder / "student", 1, stops)
    models.write_folder(models.SHAPES[config.teacher], folder / "teacher", 2, stops)


def _draw_stops(config: Config) -> frozenset[int]:
    """The tokens that end an answer; the tokenizer's own end is always among them."""
    vocabulary = models.SHAPES[config.student].vocabulary
    return frozenset({1}) | (
        models.draw_stops(vocabulary, config.mean) if config.mean else frozenset()
    )


def _write_job(config: Config, folder: Path, name: str, number: int) -> Path:
    """Write the file that tells a process what to do."""
    vocabulary = models.SHAPES[config.student].vocabulary
    generator = torch.Generator().manual_seed(99)
    answers = [
        (prompt, torch.randint(2, vocabulary, (5 + 3 * place,), generator=generator).tolist())
        for place, prompt in enumerate(models.draw_prompts(4, vocabulary, seed=98))
    ]
    job = {
        "trainer": name,
        "student": str(folder / "student"),
        "teacher": str(folder / "teacher"),
        "out": str(folder / f"{name}-{number}"),
        "prompts": models.draw_prompts(config.prompts, vocabulary, seed=5),
        "answers": answers,
        "stops": sorted(_draw_stops(config)),
        "batch": config.batch,
        "new_tokens": config.new_tokens,
        "steps": config.steps + 1,
        "learning_rate": 1e-4,
        "seed": number,
    }
    path = folder / f"{name}-{number}.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    return path


def _compute_speed(answer: dict[str, Any]) -> float:
    return sum(answer["tokens"]) / sum(answer["seconds"])


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _compute_phases(answers: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the share of each phase in the seconds of a step, and the share outside calls of the backend."""
    shares: dict[str, list[float]] = {}
    for answer in answers:
        total = sum(answer["seconds"])
        for phase in answer["phases"][0]:
            shares.setdefault(phase, []).append(sum(row[phase] for row in answer["phases"]) / total)
        shares.setdefault("outside", []).append(
            1 - sum(sum(row.values()) for row in answer["phases"]) / total
        )
    return {phase: spread(values) for phase, values in shares.items()}


def _compute_roofline(
    config: Config, answers: Sequence[dict[str, Any]], limits: dict[str, float]
) -> dict[str, float]:
    """Seconds of a step's products, attention, exponentials and bytes at the ceilings, by phase, for its mean tokens."""
    student, teacher = models.SHAPES[config.student], models.SHAPES[config.teacher]
    new = _average([_average(answer["tokens"]) for answer in answers])
    read = new + sum(map(len, models.draw_prompts(config.prompts, student.vocabulary, seed=5)))
    numbers, rows = student.body + student.head, config.batch
    rate = limits["gflops"] * 1e9
    # All texts as long as their mean: longer and shorter ones have more pairs and states.
    pairs = config.prompts * (read / config.prompts) ** 2 / 2
    states = rows * student.state_numbers * (read - new / 2) / config.prompts
    # Keys and values can be read while the products are computed.
    step = ceilings.compute_floor(2.0 * rows * numbers, 4.0 * (numbers + states), limits)
    parts = {
        "decode": new / rows * step,
        # Two products forward and four backward, of a query with the keys and of weights with the values.
        "attention": 4.0 * pairs * (teacher.attended + 3 * student.attended) / rate,
        "prefill": 2.0 * student.body * (read - new) / rate,
        "teacher": 2.0 * teacher.body * read / rate,
        "student": 6.0 * student.body * read / rate,
        "loss": 2.0 * new * student.vocabulary * (3 * student.width + teacher.width) / rate,
        # Each probability of the student and of the teacher is an exponential.
        "exponentials": 2.0 * new * student.vocabulary / (limits["exponentials_g"] * 1e9),
        # AdamW reads weight, gradient and two moments, and writes all but the gradient.
        "optimizer": 28.0 * numbers / (limits["read_gb"] * 1e9),
    }
    total = sum(parts.values())
    measured = _average([_average(answer["seconds"]) for answer in answers])
    kernels = _average([answer["kernels"] for answer in answers])
    return {
        **parts,
        "whole": total,
        "measured": measured,
        "ratio": measured / total,
        "kernels": kernels / total,
    }


def _build_readings(
    config: Config,
    speed: dict[str, list[float]],
    peak: dict[str, list[float]],
    answers: dict[str, list[dict[str, Any]]],
    phases: dict[str, dict[str, float]],
    ideal: dict[str, float],
) -> dict[str, dict[str, float]]:
    """Return the readings of this workload that the goals ask for."""
    readings = {
        f"step.{config.name}.roofline": build_reading(ideal["ratio"]),
        f"step.{config.name}.kernels": build_reading(ideal["kernels"]),
        f"step.{config.name}.framework": build_reading(phases["outside"]["median"]),
    }
    for name in speed:
        if name != "ours":
            readings[f"step.{config.name}.{name}"] = compute_ratios(speed["ours"], speed[name])
            readings[f"step.{config.name}.memory.{name}"] = compute_ratios(peak["ours"], peak[name])
    losses = [rows[0]["loss"] for rows in answers.values()]
    if len(losses) > 1:
        readings["step.loss"] = build_reading(max(losses) - min(losses))
    return readings


if __name__ == "__main__":
    main()
