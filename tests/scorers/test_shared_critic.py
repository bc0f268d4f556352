"""A critic on the student's body: its loss is part of the student's update."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learned_scorers import GENERATOR, stop_and_resume, write_answer
from toy import assert_same_run, curve, rows, toy_data, toy_recipe, toy_run
from transformers import AutoModelForCausalLM

from practicum.backends.local.backend import LocalBackend
from practicum.errors import CapabilityError, RecipeError
from practicum.recipe import parse_recipe
from practicum.runs.assembly import assemble_run
from practicum.scorers.value import ValueScorer
from practicum.training.judging import add_judgements

SHARED = {"type": "value", "body": "student", "learning_rate": 0.01, "gamma": 0.9}
CHANGES: dict[str, Any] = {
    "rollout": {"n": 2, "max_new_tokens": 5, "source": "student"},
    "objective": {
        "losses": [
            {"signal": "score(none)", "scorer": "critic", "correction": "ratio_clip(0.2, 0.2)"}
        ]
    },
    "scorers": {"critic": {**SHARED, "warmup_steps": 1}},
    "train.steps": 4,
    "train.prompts_per_step": 4,
}


@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_gradient_of_the_body_is_the_losses(
    models: Path, tmp_path: Path, clip: float | None
) -> None:
    """Check against autograd through another copy of the model, after the values have moved."""
    GENERATOR.manual_seed(3)
    settings = {**SHARED, "coefficient": 0.7, "clip": clip, "gae_lambda": 0.8}
    recipe = toy_recipe(models, {"scorers": {"critic": settings}})
    components = assemble_run(recipe, tmp_path)
    critic = components.parts.scorers["critic"]
    assert isinstance(critic, ValueScorer)
    head = critic._model._scalar.model._head  # type: ignore[attr-defined]
    head.data.normal_(generator=GENERATOR)
    answers = [
        write_answer(number, number % 4, "student", float(number > 2)) for number in range(5)
    ]
    answers[1] = replace(answers[1], loss_mask=torch.tensor([True, False, True]))
    rollouts = list(add_judgements(answers, {"critic": critic}, {}))
    # As in a later epoch: the values are no longer the values before the step.
    moved = head.detach().clone() + 0.2 * torch.randn(head.shape, generator=GENERATOR)
    head.data.copy_(moved)
    critic.add_gradient(rollouts)

    model = AutoModelForCausalLM.from_pretrained(models / "student", dtype=torch.float32)
    losses = []
    for rollout in rollouts:
        judgement = rollout.judgements["critic"]
        assert judgement.tokens is not None and judgement.value is not None
        text = torch.tensor([*rollout.prompt_tokens, *rollout.tokens.tolist()])
        states = model.model(text[None]).last_hidden_state[0, len(rollout.prompt_tokens) - 1 : -1]
        values = (states @ moved[:-1] + moved[-1])[rollout.loss_mask]
        before = critic._before[rollout.prompt.id, 0]
        assert before[0] == pytest.approx(judgement.value)
        returns = judgement.tokens[rollout.loss_mask] + before
        distances = (values - returns).square()
        if clip is not None:
            limited = before + (values - before).clamp(-clip, clip)
            distances = torch.maximum(distances, (limited - returns).square())
        losses.append(distances)
    (0.7 * 0.5 * torch.cat(losses).mean()).backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    assert components.weights is not None
    gradients = {name: weight.grad for name, weight in components.weights.items()}
    assert any(grad is not None and grad.abs().max() > 1e-4 for grad in gradients.values())
    for name, grad in gradients.items():
        torch.testing.assert_close(grad, expected[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("lag", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_resumed_run_has_the_same_bytes(models: Path, tmp_path: Path, lag: int) -> None:
    changes = {**CHANGES, "rollout.max_staleness": lag, "train.epochs": 2}
    changes["train.updates_per_step"] = 2
    whole = toy_run(models, tmp_path / "whole", changes).folder
    assert_same_run(whole, stop_and_resume(models, tmp_path / "parts", changes))
    assert curve(whole, "scorer-critic/undecided") == [1.0, 0.0, 0.0, 0.0]
    (saved,) = (whole / "checkpoints" / "step-4").glob("scorer-*")
    own = toy_run(models, tmp_path / "own", {**changes, "scorers": {"critic": {"type": "value"}}})
    (copied,) = (own.folder / "checkpoints" / "step-4").glob("scorer-*")
    assert saved.stat().st_size < 0.1 * copied.stat().st_size, "only the output is saved"


def test_without_a_coefficient_the_body_learns_nothing_from_it(
    models: Path, tmp_path: Path
) -> None:
    """In the warm-up the critic gives no advantages, so that only its own loss moves the body."""
    norms = {}
    for coefficient in (0.0, 1.0):
        critic = {**SHARED, "warmup_steps": 9, "coefficient": coefficient, "reward": "judge"}
        changes = {**CHANGES, "scorers": {"judge": {"type": "discriminator"}, "critic": critic}}
        changes["rollout.source"] = "join(teacher)"
        folder = toy_run(models, tmp_path / str(coefficient), changes).folder
        norms[coefficient] = [row["grad_norm"] for row in rows(folder / "metrics.jsonl")]
    assert norms[0.0] == [0.0] * 4
    # Judge and output start at 0, so that the body gets no gradient in the first two steps.
    assert norms[1.0][:2] == [0.0] * 2 and min(norms[1.0][2:]) > 0.0


@pytest.mark.parametrize(
    ("critic", "line"),
    [
        (
            {**SHARED, "updates": 4},
            "body: student has the student's weights and updates; leave out u",
        ),
        ({"type": "value", "coefficient": 0.5}, "coefficient needs body: student"),
    ],
)
def test_settings_of_the_other_body_are_refused(
    models: Path, critic: dict[str, Any], line: str
) -> None:
    with pytest.raises(RecipeError, match=line):
        parse_recipe(toy_data(models, {"scorers": {"critic": critic}}), "toy")


def test_a_student_in_another_process_is_refused(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalBackend, "share_student", lambda self, student: None)
    line = re.escape("scorers.critic.body: student needs the student's weights in this process")
    with pytest.raises(CapabilityError, match=line):
        toy_run(models, tmp_path, CHANGES)
