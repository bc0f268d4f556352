"""Twenty steps of three objectives give the curves that are stored next to this file.

After an intended change of the curves, `python -m tests.golden` rewrites them.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from toy import in_check, make_model, rows, toy_run

GOLDEN = Path(__file__).with_name("golden")
KEPT = ("step", "loss", "reverse_kl", "student_entropy", "grad_norm", "length", "reward")
OBJECTIVES: dict[str, dict[str, Any]] = {
    "reverse_kl": {"signal": "full", "divergence": "reverse_kl"},
    "jsd_topk": {"signal": "topk(6)", "divergence": "jsd(0.3)"},
    "sampled_to_the_end": {
        "signal": "sampled",
        "estimator": "score_function(gamma=1, baseline=group_mean)",
    },
}


def curves(folder: Path, name: str) -> list[dict[str, float]]:
    """Return the stored numbers of a fresh run on models made in `folder`."""
    make_model(folder / "student", seed=1)
    make_model(folder / "teacher", seed=2, pretrain=20)
    changes = {
        "objective": OBJECTIVES[name],
        "train.steps": 20,
        "train.checkpoint_every": None,
        "rollout.n": 2,
    }
    run = toy_run(folder, folder / "runs", changes).folder
    return [{key: row[key] for key in KEPT if key in row} for row in rows(run / "metrics.jsonl")]


def rewrite() -> list[Path]:
    """Write every golden curve; return their files."""
    paths = []
    for name in OBJECTIVES:
        with tempfile.TemporaryDirectory() as folder:
            found = curves(Path(folder), name)
        paths.append(GOLDEN / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    return paths


@pytest.mark.parametrize("name", in_check(OBJECTIVES, next(iter(OBJECTIVES))))
def test_the_curve_is_the_golden_one(tmp_path: Path, name: str) -> None:
    expected, found = rows(GOLDEN / f"{name}.jsonl"), curves(tmp_path, name)
    assert len(found) == len(expected) == 20
    for kept, row in zip(expected, found, strict=True):
        assert row == pytest.approx(kept, rel=1e-5, abs=1e-7), f"step {kept['step']}"


def test_every_golden_file_belongs_to_an_objective() -> None:
    assert {path.stem for path in GOLDEN.glob("*.jsonl")} == set(OBJECTIVES)
