"""Compare whole GKD runs here and in TRL: the same models, rows, learning rate and steps, and the accuracy of both students.

    python -m benchmarks end_to_end --peer-python PATH [--record]

Two from-scratch models of a toy pair for each seed, 100 steps of 32 prompts, AdamW at a constant rate, temperature 1.
`on-policy` uses the student's own answers and the reverse KL. `mixed` takes half of the answers from the rows and uses the
Jensen-Shannon divergence. Both students are then evaluated by this library on the same held-out prompts. The random draws differ,
so only the mean over seeds has to agree.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.measuring import describe_commit, format_table, run_in_process
from practicum.backends.local.scratch import build_scratch_model, collect_alphabet
from practicum.models.config import PretrainConfig, ScratchConfig
from practicum.ports import TaskContext
from practicum.recipe import parse_recipe
from practicum.runs import run
from practicum.statistics import mean_of, t_interval
from practicum.tasks import reverse

RECORD = Path(__file__).resolve().parents[1] / "results" / "end_to_end.json"

MODES: dict[str, dict[str, Any]] = {
    "on-policy": {"source": "student", "divergence": "reverse_kl", "lmbda": 1.0, "beta": 1.0},
    "mixed": {"source": "mix(student=0.5)", "divergence": "jsd(0.5)", "lmbda": 0.5, "beta": 0.5},
}
"""The setting of each mode in this library (source, divergence) and in TRL (lmbda, beta)."""

MEASURES = ("reverse_kl", "accuracy")

LEARNING_RATE, PROMPTS_PER_STEP, NEW_TOKENS, STEPS = 1e-3, 32, 8, 100

HEAD = [
    "mode",
    "measure",
    "before",
    "practicum",
    "TRL",
    "practicum - TRL",
    "95 % over seeds",
    "agree",
]


@dataclass(frozen=True, slots=True)
class Pair:
    """The evaluations of one seed: the student before, after training with this library, and after training in TRL."""

    mode: str
    seed: int
    before: dict[str, float]
    practicum: dict[str, float]
    trl: dict[str, float]


def main() -> None:
    """Train each seed in both libraries, print the table, and record it if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--record", action="store_true", help="write results/end_to_end.json")
    parser.add_argument("--quick", action="store_true", help="two steps of two seeds")
    peers.add_options(parser, ("trl",))
    arguments = parser.parse_args()
    if not peers.find_installed(["trl"], arguments.peer_python):
        raise SystemExit("without TRL there is nothing to compare with")
    seeds, steps = (2, 2) if arguments.quick else (arguments.seeds, STEPS)
    pairs: list[Pair] = []
    for mode in arguments.modes:
        for seed in range(seeds):
            pairs.append(train_both(mode, seed, steps, arguments.peer_python))
            print(json.dumps(asdict(pairs[-1])), flush=True)
    print(format_table(HEAD, list_rows(pairs)))
    if arguments.record:
        content = {
            "commit": describe_commit(),
            "date": date.today().isoformat(),
            "trl": peers.read_versions(["trl"], arguments.peer_python)["trl"],
            "steps": steps,
            "pairs": [asdict(pair) for pair in pairs],
        }
        RECORD.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def train_both(mode: str, seed: int, steps: int, python: str) -> Pair:
    """Train one student in both libraries and evaluate it three times."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_models(folder, seed)
        before = evaluate(folder, folder / "student", seed)
        recipe = _build_recipe(folder, mode, seed, steps)
        result = run(parse_recipe(recipe, "practicum"), out=folder / "runs", progress=False)
        practicum = evaluate(folder, result.folder, seed)
        shutil.copytree(folder / "student", folder / "trl")
        job = folder / "job.json"
        job.write_text(json.dumps(_build_job(folder, mode, seed, steps)), encoding="utf-8")
        run_in_process("benchmarks.end_to_end_trl", job, python=python)
        return Pair(mode, seed, before, practicum, evaluate(folder, folder / "trl", seed))


def evaluate(folder: Path, student: Path, seed: int) -> dict[str, float]:
    """Return the held-out measures of a student, from the evaluation before a run's only step."""
    recipe = _build_recipe(folder, "on-policy", seed, steps=1)
    recipe["student"] = {"model": str(student)}
    out = folder / f"evaluated-{student.name}"
    before = run(parse_recipe(recipe, "evaluated"), out=out, progress=False).summary["before"]
    return {"reverse_kl": before["reverse_kl"], "accuracy": before["accuracy"]["mean"]}


