"""Whole runs that learn from pairs: their reports, and the same bytes after a kill and in micro-batches."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import assert_same_run, curve, forked, rows, toy_recipe, toy_run

from practicum.runs.assembly import assemble_run
from practicum.training.loop import generate_rollouts, score_rollouts

SPIN: dict[str, Any] = {
    "teacher": "none",
    "reference": {"type": "self", "weights": "periodic", "period": 2},
    "rollout.source": "join(dataset+reference, student=0)",
    "objective": {"signal": "pair(spin, beta=0.3)", "against": "reference"},
}
ORPO: dict[str, Any] = {
    "reference": {"type": "self", "weights": "frozen"},
    "rollout.source": "join(teacher+reference)",
    "objective": {
        "losses": [
            {"signal": "text", "divergence": "ce", "source": "teacher"},
            {"signal": "pair(orpo)", "coefficient": 0.3},
        ]
    },
}


def test_self_play_begins_at_ln_two_and_whenever_the_opponent_is_renewed(
    models: Path, tmp_path: Path
) -> None:
    folder = toy_run(models, tmp_path, SPIN).folder
    losses = curve(folder, "loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[2] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[1] < losses[0] and losses[3] < losses[2]
    assert curve(folder, "pairs_in_order")[1] > 0.5
    assert curve(folder, "unpaired") == [0.0] * 4
    assert curve(folder, "from_reference") == [0.5] * 4


@pytest.mark.parametrize("changes", [SPIN, ORPO], ids=["spin", "orpo"])
def test_a_killed_run_resumes_to_the_same_bytes(
    models: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole = toy_run(models, tmp_path / "whole", changes).folder
    cut = tmp_path / "cut"
    assert forked(lambda: toy_run(models, cut, changes), {"PRACTICUM_FAULT": "update:4"}) == 137
    assert_same_run(whole, toy_run(models, cut, changes, resume=True).folder)


@pytest.mark.parametrize("changes", [SPIN, ORPO], ids=["spin", "orpo"])
def test_micro_batches_change_nothing_but_rounding(
    models: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    gradients = []
    for settings in (
        {},
        {"backend": {"type": "local", "micro_batch_tokens": 12, "chunk_tokens": 5}},
    ):
        built = assemble_run(toy_recipe(models, {**changes, **settings}), tmp_path)
        plan = built.settings.plan(1)
        rollouts = generate_rollouts(
            1, plan, built.parts, built.settings, built.parts.sampler, version=0
        )
        datums = score_rollouts(rollouts, plan.objective, built.parts)
        built.trainer.forward_backward(datums, plan.objective, 0)
        gradients.append(
            torch.cat([weight.grad.flatten() for weight in built.weights.values()])  # type: ignore[union-attr]
        )
        built.close()
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)
    assert gradients[0].abs().max() > 1e-3


def test_answers_without_a_partner_are_counted(models: Path, tmp_path: Path) -> None:
    """Check that a verifier that gives every answer the same reward leaves no pair, and the update is empty."""
    changes = {
        "teacher": "none",
        "reference": {"type": "self", "weights": "frozen"},
        "rollout.source": "reference",
        "rollout.n": 3,
        "objective": {"signal": "pair(dpo, choose=reward)", "against": "reference"},
        "train.steps": 2,
    }
    folder = toy_run(models, tmp_path, changes).folder
    for row in rows(folder / "metrics.jsonl"):
        assert 0.0 <= row["unpaired"] <= 1.0
        assert row["unsupervised_prompts"] == pytest.approx(8 * row["unpaired"])
        assert ("loss" in row) == (row["unpaired"] < 1.0) == (row["empty_updates"] == 0.0)
