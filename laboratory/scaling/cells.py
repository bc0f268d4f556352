"""Define the cells of the scaling law, and run one.

A cell is one run: a student, a teacher of a size and a quality, a number of tokens, and the author of the answers. Sizes are widths
of models with two layers. A draw fixes the initial weights of all models and the words of the task.
"""

import contextlib
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.measuring import describe_commit
from laboratory.scaling import chain
from practicum.backends.local.scratch import build_scratch_model
from practicum.models.config import PretrainConfig, ScratchConfig
from practicum.ports import TaskContext
from practicum.recipe import parse_recipe
from practicum.runs import run
from practicum.runs.exporting import export_run

STUDENTS = (24, 48, 96, 192)
TEACHERS = (48, 96, 192)
QUALITIES = (200, 600, 1800)
"""Supervised steps of a teacher."""
TOKENS = (12_500, 50_000, 200_000)
ANSWERS = (4, 16)
"""Answers per prompt; most cells have 1."""
RATES = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032)

DRAWS, RATE_DRAW = (0, 1), 9
"""The draws that count, and the draw on which the learning rates are chosen."""

COLD_START = 40
"""Supervised steps of a student before its run."""

BATCH = 16
"""Answers per step."""

HELDOUT = 128
"""Held-out prompts of an evaluation; the distance to the process has other prompts."""

AUTHORS = ("student", "teacher")
"""The models that can write the answers."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. `rate` is None where the rate of its width and author was chosen in the part `rates`."""

    part: str
    draw: int
    student: int
    teacher: int
    quality: int
    tokens: int
    author: str = "student"
    divergence: str = "reverse_kl"
    answers: int = 1
    rate: float | None = None

    @property
    def name(self) -> str:
        """The cell in one word, which tells it from all others."""
        return "-".join(str(value) for value in asdict(self).values() if value is not None)


def list_cells(part: str) -> list[Cell]:
    """Return the cells of a part."""
    return list({"rates": _list_rates, "grid": _list_grid, "larger": _list_larger}[part]())


def _list_rates() -> Iterator[Cell]:
    for student, author in product((*STUDENTS, 384), AUTHORS):
        for rate in choose_rates(student):
            yield build_rate_cell(student, author, rate)


def build_rate_cell(student: int, author: str, rate: float) -> Cell:
    """Return a cell that tries a learning rate: the teacher and the tokens are in the middle."""
    return Cell(
        "rates", RATE_DRAW, student, TEACHERS[1], QUALITIES[1], TOKENS[1], author, rate=rate
    )


def choose_rates(student: int) -> Sequence[float]:
    """Return the three learning rates that are tried for a width: the wider, the lower."""
    first = {24: 4, 48: 3, 96: 2, 192: 1, 384: 0}[student]
    return RATES[first : first + 3]


def _list_grid() -> Iterator[Cell]:
    for draw in DRAWS:
        for (i, student), (j, teacher), (k, tokens) in product(
            enumerate(STUDENTS), enumerate(TEACHERS), enumerate(TOKENS)
        ):
            # A Latin square: every pair of two quantities meets every quality in the two draws or
            # nearly, with a third of the cells of a full grid.
            quality = QUALITIES[(i + j + k + draw) % len(QUALITIES)]
            place = ("grid", draw, student, teacher, quality, tokens)
            yield Cell(*place)
            yield Cell(*place, author="teacher")
            if teacher == 96:
                yield Cell(*place, divergence="forward_kl")
            if teacher == 96 and student in (48, 96) and tokens > 12_500:
                for answers in ANSWERS:
                    yield Cell(*place, answers=answers)


def _list_larger() -> Iterator[Cell]:
    for draw, (student, tokens), (teacher, quality), author in product(
        DRAWS,
        ((192, 800_000), (384, 200_000)),
        ((96, QUALITIES[2]), (192, QUALITIES[1])),
        AUTHORS,
    ):
        yield Cell("larger", draw, student, teacher, quality, tokens, author)


