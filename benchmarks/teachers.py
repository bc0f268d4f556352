"""Measure one to eight teachers of the same tokens, routed or summed: seconds per step, and peak memory.

    python -m benchmarks teachers [--k 1 2 4 8] [--rollouts 32] [--tokens 64]

A step here is the teachers' scores, the gradient and AdamW on given answers. Times are with all weights resident, in one process
and alternating. Memory is the growth over the bare student in a separate process, with weights resident or read from disk.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks import ceilings, models
from benchmarks.measuring import (
    build_parser,
    build_reading,
    clear_peak,
    compute_ratios,
    format_table,
    interleave,
    open_session,
    read_memory,
    run_in_process,
    spread,
)
from practicum.backends.local.loading import load, load_student
from practicum.backends.local.residency import build_scorer
from practicum.backends.local.trainer import LocalTrainer
from practicum.models.config import ScorerConfig, StudentConfig
from practicum.objective import Full, Objective
from practicum.ports import AdamParams, Teacher
from practicum.teachers import pool, route
from practicum.teaching.client import ClientTeacher
from practicum.training.loop import assemble
from practicum.types import Message, Prompt, Rollout

PAIR, QUICK_PAIR = ("toy", "toy-teacher"), ("tiny", "tiny-teacher")
KINDS, RESIDENCIES = ("route", "sum"), ("resident", "disk")


def main() -> None:
    """Report one line."""
    parser = build_parser(__doc__)
    parser.add_argument(
        "--k", type=int, nargs="+", help="numbers of teachers (default 1 2 4 8, with --quick 1 2)"
    )
    parser.add_argument("--rollouts", type=int, help="answers (default 32, with --quick 8)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each")
    parser.add_argument(
        "--measure",
        nargs=4,
        metavar=("FOLDER", "KIND", "K", "RESIDENCY"),
        help="internal: memory of one",
    )
    options = parser.parse_args()
    options.k = options.k or ([1, 2] if options.quick else [1, 2, 4, 8])
    options.rollouts = options.rollouts or (8 if options.quick else 32)
    if options.measure:
        torch.set_num_threads(1)
        print(json.dumps(_measure_peak(options)))
        return
    session = open_session("teachers", options, ceilings.measure_briefly())
    pair = QUICK_PAIR if options.quick else PAIR
    with tempfile.TemporaryDirectory() as folder:
        models.write_folder(models.SHAPES[pair[0]], Path(folder) / "student", 100)
        for number in range(max(options.k)):
            models.write_folder(models.SHAPES[pair[1]], Path(folder) / str(number), number)
        steps, parts = _prepare_steps(Path(folder), options)
        times = interleave(steps, session.rounds, session.warm_up)
        scoring = {name: values[-session.rounds :] for name, values in parts.items()}
        sizes = ["--rollouts", options.rollouts, "--tokens", options.tokens]
        peaks = {
            f"{kind} {k} {residency}": run_in_process(
                "benchmarks.teachers", *sizes, "--measure", folder, kind, k, residency
            )
            for kind in KINDS
            for k in options.k
            for residency in RESIDENCIES
        }
    rows = [
        [
            kind,
            k,
            spread(times[f"{kind} {k}"])["median"],
            *(peaks[f"{kind} {k} {where}"] for where in RESIDENCIES),
        ]
        for kind in KINDS
        for k in options.k
    ]
    print(
        format_table(
            ["kind", "teachers", "s a step", "peak MiB, resident", "peak MiB, on disk"], rows
        )
    )
    few, many = min(options.k), max(options.k)
    readings = {
        "teachers.route.time": compute_ratios(times[f"route {many}"], times[f"route {few}"]),
        "teachers.route.memory": build_reading(
            peaks[f"route {many} disk"] / peaks[f"route {few} disk"]
        ),
        "teachers.sum.time": compute_ratios(
            scoring[f"sum {many}"], [many / few * seconds for seconds in scoring[f"sum {few}"]]
        ),
    }
    session.report(
        readings if (few, many) == (1, 8) else {},
        pair=list(pair),
        k=options.k,
        rollouts=options.rollouts,
        tokens=options.tokens,
        seconds={name: spread(values) for name, values in times.items()},
        scoring_and_loss={name: spread(values) for name, values in scoring.items()},
        peak_mib={name: round(mib, 1) for name, mib in peaks.items()},
    )


def _prepare_steps(
    folder: Path, options: argparse.Namespace
) -> tuple[dict[str, Callable[[], float]], dict[str, list[float]]]:
    """A step for each kind and number of teachers, and where its seconds of scoring and loss are written down."""
    student, trainer = _load_student(folder)
    loaded = [
        _load_client(folder / str(number), "resident", trainer) for number in range(max(options.k))
    ]
    scoring: dict[str, list[float]] = {}
    steps: dict[str, Callable[[], float]] = {}
    for kind in KINDS:
        for k in options.k:
            teacher, items = (
                _build_teacher(kind, loaded[:k]),
                _make_rollouts(options.rollouts, options.tokens, k, student),
            )
            notes = scoring.setdefault(f"{kind} {k}", [])
            steps[f"{kind} {k}"] = lambda teacher=teacher, items=items, notes=notes: _step(
                trainer, teacher, items, notes
            )
    return steps, scoring


def _step(
    trainer: LocalTrainer, teacher: Teacher, items: Sequence[Rollout], notes: list[float]
) -> float:
    start = time.process_time()
    data = assemble(items, teacher.score(items, Full()))
    trainer.forward_backward(data, Objective(), 0)
    notes.append(time.process_time() - start)
    trainer.optim_step(AdamParams(1e-6))
    return time.process_time() - start


def _load_student(folder: Path) -> tuple[int, LocalTrainer]:
    """The student's vocabulary and its trainer."""
    loaded = load_student(StudentConfig(model=str(folder / "student"), device="cpu"), seed=0)
    return loaded.language_model.vocab_size, models.build_trainer(loaded.language_model, 8)


