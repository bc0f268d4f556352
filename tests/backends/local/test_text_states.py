"""The states that a student stores while writing equal the states that later passes compute."""

from dataclasses import replace

import pytest
import torch

from backends.test_native import MODELS, WIDTHS, compiled, make  # noqa: F401  (a fixture)
from backends.tiny import hidden_signal, random_tokens
from practicum.backends.local import text_states
from practicum.backends.local.language_model import Decoding
from practicum.backends.local.packing import compute_hidden_states
from practicum.backends.local.text_states import count_frozen_layers
from practicum.backends.local.trainer import LocalTrainer
from practicum.losses.passes import build_score_requests
from practicum.objective import Full, Objective
from practicum.ports import AdamParams
from practicum.types import Datum, Prompt, Rollout, SampleRequest, SamplingParams

PARAMS = SamplingParams(24, stop_ids=frozenset({2, 17, 30}))
RESCORED = replace(PARAMS, rescored=True)


def build_model(first, settings=None):
    """Build a model of three layers that trains the layers from `first` on."""
    model = make(settings)
    model.model.requires_grad_(False)
    for number, layer in enumerate(model.model.model.layers):
        layer.requires_grad_(number >= first)
    return model


def build_student(first=1, settings=None):
    """Return the same model with its trainer."""
    model = build_model(first, settings)
    return model, LocalTrainer(model)


def write(trainer, params=PARAMS, prompts=9):
    """Write completions of unequal prompts, some of them equal, in four slots that are refilled."""
    requests = [
        SampleRequest(random_tokens(3 + 5 * (row % 4), row % 7), row) for row in range(prompts)
    ]
    sampler = replace(trainer.build_sampling_client(), batch_size=4)
    samples = sampler.sample(requests, params)
    return [
        Rollout(
            prompt=Prompt(str(row), ()),
            prompt_tokens=request.prompt_tokens,
            tokens=sample.tokens,
            loss_mask=torch.ones(len(sample.tokens), dtype=torch.bool),
            sampling_logprobs=sample.sampling_logprobs,
            policy_logprobs=sample.policy_logprobs,
            policy_version=0,
            stop_reason=sample.stop_reason,
            text="",
            states=sample.states,
        )
        for row, (request, sample) in enumerate(zip(requests, samples, strict=True))
    ]


def forget(rollouts):
    return [replace(rollout, states=None) for rollout in rollouts]


def differentiate(model, trainer, rollouts):
    teacher = make(seed=1)
    data = [Datum(rollout, hidden_signal(teacher, rollout)) for rollout in rollouts]
    trainer.forward_backward(data, Objective(), 0)
    gradients = {name: weight.grad for name, weight in model.trainable_parameters().items()}
    model.model.zero_grad(set_to_none=True)
    return gradients


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("compiled", WIDTHS[:1], indirect=True)
def test_an_update_from_kept_states_has_the_gradient_of_one_without(compiled, name):  # noqa: F811
    model, trainer = build_student(2, MODELS[name])
    rollouts = write(trainer)
    assert len({len(rollout.tokens) for rollout in rollouts}) > 3
    assert all(rollout.states.lower is not None for rollout in rollouts)
    fast, slow = (differentiate(model, trainer, texts) for texts in (rollouts, forget(rollouts)))
    assert any(not torch.equal(fast[name], slow[name]) for name in fast), "nothing was spared"
    scale = max(gradient.abs().max() for gradient in slow.values())
    for key, gradient in slow.items():
        assert (fast[key] - gradient).abs().max() < 1e-5 * scale, key


def test_layers_that_never_change_are_not_computed_again(compiled):  # noqa: F811
    model, trainer = build_student(2)
    rollouts = write(trainer)
    differentiate(model, trainer, rollouts)  # the first call measures with separate passes
    read = []
    for number, layer in enumerate(model.model.model.layers):
        layer.mlp.down_proj.register_forward_hook(lambda *_, number=number: read.append(number))
    differentiate(model, trainer, rollouts)
    assert set(read) == {2}
    read.clear()
    differentiate(model, trainer, [*rollouts[:-1], *forget(rollouts[-1:])])
    assert set(read) == {0, 1, 2}, "a pass with an unknown text computes all of it"