def list_rows(pairs: Sequence[Pair]) -> list[list[str]]:
    """Return a row for each mode and measure; both agree if the interval of the difference holds 0."""
    rows = []
    for mode in dict.fromkeys(pair.mode for pair in pairs):
        of_mode = [pair for pair in pairs if pair.mode == mode]
        for measure in MEASURES:
            before, practicum, trl = (
                [evaluation[measure] for evaluation in evaluations]
                for evaluations in zip(
                    *((pair.before, pair.practicum, pair.trl) for pair in of_mode), strict=True
                )
            )
            gaps = [number - peer for number, peer in zip(practicum, trl, strict=True)]
            interval = t_interval(gaps)
            assert interval is not None, "there are two seeds or more"
            means = [mean_of(numbers) or 0.0 for numbers in (before, practicum, trl)]
            agree = "yes" if interval.low <= 0.0 <= interval.high else "no"
            rows.append(
                [
                    mode,
                    measure.replace("_", " "),
                    *(f"{mean:.3f}" for mean in means),
                    f"{interval.mean:+.3f}",
                    f"[{interval.low:+.3f}, {interval.high:+.3f}]",
                    agree,
                ]
            )
    return rows


def _write_models(folder: Path, seed: int) -> None:
    """Write `student` and `teacher`, pretrained so that the teacher is much better."""
    task = _build_task(seed)
    for number, (name, size, steps) in enumerate((("student", 64, 50), ("teacher", 96, 300))):
        config = ScratchConfig(
            hidden_size=size,
            layers=2,
            heads=4,
            seed=2 * seed + number,
            pretrain=PretrainConfig(steps=steps),
        )
        build_scratch_model(folder / name, config, collect_alphabet(task), task.train_prompts())


def _build_task_data(seed: int) -> dict[str, Any]:
    return {"type": "reverse", "longest": 4, "heldout_size": 256, "seed": seed}


def _build_task(seed: int):  # type: ignore[no-untyped-def]
    return reverse.build(
        reverse.Config(**_build_task_data(seed)), TaskContext(seed=seed, base_dir=Path())
    )


def _build_recipe(folder: Path, mode: str, seed: int, steps: int) -> dict[str, Any]:
    setting = MODES[mode]
    return {
        "seed": seed,
        "student": {"model": str(folder / "student")},
        "teacher": {"type": "model", "model": str(folder / "teacher")},
        "task": _build_task_data(seed),
        "rollout": {"source": setting["source"], "n": 1, "max_new_tokens": NEW_TOKENS},
        "objective": {"signal": "full", "divergence": setting["divergence"]},
        "optimizer": {"learning_rate": LEARNING_RATE},
        "train": {"steps": steps, "prompts_per_step": PROMPTS_PER_STEP, "threads": 1},
        "evaluation": {"prompts": 256, "max_new_tokens": NEW_TOKENS},
        "monitors": "off",
    }


def _build_job(folder: Path, mode: str, seed: int, steps: int) -> dict[str, Any]:
    """Return what the process with TRL needs: folders, rows and settings."""
    rows = [
        {
            "messages": [
                *({"role": turn.role, "content": turn.content} for turn in prompt.messages),
                {"role": "assistant", "content": prompt.answer},
            ]
        }
        for prompt in _build_task(seed).train_prompts()
    ]
    return {
        "student": str(folder / "trl"),
        "teacher": str(folder / "teacher"),
        "rows": rows,
        "lmbda": MODES[mode]["lmbda"],
        "beta": MODES[mode]["beta"],
        "learning_rate": LEARNING_RATE,
        "batch": PROMPTS_PER_STEP,
        "new_tokens": NEW_TOKENS,
        "steps": steps,
        "seed": seed,
        "out": str(folder / "trl-out"),
    }
