"""Text of an environment is learned where a term asks for it, and changes no other term."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from backends.tiny import hidden_signal, rollouts, tiny
from pydantic import ValidationError
from safetensors.torch import load_file
from toy import TASK, rows, toy_recipe, toy_run
from transformers import AutoModelForCausalLM

from practicum.backends.local.trainer import LocalTrainer, TrainerLimits
from practicum.errors import CapabilityError
from practicum.objective import Objective, Term
from practicum.ports import AdamParams
from practicum.runs.assembly import assemble_run
from practicum.training.loop import generate_rollouts, score_rollouts
from practicum.training.observing import accumulate_gradient
from practicum.types import AUTHORS, Datum, PooledSignal, TeacherSignal

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


def talk(teachers: Sequence[Any]) -> list[Datum]:
    """Return answers with an environment's tokens in most of them, one without and one with nothing else."""
    data = []
    for number, item in enumerate(rollouts()):
        length = len(item.tokens)
        world = torch.rand(length, generator=torch.Generator().manual_seed(number)) < 0.4
        world = torch.ones_like(world) if number == 2 else world & (number != 0)
        written = torch.where(world, AUTHORS.index("environment"), AUTHORS.index("student"))
        item = replace(
            item,
            authors=written.to(torch.uint8),
            loss_mask=item.loss_mask & ~world,
            reward=float(number % 2),
        )
        members = tuple(hidden_signal(teacher, item) for teacher in teachers)
        pool = PooledSignal("sum", (0.3, 0.9)[: len(members)], members)
        signal = members[0] if len(members) == 1 else TeacherSignal(pool=pool)
        data.append(Datum(item, signal))
    return data


def norm_exactly(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Normalise in the dtype of the hidden states."""
    size = hidden.square().mean(dim=-1, keepdim=True) + norm.variance_epsilon
    return norm.weight * hidden * size.rsqrt()


OWN_TERMS = {
    "distilled": [DISTIL],
    "rewarded": [{"signal": "score(group_normalized)", "correction": "ratio_clip(0.2, 0.2)"}],
    "with returns": [{"signal": "sampled", "estimator": "score_function(1)"}],
}


@pytest.mark.parametrize(
    "limits", [TrainerLimits(10**6), TrainerLimits(20, 3)], ids=["whole", "cut"]
)
@pytest.mark.parametrize("count", [1, 2], ids=["one teacher", "two"])
@pytest.mark.parametrize(
    "world", [WORLD, {**DISTIL, "source": "environment"}], ids=["text", "full"]
)
@pytest.mark.parametrize("own", OWN_TERMS.values(), ids=OWN_TERMS)
def test_both_kinds_of_tokens_share_a_forward_pass(own, world, count, limits):
    student = tiny()
    student.model.double().requires_grad_(True)
    for module in student.model.modules():
        # The norms of transformers round to float32.
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(norm_exactly, module)
    data = talk([tiny(seed=seed + 1) for seed in range(count)])
    passes = []
    body: Any = student.model.base_model.embed_tokens
    body.register_forward_pre_hook(lambda *given: passes.append(torch.is_grad_enabled()))

    def differentiate(terms: Any) -> tuple[Any, Any, int]:
        passes.clear()
        trainer = LocalTrainer(student, limits)
        result = accumulate_gradient(trainer, data, Objective.model_validate({"losses": terms}), 3)
        grads = {name: weight.grad for name, weight in student.trainable_parameters().items()}
        student.model.zero_grad(set_to_none=True)
        return result, grads, sum(passes)

    alone, of_own, _ = differentiate(own)
    seen, of_world, _ = differentiate([world])
    both, total, once = differentiate([*own, world])
    for name, grad in total.items():
        assert grad.dtype == torch.float64
        torch.testing.assert_close(grad, of_own[name] + of_world[name], atol=1e-14, rtol=1e-12)
    assert any(grad.abs().max() > 1e-3 for grad in of_world.values())
    masked = [d.rollout.loss_mask | d.rollout.mark_tokens_by("environment") for d in data]
    data = [
        replace(datum, rollout=replace(datum.rollout, loss_mask=mask))
        for datum, mask in zip(data, masked, strict=True)
    ]
    assert once == differentiate([DISTIL])[2]
    assert both.supervised == alone.supervised
    assert {name: both.metrics[name] for name in alone.metrics} == pytest.approx(alone.metrics)
    assert both.metrics["observed_loss"] == pytest.approx(seen.metrics["loss"])


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
