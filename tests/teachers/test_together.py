"""Several teachers in whole runs: they learn, the metrics name them, and a resumed run is the same run."""

import json
from pathlib import Path
from typing import Any

import pytest
from toy import assert_same_run, curve, forked, rows, toy_run

from practicum.backends.local.residency import OffloadedHead
from practicum.functional.head import Head

pytestmark = pytest.mark.long
SELF = {"type": "self", "weights": "ema", "rate": 0.5}


def model(models: Path, residency: str = "resident") -> dict[str, Any]:
    return {"type": "model", "model": str(models / "teacher"), "residency": residency}


def run(models: Path, out: Path, teacher: dict[str, Any], **changes: Any) -> Path:
    return toy_run(
        models, out, {"teacher": teacher, "train.steps": 2, "evaluation.prompts": 4, **changes}
    ).folder


def test_where_the_weights_are_changes_no_bit_of_a_run(models: Path, tmp_path: Path) -> None:
    folders = [
        run(
            models,
            tmp_path / residency,
            {"type": "route", "teachers": {"only": model(models, residency)}, "default": "only"},
        )
        for residency in ("resident", "swap", "disk")
    ]
    for folder in folders[1:]:
        assert_same_run(folders[0], folder)
    assert len(curve(folders[0], "reverse_kl/only")) == 2


def test_no_head_from_disk_is_held_longer_than_it_is_read(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: set[tuple[int, ...]] = set()
    most = [0]
    fetch, release = OffloadedHead._fetched, OffloadedHead.release

    def reading(self: OffloadedHead) -> Head:
        held.add(self.key)
        most.append(len(held))
        return fetch(self)

    def releasing(self: OffloadedHead) -> None:
        held.discard(self.key)
        release(self)

    monkeypatch.setattr(OffloadedHead, "_fetched", reading)
    monkeypatch.setattr(OffloadedHead, "release", releasing)
    disk = model(models, "disk")
    lines = [
        json.dumps({"prompt": word, "answer": word, "domain": domain})
        for word in ("ab", "cd")
        for domain in "xy"
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    domains = {"type": "route", "teachers": {"x": disk, "y": disk}}
    task = {"type": "jsonl", "path": str(tmp_path / "train.jsonl"), "heldout": 0}
    folder = run(models, tmp_path / "route", domains, **{"task": task, "evaluation.prompts": 0})
    assert {"reverse_kl/x", "reverse_kl/y"} <= rows(folder / "metrics.jsonl")[0].keys()
    assert (max(most), held) == (1, set())
    run(models, tmp_path / "pool", {"type": "pool", "teachers": {"a": disk, "b": disk}})
    assert (max(most), held) == (2, set()), "after the last evaluation too"


@pytest.mark.parametrize(
    "kind",
    ["sum", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("geometric", "arithmetic"))],
)
def test_a_pool_teaches_and_resumes_bit_for_bit(models: Path, tmp_path: Path, kind: str) -> None:
    teacher = {
        "type": "pool",
        "kind": kind,
        "teachers": {"own": SELF, "other": model(models, "disk")},
    }
    changes = {
        "teacher": teacher,
        "train.steps": 4,
        "train.checkpoint_every": 2,
        "evaluation.prompts": 4,
    }
    whole = toy_run(models, tmp_path / "whole", changes).folder
    assert (
        forked(lambda: toy_run(models, tmp_path / "cut", changes), {"PRACTICUM_FAULT": "update:3"})
        == 137
    )
    assert_same_run(whole, toy_run(models, tmp_path / "cut", changes, resume=True).folder)


@pytest.mark.parametrize("signal", ["full", "sampled", "topk(3)"])
def test_a_pool_of_one_is_that_teacher(models: Path, tmp_path: Path, signal: str) -> None:
    changes = {"objective": {"signal": signal}}
    alone = run(models, tmp_path / "alone", model(models), **changes)
    pooled = run(
        models, tmp_path / "pooled", {"type": "pool", "teachers": {"one": model(models)}}, **changes
    )
    for name in ("loss", "grad_norm"):
        assert curve(pooled, name) == pytest.approx(curve(alone, name), rel=1e-4)


def test_a_context_that_shows_the_attempt_and_its_outcome_teaches(
    models: Path, tmp_path: Path
) -> None:
    teacher = {"type": "privileged", "teacher": model(models), "question": "{attempt}{answer}"}
    assert len(curve(run(models, tmp_path / "attempt", teacher), "loss")) == 2
    sibling = {"type": "privileged", "teacher": model(models), "reference": "{sibling}"}
    assert len(curve(run(models, tmp_path / "sibling", sibling, **{"rollout.n": 2}), "length")) == 2


def test_a_route_by_outcome_leaves_the_correct_ones_alone(models: Path, tmp_path: Path) -> None:
    teacher = {
        "type": "route",
        "key": "outcome",
        "teachers": {"correct": "none", "incorrect": model(models)},
    }
    folder = run(models, tmp_path, teacher)
    assert len(curve(folder, "reverse_kl/incorrect")) == 2
