"""SD-Zero's two losses (2604.12002) from a model's own log-probabilities: an attempt and a phrase begin the answer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toy import assert_same_run, forked, rows, toy_recipe, toy_run
from transformers import AutoModelForCausalLM

from practicum.objective import Full
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.training.loop import generate_rollouts, score_rollouts
from practicum.training.observing import accumulate_gradient
from practicum.types import Rollout

PHRASES = {"correct": "{attempt}\n\nab", "incorrect": "{attempt}\n\ndc"}
REVISE: dict[str, Any] = {
    "notes": {"revision": {"type": "filled", **PHRASES}},
    "rollout": {
        "n": 2,
        "max_new_tokens": 6,
        "source": "retry(revision, filter=all, prompt=with_note, place=answer)",
    },
    "objective": {
        "losses": [
            {"signal": "text", "divergence": "ce", "coefficient": 2},
            {"signal": "text", "divergence": "ce", "source": "environment"},
        ],
        "aggregate": "seq_mean_token_sum",
    },
    "train.steps": 3,
    "train.prompts_per_step": 3,
    "train.checkpoint_every": 1,
}
DISTIL: dict[str, Any] = {
    "notes": REVISE["notes"],
    "teacher": {
        "type": "privileged",
        "teacher": {"type": "self", "weights": "frozen"},
        "reference": "{revision}",
        "place": "answer",
    },
    "rollout": {"n": 2, "max_new_tokens": 6},
    "objective": {"signal": "full", "divergence": "reverse_kl"},
}


def assemble(models: Path, folder: Path, settings: dict[str, Any]) -> RunComponents:
    return assemble_run(toy_recipe(models, settings), folder)


def sample(components: RunComponents) -> list[Rollout]:
    parts, settings = components.parts, components.settings
    rollouts = generate_rollouts(1, settings.plan(1), parts, settings, parts.sampler, 0)
    return list(rollouts)


def read(models: Path, *parts: Any) -> Tensor:
    """Return the log-probabilities [tokens, vocabulary] of the last part's tokens, after all earlier parts."""
    model = AutoModelForCausalLM.from_pretrained(models / "student", dtype=torch.float32)
    text = torch.tensor([token for part in parts for token in part])
    return model(text[None]).logits[0, :-1].log_softmax(-1)[-len(parts[-1]) :]


def test_the_first_phase_learns_the_whole_and_the_revision_once_more(
    models: Path, tmp_path: Path
) -> None:
    """L_generation = -log p(attempt, phrase, revision | x), L_revision = -log p(revision | x, attempt, phrase)."""
    components = assemble(models, tmp_path, REVISE)
    rollouts = sample(components)
    parts, objective = components.parts, components.settings.plan(1).objective
    accumulate_gradient(parts.student, score_rollouts(rollouts, objective, parts), objective, 3)
    model = AutoModelForCausalLM.from_pretrained(models / "student", dtype=torch.float32)
    total = torch.zeros(())
    for rollout in rollouts:
        attempt, _, phrase = rollout.notes["revision"].partition("\n\n")
        assert phrase in ("ab", "dc")
        beginning = parts.renderer.encode(f"{attempt}\n\n{phrase}\n\n")
        assert rollout.tokens[: len(beginning)].tolist() == beginning
        text = torch.tensor([*rollout.prompt_tokens, *rollout.tokens.tolist()])
        logprobs = model(text[None]).logits[0, :-1].log_softmax(-1).gather(1, text[1:, None])[:, 0]
        whole = logprobs[len(rollout.prompt_tokens) - 1 :]
        total = total - whole.sum() - whole[len(beginning) :].sum()
    (total / len(rollouts)).backward()
    reference = {name: weight.grad for name, weight in model.named_parameters()}
    for name, weight in components.weights.items():
        if weight.grad is not None:
            torch.testing.assert_close(weight.grad, reference[name], atol=1e-5, rtol=1e-4)


def test_the_second_phases_teacher_reads_the_answer_again_after_itself_and_the_phrase(
    models: Path, tmp_path: Path
) -> None:
    components = assemble(models, tmp_path, DISTIL)
    rollouts = sample(components)
    parts = components.parts
    assert parts.teacher is not None
    signals = parts.teacher.score(rollouts, Full())
    for rollout, signal in zip(rollouts, signals, strict=True):
        assert signal.hidden is not None and signal.head is not None
        revision = parts.renderer.encode(rollout.notes["revision"] + "\n\n")
        expected = read(models, rollout.prompt_tokens, revision, rollout.tokens.tolist())
        logprobs = signal.head.logits(signal.hidden).log_softmax(-1)
        torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("phase", [REVISE, DISTIL], ids=["revise", "distil"])
def test_a_killed_run_has_the_same_bytes(
    models: Path, tmp_path: Path, phase: dict[str, Any]
) -> None:
    changes = {**phase, "train.steps": 3, "train.checkpoint_every": 1}
    whole, out = toy_run(models, tmp_path / "whole", changes).folder, tmp_path / "parts"
    assert forked(lambda: toy_run(models, out, changes), {"PRACTICUM_FAULT": "update:2"}) == 137
    assert_same_run(whole, toy_run(models, out, changes, resume=True).folder)
    assert all("revision" in row["notes"] for row in rows(whole / "rollouts.jsonl"))