def _load_client(folder: Path, residency: str, trainer: LocalTrainer) -> ClientTeacher:
    config = ScorerConfig(model=str(folder), device="cpu", residency=residency)  # type: ignore[arg-type]
    loaded = load(config)
    return ClientTeacher(
        build_scorer(loaded, config, trainer.limits.sampling_batch, trainer.limits.chunk_tokens),
        loaded.renderer,
    )


def _build_teacher(kind: str, clients: Sequence[Teacher]) -> Teacher:
    members = {str(number): client for number, client in enumerate(clients)}
    settings = {"teachers": dict.fromkeys(members, "none")}
    if kind == "route":
        return route.RouteTeacher(members, route.Config.model_validate(settings))
    return pool.PoolTeacher(members, pool.Config.model_validate({**settings, "kind": "sum"}))


def _make_rollouts(count: int, tokens: int, teachers: int, vocabulary: int) -> list[Rollout]:
    """Create the same answers for any number of teachers, which alternate as domains."""
    generator = torch.Generator().manual_seed(0)
    items = []
    for number, prompt in enumerate(models.draw_prompts(count, vocabulary, 3, 32, 32)):
        items.append(
            Rollout(
                prompt=Prompt(
                    str(number),
                    (Message("user", models.render_words(prompt)),),
                    domain=str(number % teachers),
                ),
                prompt_tokens=prompt,
                tokens=torch.randint(2, vocabulary, (tokens,), generator=generator),
                loss_mask=torch.ones(tokens, dtype=torch.bool),
                sampling_logprobs=torch.zeros(tokens),
                policy_logprobs=torch.zeros(tokens),
                policy_version=0,
                stop_reason="length",
                text="",
            )
        )
    return items


def _measure_peak(options: argparse.Namespace) -> float:
    """Return the MiB of a step's peak above the student after a step without teachers."""
    folder, kind, k, residency = (
        Path(options.measure[0]),
        options.measure[1],
        int(options.measure[2]),
        options.measure[3],
    )
    vocabulary, trainer = _load_student(folder)
    clear_peak()
    before = read_memory("VmRSS")
    teacher = _build_teacher(
        kind, [_load_client(folder / str(number), residency, trainer) for number in range(k)]
    )
    items = _make_rollouts(options.rollouts, options.tokens, k, vocabulary)
    clear_peak()
    for _ in range(2):
        _step(trainer, teacher, items, [])
    return read_memory("VmHWM") - before


if __name__ == "__main__":
    main()
