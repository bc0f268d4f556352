"""Run whole steps of TRL's two trainers on a GPU, in a separate process, on the models that `benchmarks.gpu` measures."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_models import SHAPES, write_folder
from benchmarks.gpu_parts import Bench, Figures, draw_tokens
from benchmarks.measuring import run_in_process

TRAINERS = ("gkd", "distillation")
ROWS_A_PASS = 8
"""The answers of a forward pass: their logits over the whole vocabulary must fit."""


class PeerError(Exception):
    """TRL's process ended without figures; the message is its last line."""


def measure_trl_step(
    bench: Bench, trainer: str, pair: tuple[str, str], sizes: tuple[int, int, int], python: str
) -> Figures:
    """Return a step's figures as `benchmarks.gpu_parts.measure_step` does; sizes are rows, prompt and new tokens.

    The student's weights are float32 and multiply in bfloat16, as this library's do.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for role, shape in zip(("student", "teacher"), pair, strict=True):
            write_folder(shape, folder / role, learns=role == "student")
        job = build_job(folder, trainer, pair[0], sizes, bench)
        path = folder / "job.json"
        path.write_text(json.dumps(job), encoding="utf-8")
        try:
            answer = run_in_process("benchmarks.step_trl", path, python=python)
        except SystemExit as error:
            raise PeerError(str(error).strip().splitlines()[-1]) from error
    seconds = sum(answer["seconds"])
    return {
        "tokens_per_second": sum(answer["tokens"]) / seconds,
        "seconds": seconds / len(answer["seconds"]),
        "sample_share": sum(answer["sample"]) / seconds,
        "peak_gib": answer["peak_mib"] / 1024,
    }


def build_job(
    folder: Path, trainer: str, student: str, sizes: Sequence[int], bench: Bench
) -> dict[str, object]:
    """Return what `benchmarks.step_trl` is told."""
    rows, prompt, new = sizes
    vocabulary = SHAPES[student].vocabulary
    prompts = [draw_tokens(prompt, row, vocabulary) for row in range(rows)]
    return {
        "trainer": trainer,
        "student": str(folder / "student"),
        "teacher": str(folder / "teacher"),
        "teacher_dtype": "bfloat16",
        "bfloat16": True,
        "device": bench.device,
        "out": str(folder / "out"),
        "prompts": prompts,
        "answers": [(prompts[0], draw_tokens(new, rows, vocabulary))],
        "stops": [1],
        "batch": min(ROWS_A_PASS, rows),
        "new_tokens": new,
        "steps": bench.rounds + 1,
        "learning_rate": 1e-6,
        "seed": 0,
    }
