"""A new part is one file: patches with a part of each kind are applied to a copy of the package, and all of them run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PATCHES = sorted(Path(__file__).with_name("patches").glob("*.patch"))
SOURCE = Path(__file__).resolve().parents[1] / "src"
GIT = shutil.which("git")

RUN = """
import json, sys
import practicum
from practicum.cli.listing import list_names

result = practicum.distill(
    name="patched",
    student={"model": {"hidden_size": 16, "layers": 1, "heads": 2, "tokenizer": "bytes"}},
    teacher={
        "type": "privileged",
        "teacher": {"type": "self", "weights": "frozen"},
        "reference": "Your answer is {size}.",
    },
    notes={"size": {"type": "length"}},
    scorers={"usual": {"type": "brief"}},
    task={"type": "double", "letters": "abcd"},
    objective={
        "losses": [
            {"signal": "nucleus(0.8)", "divergence": "hellinger"},
            {"signal": "score", "scorer": "usual"},
        ]
    },
    rollout={"source": "surest(2)", "max_new_tokens": 4, "n": 2},
    train={"steps": 1, "prompts_per_step": 2, "threads": 1},
    out=sys.argv[1],
)
kinds = ("divergences", "sources", "signals", "scorers", "notes", "tasks")
names = {kind: [row["name"] for row in list_names(kind)] for kind in kinds}
metrics = json.loads((result.folder / "metrics.jsonl").read_text().splitlines()[0])
print(json.dumps({"names": names, "metrics": metrics}))
"""

needs_git = pytest.mark.skipif(GIT is None, reason="git applies the patches")


@needs_git
@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_a_part_changes_one_file(patch: Path) -> None:
    answer = subprocess.run(
        [str(GIT), "apply", "--numstat", str(patch)], check=True, capture_output=True, text=True
    )
    assert len(answer.stdout.splitlines()) == 1


@needs_git
def test_parts_of_all_kinds_run_after_their_patches(tmp_path: Path) -> None:
    shutil.copytree(
        SOURCE, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    subprocess.run(
        [str(GIT), "apply", *map(str, PATCHES)], cwd=tmp_path, check=True, capture_output=True
    )
    answer = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "runs")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stderr
    seen = json.loads(answer.stdout.splitlines()[-1])
    parts = {
        "divergences": "hellinger",
        "sources": "surest",
        "signals": "nucleus",
        "scorers": "brief",
        "notes": "length",
        "tasks": "double",
    }
    assert len(PATCHES) == len(parts)
    assert all(part in seen["names"][kind] for kind, part in parts.items())
    assert "sureness" in str(seen["metrics"]) and seen["metrics"]["loss_0"] > 0
