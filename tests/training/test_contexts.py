"""The student also learns in its teacher's context, from that prompt only."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from toy import rows, toy_recipe, toy_run
from transformers import AutoModelForCausalLM

from practicum.errors import CapabilityError, RecipeError
from practicum.objective import Objective, Term
from practicum.runs.assembly import assemble_run
from practicum.training.loop import generate_rollouts, score_rollouts
from practicum.training.observing import accumulate_gradient
from practicum.types import Datum

SELF = {"type": "self", "weights": "live"}
PRIVILEGED = {"type": "privileged", "teacher": SELF, "reference": "{answer}", "missing": "silent"}
REWARD = {"signal": "score(none)", "correction": "ratio"}
NEAR_TEACHER = {"signal": "full", "divergence": "forward_kl", "coefficient": 0.25}
NEAR_STUDENT = {**NEAR_TEACHER, "divergence": "reverse_kl", "against": "reference"}
IN_CONTEXT = [{**term, "context": "teacher"} for term in (REWARD, NEAR_STUDENT)]
ACTING: dict[str, Any] = {
    "teacher": PRIVILEGED,
    "reference": SELF,
    "rollout": {"n": 2, "source": "teacher", "max_new_tokens": 5},
    "objective": {"losses": [REWARD, NEAR_TEACHER, *IN_CONTEXT]},
    "train.steps": 2,
    "train.prompts_per_step": 4,
}


def open_world(models, scratch, **changes: Any):
    """Return a student in memory, and the scored answers of its teacher."""
    components = assemble_run(toy_recipe(models, {**ACTING, **changes}), scratch)
    parts, settings = components.parts, components.settings
    plan = settings.plan(1)
    rollouts = generate_rollouts(1, plan, parts, settings, parts.sampler, 0)
    return components, score_rollouts(rollouts, plan.objective, parts)


@pytest.fixture(scope="module")
def world(models, tmp_path_factory):
    return open_world(models, tmp_path_factory.mktemp("scratch"))


def gradient(world: Any, datums: list[Datum], *terms: Any) -> Any:
    """Return the result and the gradient of an objective, by name, without a training step."""
    components, _ = world
    objective = Objective.model_validate({"losses": list(terms)})
    result = accumulate_gradient(components.parts.student, datums, objective, 3)
    grads = {
        name: weight.grad.clone()
        for name, weight in components.weights.items()
        if weight.grad is not None
    }
    for weight in components.weights.values():
        weight.grad = None
    return result, grads


def read_model(model: Any, prompt: tuple[int, ...], tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities [T, V] of a model at the tokens after a prompt."""
    text = torch.tensor([*prompt, *tokens.tolist()])
    return model(text[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


def test_only_the_log_probabilities_after_the_teachers_prompt_have_a_gradient(world, models):
    """Check alpha 1 of pi-Distill (2602.04942): E_T[R] - beta KL(T || sg S), written separately."""
    _, datums = world
    datums = [
        replace(datum, rollout=replace(datum.rollout, reward=number % 3 / 2))
        for number, datum in enumerate(datums)
    ]
    model = AutoModelForCausalLM.from_pretrained(models / "student", dtype=torch.float32)
    total = torch.zeros(())
    for datum in datums:
        rollout = datum.rollout
        assert datum.context is not None and datum.context != rollout.prompt_tokens
        acting = read_model(model, datum.context, rollout.tokens)
        with torch.no_grad():
            student = read_model(model, rollout.prompt_tokens, rollout.tokens)
        sampled = acting.gather(1, rollout.tokens[:, None])[:, 0]
        ratio = (sampled - rollout.sampling_logprobs).exp()
        total = total - (ratio * rollout.reward).sum()
        total = total + 0.25 * (acting.exp() * (acting - student)).sum()
    (total / sum(len(datum.rollout.tokens) for datum in datums)).backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    _, grads = gradient(world, datums, *IN_CONTEXT)
    assert any(grad.abs().max() > 1e-4 for grad in grads.values())
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_gradient_is_the_sum_of_both_halves(world, alpha):
    def scale(term: Any, factor: float) -> Any:
        return {**term, "coefficient": factor * term.get("coefficient", 1.0)}

    _, datums = world
    own = REWARD, NEAR_TEACHER
    student, of_student = gradient(world, datums, *own)
    context, of_teacher = gradient(world, datums, *IN_CONTEXT)
    terms = [scale(term, 1 - alpha) for term in own] + [scale(term, alpha) for term in IN_CONTEXT]
    both, total = gradient(world, datums, *terms)
    for name, grad in total.items():
        expected = (1 - alpha) * of_student[name] + alpha * of_teacher[name]
        torch.testing.assert_close(grad, expected, atol=1e-7, rtol=1e-5)
    assert both.metrics["context_tokens"] == context.metrics["tokens"]
    assert both.metrics["context_loss_1"] == pytest.approx(context.metrics["loss_1"])
    assert both.metrics["loss_1"] == pytest.approx(student.metrics["loss_1"])


def test_without_privileged_text_both_contexts_are_the_same(models, tmp_path):
    world = open_world(models, tmp_path, teacher=SELF)
    _, datums = world
    terms = REWARD, {"signal": "entropy"}
    _, own = gradient(world, datums, *terms)
    _, context = gradient(world, datums, *({**term, "context": "teacher"} for term in terms))
    for name, grad in own.items():
        torch.testing.assert_close(context[name], grad, atol=0.0, rtol=0.0)


def test_a_rollout_without_a_context_has_no_loss_there(models, tmp_path):
    silent = {**PRIVILEGED, "reference": "{solution}"}
    rollout = {**ACTING["rollout"], "source": "student"}
    world = open_world(models, tmp_path, teacher=silent, rollout=rollout)
    _, datums = world
    assert all(datum.context is None for datum in datums)
    result, grads = gradient(world, datums, {"signal": "entropy"}, *IN_CONTEXT)
    _, expected = gradient(world, datums, {"signal": "entropy"})
    assert result.metrics["context_tokens"] == 0.0
    assert all(grad.equal(expected[name]) for name, grad in grads.items())
    only, _ = gradient(world, datums, *IN_CONTEXT)
    assert only.supervised == [0] * len(datums)


def test_an_answer_without_a_loss_counts_in_the_mean_reward_of_both_contexts(world):
    _, datums = world
    rewarded = [
        replace(datum, rollout=replace(datum.rollout, reward=number % 2))
        for number, datum in enumerate(datums)
    ]
    empty = torch.zeros(5, dtype=torch.bool)
    only_first = [
        datum
        if datum.rollout.sample == 0
        else replace(
            datum, rollout=replace(datum.rollout, loss_mask=empty[: len(datum.rollout.tokens)])
        )
        for datum in rewarded
    ]
    term = {"signal": "score(group_normalized)", "context": "teacher"}
    _, expected = gradient(world, only_first, term)
    _, grads = gradient(world, only_first, {"signal": "entropy", "coefficient": 0.0}, term)
    assert any(grad.abs().max() > 1e-4 for grad in expected.values())
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize(
    ("teacher", "error"),
    [
        ({"type": "model", "model": "student"}, RecipeError),
        ({**PRIVILEGED, "reference": "{sibling}"}, RecipeError),
        ({**PRIVILEGED, "reference": "{hint}"}, CapabilityError),
    ],
)
def test_a_prompt_that_the_student_cannot_read_is_refused(models, tmp_path, teacher, error):
    note = {"hint": {"type": "written", "template": "{question}", "max_new_tokens": 4}}
    rollout = {**ACTING["rollout"], "source": "student"}
    changes = {**ACTING, "teacher": teacher, "rollout": rollout, "notes": note}
    with pytest.raises(error, match=r"objective.losses\[2\].context: the student only reads"):
        assemble_run(toy_recipe(models, changes), tmp_path)


def test_an_environments_text_is_read_after_the_students_prompt():
    with pytest.raises(ValidationError, match="leave context out"):
        Term.model_validate(
            {"signal": "text", "divergence": "ce", "source": "environment", "context": "teacher"}
        )


def test_a_run_reports_the_losses_of_both_contexts(models, tmp_path):
    folder = toy_run(models, tmp_path, ACTING).folder
    for row in rows(folder / "metrics.jsonl"):
        assert row["context_tokens"] == row["tokens"]
        # At the same weights, KL(sg T || S) and KL(T || sg S) are one number.
        assert row["context_loss_1"] == pytest.approx(row["loss_1"], rel=1e-4)


def test_the_tokens_of_all_updates_of_a_step_are_counted_in_both_contexts(models, tmp_path):
    folder = toy_run(models, tmp_path, {**ACTING, "train.updates_per_step": 2}).folder
    for row in rows(folder / "metrics.jsonl"):
        assert row["context_tokens"] == row["tokens"]
