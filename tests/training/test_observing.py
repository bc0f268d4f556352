"""Text of an environment is learned where a term asks for it, and changes no other term."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from toy import TASK, rows, toy_recipe, toy_run
from transformers import AutoModelForCausalLM

from practicum.errors import CapabilityError
from practicum.objective import Objective, Term
from practicum.ports import AdamParams
from practicum.runs.assembly import assemble_run
from practicum.training.loop import generate_rollouts, score_rollouts
from practicum.training.observing import accumulate_gradient
from practicum.types import Datum

WORLD = {"signal": "text", "divergence": "ce", "source": "environment"}
DISTIL = {"signal": "full", "divergence": "reverse_kl"}
TALKS: dict[str, Any] = {
    "task": {
        "type": "user",
        "tries": 3,
        "right": "aa",
        "wrong": "dcb",
        "task": TASK,
    },
    "rollout": {"n": 1, "max_new_tokens": 24},
    "train.steps": 2,
    "train.prompts_per_step": 4,
}


@pytest.fixture(scope="module")
def world(models, tmp_path_factory):
    """Return a student in memory, and its conversations with their scores."""
    recipe = toy_recipe(models, {**TALKS, "objective": {"losses": [DISTIL, WORLD]}})
    components = assemble_run(recipe, tmp_path_factory.mktemp("scratch"))
    parts, settings = components.parts, components.settings
    plan = settings.plan(1)
    rollouts = generate_rollouts(1, plan, parts, settings, parts.sampler, 0)
    return components, score_rollouts(rollouts, plan.objective, parts)


def gradient(world: Any, datums: list[Datum], *terms: Mapping[str, Any], **more: Any) -> Any:
    """Return the metrics and the gradient of an objective, by name, without a training step."""
    components, _ = world
    objective = Objective.model_validate({"losses": list(terms), **more})
    result = accumulate_gradient(components.parts.student, datums, objective, 3)
    grads = {
        name: weight.grad.clone()
        for name, weight in components.weights.items()
        if weight.grad is not None
    }
    for weight in components.weights.values():
        weight.grad = None
    return result, grads


AGGREGATES = ["token_mean", "seq_mean_token_mean"]


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_the_gradient_is_the_sum_of_both_sides_each_with_its_own_mean(world, aggregate):
    _, datums = world
    own, mine = gradient(world, datums, DISTIL, aggregate=aggregate)
    seen, theirs = gradient(world, datums, WORLD, aggregate=aggregate)
    both, sums = gradient(world, datums, {**WORLD, "coefficient": 0.3}, DISTIL, aggregate=aggregate)
    for name, total in sums.items():
        torch.testing.assert_close(total, mine[name] + 0.3 * theirs[name], atol=1e-7, rtol=1e-5)
    named = {name: both.metrics[name] for name in own.metrics}
    assert named == own.metrics
    assert both.metrics["observed_loss"] == pytest.approx(seen.metrics["loss"])
    counts = [int(datum.rollout.mark_tokens_by("environment").sum()) for datum in datums]
    assert both.metrics["observed_tokens"] == sum(counts) > 0
    assert seen.supervised == counts and both.supervised == own.supervised


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_the_worlds_text_is_learned_by_its_cross_entropy(world, models, aggregate):
    _, datums = world
    result, grads = gradient(world, datums, WORLD, aggregate=aggregate)
    model = AutoModelForCausalLM.from_pretrained(models / "student", dtype=torch.float32)
    losses, counts = [], []
    for datum in datums:
        rollout = datum.rollout
        text = torch.tensor([*rollout.prompt_tokens, *rollout.tokens.tolist()])
        logprobs = model(text[None]).logits[0, :-1].log_softmax(-1).gather(1, text[1:, None])[:, 0]
        theirs = logprobs[len(rollout.prompt_tokens) - 1 :][rollout.mark_tokens_by("environment")]
        losses.append(-theirs.sum())
        counts.append(len(theirs))
    if aggregate == "token_mean":
        loss = torch.stack(losses).sum() / sum(counts)
    else:
        means = [loss / count for loss, count in zip(losses, counts, strict=True) if count]
        loss = torch.stack(means).sum() / len(means)
    loss.backward()
    reference = {name: weight.grad for name, weight in model.named_parameters()}
    assert max(counts) > min(counts)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, reference[name], atol=1e-6, rtol=1e-4)
    assert result.metrics["loss"] == pytest.approx(
        float(torch.stack(losses).sum().detach()) / sum(counts), rel=1e-5
    )


def test_a_teacher_may_say_what_the_world_writes(world):
    _, datums = world
    result, grads = gradient(world, datums, {**DISTIL, "source": "environment"})
    assert result.metrics["loss"] > 0 and any(grad.abs().max() > 0 for grad in grads.values())


def test_a_term_of_weight_zero_leaves_a_run_as_it_is(models, tmp_path):
    for name, losses in (("with", [DISTIL, {**WORLD, "coefficient": 0.0}]), ("without", [DISTIL])):
        toy_run(models, tmp_path / name, {**TALKS, "objective": {"losses": losses}})
    files = [tmp_path / name / "toy" for name in ("with", "without")]
    weights = [load_file(file / "checkpoints/step-2/student.safetensors") for file in files]
    assert all(value.equal(weights[1][name]) for name, value in weights[0].items())
    assert files[0].joinpath("rollouts.jsonl").read_bytes() == files[1].joinpath("rollouts.jsonl").read_bytes()  # fmt: skip


def test_a_student_learns_to_foretell_its_world(models, tmp_path):
    changes = {
        **TALKS,
        # A student that only learns the environment's words forgets how its own turns end.
        "rollout.source": "teacher",
        "objective": {"losses": [WORLD]},
        "train.steps": 12,
        "monitors": {"M4": "off"},
        "optimizer": {"learning_rate": 0.03},
    }
    folder = toy_run(models, tmp_path, changes).folder
    losses = [row["loss"] for row in rows(folder / "metrics.jsonl")]
    assert losses[-1] < 0.5 * losses[0]
    # The tokens of rollouts.jsonl are trained on by the author in the file.
    assert any(not all(row["loss_mask"]) for row in rows(folder / "rollouts.jsonl"))


@pytest.mark.parametrize(
    ("term", "error"),
    [
        ({"signal": "score(group_mean)"}, "tokens that no policy sampled, which have no advantage"),
        ({"signal": "sampled"}, "tokens that no policy sampled"),
        ({**WORLD, "samples": "best"}, "samples 'best' compares the completions of a writer"),
    ],
)
def test_a_term_that_asks_for_more_is_refused(term, error):
    with pytest.raises(ValidationError, match=error):
        Term.model_validate({**term, "source": "environment"})


def test_single_answers_have_no_world(models, tmp_path):
    recipe = toy_recipe(models, {"objective": {"losses": [DISTIL, WORLD]}})
    with pytest.raises(
        CapabilityError, match=r"objective.losses\[1\].source: this task has single answers"
    ):
        assemble_run(recipe, tmp_path)


def test_the_optimizer_steps_once(world):
    components, datums = world
    objective = Objective.model_validate({"losses": [DISTIL, WORLD]})
    accumulate_gradient(components.parts.student, datums, objective, 3)
    assert components.parts.student.optim_step(AdamParams(1e-4))["grad_norm"] > 0
