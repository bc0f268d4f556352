"""The teacher-free control: a fixed advantage on the student's unlikely tokens, by one override."""

import math
from typing import Any

import pytest
import torch

from practicum.errors import RecipeError
from practicum.losses import build_token_batch, compute_coefficients, compute_term_values
from practicum.objective import Objective, TeacherDistribution
from practicum.recipe import load_recipe
from practicum.recipe.controls import remove_switch
from practicum.runs.stages import Pipeline, load_pipeline_or_recipe
from practicum.studies.compare.arms import Arm
from practicum.types import Datum, Prompt, Rollout, TeacherSignal

LENGTH, VOCABULARY = 40, 7


@pytest.mark.parametrize(("threshold", "advantage"), [(0.1, -1.0), (0.3, -0.5), (0.05, 2.0)])
def test_unlikely_tokens_alone_get_the_advantage(threshold: float, advantage: float) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
    none = torch.zeros(LENGTH)
    rollout = Rollout(
        Prompt("a", ()), (1,), tokens, none == 0, none, none, 0, "stop", "", reward=1.0
    )
    objective = Objective.model_validate({"signal": f"unlikely({threshold}, {advantage})"})
    batch = build_token_batch([Datum(rollout, TeacherSignal())], objective)
    logits = 2 * torch.randn(LENGTH, VOCABULARY, generator=generator, dtype=torch.float64)
    leaf = torch.log_softmax(logits, -1).requires_grad_()
    (values,) = compute_term_values(leaf, TeacherDistribution(), batch, objective)
    share = compute_coefficients(objective.losses[0], values.detach(), batch)
    (found,) = torch.autograd.grad((share * values.loss_value).sum(), leaf)
    own = leaf.detach().gather(-1, tokens[:, None])[:, 0]
    expected = torch.where(own < math.log(threshold), -advantage / LENGTH, 0.0)
    torch.testing.assert_close(found.gather(-1, tokens[:, None])[:, 0].float(), expected.float())
    assert 0 < (expected != 0).sum() < LENGTH


def test_the_teacher_is_replaced_and_nothing_else() -> None:
    recipe, control = load_recipe("papers/gkd"), load_recipe("papers/gkd", ["teacher=free"])
    (term,) = control.objective.losses
    assert term.signal.model_dump() == "unlikely(threshold=0.1, advantage=-1.0)"
    assert control.teacher.type == "none" and control.rollout.source.type == "student"
    assert control.name == "gkd-teacher-free" and control.paper is None
    for section in ("student", "task", "optimizer", "train", "evaluation"):
        assert getattr(control, section) == getattr(recipe, section)


def test_a_reward_stays_beside_it() -> None:
    control = load_recipe("papers/kdrl", ["teacher=free(0.3, -0.5)"])
    assert [term.signal.name for term in control.objective.losses] == ["score", "unlikely"]
    assert control.objective.losses[1].signal.model_dump() == (
        "unlikely(threshold=0.3, advantage=-0.5)"
    )


def test_an_arm_and_a_pipeline_take_it_too() -> None:
    arm = Arm.parse("free=papers/gkd,teacher=free(0.2, -1)")
    assert load_recipe(arm.source, arm.overrides).objective.losses[0].signal.name == "unlikely"
    pipeline = load_pipeline_or_recipe("teams/qwen3", ["teacher=free"])
    assert isinstance(pipeline, Pipeline)
    for recipe in pipeline.build_recipes().values():
        assert [term.signal.name for term in recipe.objective.losses] == ["unlikely"]


MISTAKES = {
    "teacher=free(2)": r"teacher=free\(2\): use teacher=free\(0.1, -1\)",
    "teacher=free(0.1, -1, 3)": r"use teacher=free\(0.1, -1\)",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_what_it_cannot_be_is_refused(override: str) -> None:
    with pytest.raises(RecipeError, match=MISTAKES[override]):
        load_recipe("papers/gkd", [override])
    with pytest.raises(RecipeError, match="this recipe learns from no teacher; take one that does"):
        load_recipe("papers/grpo", ["teacher=free"])


def test_the_last_switch_counts() -> None:
    remaining, switch = remove_switch(["teacher=off", "seed=1", "teacher=free(0.2)"])
    assert remaining == ["seed=1"] and switch is not None and switch.unlikely is not None
    assert switch.unlikely.threshold == 0.2
    assert remove_switch(["seed=1"]) == (["seed=1"], None)


CONFLICTS: dict[str, Any] = {
    "divergence": "forward_kl",
    "estimator": "pathwise",
    "reward": "add_advantage(1.0)",
    "weights": "divergence_top(0.5)",
}


@pytest.mark.parametrize("key", CONFLICTS)
def test_what_concerns_a_teacher_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="unlikely"):
        Objective.model_validate({"signal": "unlikely", key: CONFLICTS[key]})
