"""The memory kept for a backward pass is measured, and too large parts are recomputed."""

import gc
import weakref

import pytest
import torch

from backends.local.test_trainer import gradients, trainable
from backends.tiny import data_for, random_tokens, rollout, tiny
from practicum.backends.local.graph import (
    MAX_CPU_TOKENS,
    activation_checkpointing,
    measure_activation_bytes,
    plan_micro_batch,
)
from practicum.backends.local.packing import compute_hidden_states
from practicum.backends.local.trainer import LocalTrainer, TrainerLimits
from practicum.costs import GraphPlan
from practicum.losses.passes import count_text_tokens
from practicum.objective import Objective
from practicum.types import ScoreRequest


def kept(model, length):
    """Count the bytes held for the backward pass of one text, the slow way: every saved tensor's own elements."""
    weights = {weight.data_ptr() for weight in model.model.parameters()}
    seen = {}

    def pack(tensor):
        if tensor.data_ptr() not in weights:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states = compute_hidden_states(
            model, [ScoreRequest(random_tokens(1, 0), random_tokens(length, 1))]
        )
    assert states.requires_grad
    return sum(seen.values())


@pytest.mark.parametrize(
    ("architecture", "error"), [("llama", 0.02), ("qwen3", 0.02), ("gemma3", 0.1)]
)
def test_bytes_a_token_foretell_those_of_other_lengths(architecture, error):
    """Beyond its window the third is not packed, and the masks of padded texts grow with the square of their length."""
    model = trainable(tiny(architecture))
    foretold = measure_activation_bytes(model)
    assert foretold * 120 == pytest.approx(kept(model, 200) - kept(model, 80), rel=error)


def test_frozen_layers_keep_nothing():
    model = trainable(tiny())
    whole = measure_activation_bytes(model)
    model.model.requires_grad_(False)
    model.model.base_model.layers[1].requires_grad_(True)
    assert measure_activation_bytes(model) < 0.7 * whole
    model.model.requires_grad_(False)
    assert measure_activation_bytes(model) == 1


def test_the_plan_fits_and_recomputes_only_where_it_must():
    model = tiny()  # 2 layers, 32 wide, float32
    assert plan_micro_batch(model, 1000, 50, 100_000) == GraphPlan(100, recompute=False)
    assert plan_micro_batch(model, 1000, 100, 100_000) == GraphPlan(100, recompute=False)
    assert plan_micro_batch(model, 1000, 101, 100_000) == GraphPlan(
        100_000 // (2 * 128 + 500), recompute=True
    )
    assert plan_micro_batch(model, 1000, 500, 100_000) == GraphPlan(500, recompute=True), (
        "one text is never cut"
    )
    assert plan_micro_batch(model, 1, 500, 100_000) == GraphPlan(MAX_CPU_TOKENS, recompute=False)
    assert plan_micro_batch(model, 1, 5000, 100_000) == GraphPlan(5000, recompute=False)


def test_recomputed_layers_give_the_same_gradient_and_keep_less():
    student, data = (
        trainable(tiny()),
        data_for(tiny(seed=1), [rollout(20, 60, seed) for seed in range(4)]),
    )
    expected, result = gradients(student, data, Objective(), TrainerLimits(10**6))
    held = []
    trainer = LocalTrainer(student, TrainerLimits(graph_mib=1))
    trainer._bytes_a_token = 2**20  # so large that one token fits
    assert trainer.plan_micro_batch(max(map(count_text_tokens, data))).recompute
    found = trainer.forward_backward(data, Objective(), 0)
    for name, parameter in student.trainable_parameters().items():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-7)
    assert found.metrics == pytest.approx({**result.metrics, "recomputed": 1.0}, rel=1e-5)
    assert not any("forward" in layer.__dict__ for layer in student.model.base_model.layers), (
        "nothing stays switched on"
    )
    student.model.train()
    for wanted in (False, True):
        with activation_checkpointing(student, wanted):
            held.append(kept(student, 100))
    assert held[1] < 0.3 * held[0]


def test_by_default_the_plan_is_the_models_and_nobody_elses():
    """Check that the same model plans the same on every machine, so a run does not depend on the free memory."""
    trainer, data = LocalTrainer(trainable(tiny())), data_for(tiny(seed=1))
    trainer.forward_backward(data, Objective(), 0)
    assert 2**30 // measure_activation_bytes(trainer.language_model) > MAX_CPU_TOKENS
    assert trainer.plan_micro_batch(max(map(count_text_tokens, data))) == GraphPlan(
        MAX_CPU_TOKENS, recompute=False
    )


def test_the_trial_draws_no_random_numbers_of_the_update():
    data = data_for(tiny(seed=1))
    planned, _ = gradients(trainable(tiny(dropout=0.3)), data, Objective(), dropout=True)
    given, _ = gradients(
        trainable(tiny(dropout=0.3)), data, Objective(), TrainerLimits(10**6), dropout=True
    )
    for name, value in planned.items():
        assert torch.equal(value, given[name])


def test_measuring_keeps_no_graph() -> None:
    """The measured graphs held their own outputs, so each run of a process kept its weights for ever."""
    model = trainable(tiny())
    weights = [weakref.ref(weight) for weight in model.model.parameters()]
    assert measure_activation_bytes(model) > 0
    del model
    gc.collect()
    assert not any(weight() is not None for weight in weights)
