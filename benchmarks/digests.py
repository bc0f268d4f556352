"""The bytes that tiny runs of every kind write, as digests: whether a change of the code changed what a run computes.

    python -m benchmarks digests > before.txt
    python -m benchmarks digests --against before.txt
    python -m benchmarks digests --quick

Nine runs of models made from scratch take half a minute of one core; `--quick` does the plain one alone. Each prints a line of
JSON: its name, and the SHA-256 of its metrics, of its rollouts and of the tensors of its last checkpoint. With `--against`, a table
of what differs from the lines of an earlier output, and exit code 1. Only outputs of one machine and the same versions compare.
"""

import argparse
import hashlib
import json
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.measuring import format_table

STUDENT = {
    "architecture": "llama",
    "hidden_size": 32,
    "layers": 2,
    "heads": 2,
    "seed": 1,
    "pretrain": {"steps": 10},
}
TEACHER = STUDENT | {"hidden_size": 48, "seed": 2, "pretrain": {"steps": 20}}
BASE: dict[str, Any] = {
    "student": {"model": STUDENT},
    "teacher": {"type": "model", "model": TEACHER},
    "task": {
        "type": "reverse",
        "alphabet": "abcd",
        "shortest": 2,
        "longest": 3,
        "train_size": 48,
        "heldout_size": 8,
    },
    "rollout": {"n": 2, "max_new_tokens": 6},
    "objective": {"signal": "full", "divergence": "reverse_kl"},
    "optimizer": {"learning_rate": 0.003},
    "train": {"steps": 4, "prompts_per_step": 8, "checkpoint_every": 2, "threads": 1},
    "evaluation": {"prompts": 8, "max_new_tokens": 6},
}
TURNS = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}"
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "candidates": {
        "objective": {"signal": "topk(6)", "divergence": "jsd(0.3)"},
        "train": BASE["train"] | {"updates_per_step": 2},
    },
    "self": {
        "teacher": {"type": "self", "weights": "ema"},
        "objective": {"signal": "full", "divergence": "forward_kl"},
    },
    "privileged": {
        "teacher": {"type": "privileged", "teacher": {"type": "self"}, "question": "{answer}"}
    },
    "pool": {
        "teacher": {
            "type": "pool",
            "teachers": {
                "a": {"type": "model", "model": TEACHER},
                "b": {"type": "model", "model": TEACHER | {"seed": 3}},
            },
        }
    },
    "conversation": {
        "student": {
            "model": {
                "architecture": "llama",
                "hidden_size": 24,
                "layers": 2,
                "heads": 2,
                "seed": 1,
            },
            "template": TURNS,
        },
        "teacher": {"type": "expert"},
        "task": {"type": "walker"},
        "rollout": {"n": 1, "max_new_tokens": 80},
        "train": BASE["train"] | {"steps": 3},
        "evaluation": {"prompts": 8, "temperature": 1.0},
    },
    "ahead": {
        "rollout": BASE["rollout"] | {"max_staleness": 1},
        "objective": {"signal": "sampled", "correction": "ratio_truncate(2)"},
    },
    "adapters": {
        "student": {"model": STUDENT, "lora": {"rank": 4}},
        "objective": {
            "signal": "sampled",
            "estimator": "score_function(gamma=1, baseline=group_mean)",
        },
    },
    "resumed": {
        "reference": {"type": "model", "model": TEACHER},
        "objective": {
            "losses": [
                {"signal": "full"},
                {"signal": "sampled", "against": "reference", "coefficient": 0.1},
            ]
        },
    },
}
"""The sections of each run that replace those of `BASE`."""


def main() -> None:
    """Print a line for each run; exit with 1 where one differs from an earlier output."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the plain run alone")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="an earlier output of this command"
    )
    options = parser.parse_args()
    before = None if options.against is None else read(options.against)
    lines = []
    for line in yield_digests(["plain"] if options.quick else list(RUNS)):
        print(json.dumps(line), flush=True)
        lines.append(line)
    differing = [] if before is None else find_differences(lines, before)
    if differing:
        print(format_table(["run", "file", "before", "now"], differing))
        sys.exit(1)


def yield_digests(names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Do the runs of those names in a folder that is thrown away, and yield the line of each."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            yield {"run": name, **hash_run(_run(name, Path(folder)))}


def hash_run(run: Path) -> dict[str, str]:
    """Return the digests of a run folder's rows, and of all tensors of its newest checkpoint."""
    from practicum.run_dir.checkpoints import step_folders

    _, newest = max(step_folders(run / "checkpoints"))
    tensors = sorted(newest.glob("*.safetensors"))
    return {
        **{name: _hash_files([run / name]) for name in ("metrics.jsonl", "rollouts.jsonl")},
        "checkpoint": _hash_files(tensors),
    }


def read(path: Path) -> dict[str, dict[str, str]]:
    """Return the lines of an earlier output by their run; exit where a line is none of them."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {line["run"]: line for line in lines}
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(
            f"{path} holds no digests ({error}); write the output of `python -m benchmarks digests` into it"
        )


def find_differences(
    lines: Iterable[Mapping[str, str]], before: Mapping[str, Mapping[str, str]]
) -> list[list[str]]:
    """Return a row for each digest that is another one than before, or was not there."""
    return [
        [line["run"], name, before.get(line["run"], {}).get(name, "-")[:12], digest[:12]]
        for line in lines
        for name, digest in line.items()
        if before.get(line["run"], {}).get(name) != digest
    ]


def _run(name: str, folder: Path) -> Path:
    """Do a run; the one that is resumed was stopped after its first step."""
    from practicum.errors import Interrupted
    from practicum.recipe import parse_recipe
    from practicum.runs import run

    recipe = parse_recipe({"name": name, **BASE, **RUNS[name]}, name)
    if name == "resumed":
        signals = iter([None, signal.SIGINT])
        with suppress(Interrupted):
            run(recipe, out=folder, stop=lambda: next(signals, None), progress=False)
    return run(recipe, out=folder, resume=name == "resumed", progress=False).folder


def _hash_files(paths: Sequence[Path]) -> str:
    """Return the digest of some files, their names included."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