def test_an_evaluation_takes_the_states_that_predicted_its_answers(compiled):  # noqa: F811
    model, trainer = build_student()
    rollouts, sampler = write(trainer, RESCORED), trainer.build_sampling_client()
    read = []
    model.model.model.layers[0].register_forward_hook(lambda *_: read.append(1))
    kept = sampler.score(build_score_requests(rollouts, reuse=True), Full())
    assert not read
    computed = sampler.score(build_score_requests(rollouts), Full())
    assert read
    for rollout, fast, slow in zip(rollouts, kept, computed, strict=True):
        known, true = (signal.head.logprobs(signal.hidden) for signal in (fast, slow))
        assert ((known - true).abs() * true.exp()).sum(dim=-1).max() < 1e-5
        for side in (known, true):
            drawn = side.gather(1, rollout.tokens[:, None])[:, 0]
            assert (drawn - rollout.policy_logprobs).abs().max() < 1e-5


def test_no_state_outlives_its_weights_or_its_text(compiled):  # noqa: F811
    model, trainer = build_student()
    rollouts, sampler = write(trainer, RESCORED), trainer.build_sampling_client()
    parts = ("tokens", "loss_mask", "sampling_logprobs", "policy_logprobs")
    shorter = {name: getattr(rollouts[0], name)[:-1] for name in parts}
    cut = [replace(rollouts[0], **shorter)]
    before = sampler.score(build_score_requests(cut, reuse=True), Full())
    assert torch.equal(before[0].hidden, compute_hidden_states(model, build_score_requests(cut)))
    data = [Datum(rollout, hidden_signal(make(seed=1), rollout)) for rollout in rollouts]
    trainer.forward_backward(data, Objective(), 0)
    trainer.optim_step(AdamParams(0.01))
    after = sampler.score(build_score_requests(rollouts, reuse=True), Full())
    true = sampler.score(build_score_requests(rollouts), Full())
    assert all(
        torch.equal(*pair)
        for pair in zip(*([s.hidden for s in side] for side in (after, true)), strict=True)
    )
    other, other_trainer = build_student()
    theirs = other_trainer.build_sampling_client().score(
        build_score_requests(rollouts, reuse=True), Full()
    )
    assert torch.equal(
        theirs[0].hidden,
        compute_hidden_states(other, build_score_requests(rollouts))[: len(rollouts[0].tokens)],
    )


@pytest.mark.parametrize(("first", "expected"), [(0, 0), (1, 1), (2, 2), (3, 0)])
def test_layers_below_the_first_that_learns_are_counted(first, expected):
    assert count_frozen_layers(build_model(first)) == expected


def test_nothing_is_kept_where_nothing_would_be_spared(monkeypatch):
    model, trainer = build_student(0)
    assert all(rollout.states is None for rollout in write(trainer)), "all layers learn"
    model, trainer = build_student()
    snapshot = trainer.snapshot().sample([SampleRequest((1, 2), 0)], RESCORED)
    assert snapshot[0].states is None, "the weights of a snapshot are an overlay"
    torch_model = replace(model, decoding=Decoding.TORCH)
    assert write(LocalTrainer(torch_model), RESCORED)[0].states.lower is None
    assert write(LocalTrainer(torch_model))[0].states is None
    model.model.model.norm.requires_grad_(True)
    assert count_frozen_layers(model) == 1
    model.model.model.embed_tokens.requires_grad_(True)
    assert count_frozen_layers(model) == 0, "the embedding is below all layers"
    monkeypatch.setattr(text_states, "MAX_BYTES", 2**10)
    assert write(LocalTrainer(model), RESCORED)[0].states is None, "too large"