def build_models(models: Path, cell: Cell) -> tuple[Path, Path]:
    """Return the folders of a cell's student and teacher; build them where they do not exist."""
    student = _build_model(models, cell.draw, cell.student, COLD_START, "student")
    return student, _build_model(models, cell.draw, cell.teacher, cell.quality, "teacher")


def _build_model(models: Path, draw: int, width: int, steps: int, side: str) -> Path:
    folder = models / f"{side}-{draw}-{width}-{steps}"
    if folder.is_dir():
        return folder
    config = ScratchConfig(
        hidden_size=width,
        layers=2,
        heads=4,
        seed=10 * draw + (side == "teacher"),
        # Wide models do not train at the rate of narrow ones.
        pretrain=PretrainConfig(steps=steps, learning_rate=3e-3 * min(1.0, math.sqrt(48 / width))),
    )
    task = chain.build(chain.Config(seed=draw), TaskContext(seed=draw, base_dir=models))
    unfinished = Path(tempfile.mkdtemp(dir=models, prefix="unfinished-"))
    build_scratch_model(unfinished, config, chain.LETTERS, task.train_prompts())
    # Another process may have built the same model in the meantime, with the same weights.
    with contextlib.suppress(OSError):
        unfinished.rename(folder)
    shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def write_recipe(cell: Cell, student: Path, teacher: Path, rate: float) -> dict[str, Any]:
    """Return the recipe of a cell."""
    return {
        "name": "cell",
        "seed": cell.draw,
        "student": {"model": str(student)},
        "teacher": {"type": "model", "model": str(teacher)},
        "task": {"type": "laboratory.scaling.chain", "seed": cell.draw},
        "rollout": {"n": cell.answers, "max_new_tokens": chain.ANSWER, "source": cell.author},
        "objective": {"signal": "full", "divergence": cell.divergence},
        "optimizer": {"learning_rate": rate, "warmup_steps": 5, "schedule": "linear"},
        "train": {
            "steps": round(cell.tokens / (BATCH * chain.ANSWER)),
            "prompts_per_step": BATCH // cell.answers,
            "threads": 1,
        },
        "evaluation": {"prompts": HELDOUT, "temperature": 1.0, "teacher": False},
        "monitors": "off",
    }


def play(cell: Cell, rate: float, models: Path) -> dict[str, Any]:
    """Run a cell; returns its row: what it is, what it cost, and the errors of student and teacher."""
    torch.set_num_threads(1)
    models.mkdir(parents=True, exist_ok=True)
    student, teacher = build_models(models, cell)
    recipe = write_recipe(cell, student, teacher, rate)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        run(parse_recipe(recipe, cell.name), out=Path(name), progress=False)
        summary = json.loads((Path(name) / "cell" / "summary.json").read_text("utf-8"))
        export_run(Path(name) / "cell", Path(name) / "after")
        errors = {
            "before": measure_model(student, cell.draw),
            "after": measure_model(Path(name) / "after", cell.draw),
            "teacher_errors": measure_model(teacher, cell.draw),
        }
    scaling, cost = summary["scaling"], summary["cost"]
    return {
        "name": cell.name,
        **asdict(cell),
        "rate": rate,
        "student_parameters": scaling["N_student"],
        "teacher_parameters": scaling["N_teacher"]["teacher"],
        "learned_tokens": scaling["D"],
        "flops": {phase: cost[phase]["flops"] for phase in ("sample", "score", "update")},
        "reverse_kl": summary["after"]["reverse_kl"],
        **errors,
        "seconds": round(time.monotonic() - began, 1),
        "commit": describe_commit(),
    }


def measure_model(folder: Path, draw: int) -> dict[str, float]:
    """Return the errors of the model in a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    errors = chain.measure_errors(model, AutoTokenizer.from_pretrained(folder), draw)
    return {name: round(value, 5) for name, value in errors.items()}
