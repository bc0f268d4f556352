"""Packed copies of frozen weights are kept between decode batches, and no stale one is ever used."""

import gc
import weakref

import pytest
import torch

from backends.test_native import assert_alike, compiled, make, random_tokens  # noqa: F401  (a fixture)
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.native.packed_copies import PackJob, pack_weights
from practicum.backends.local.sampler import LocalSampler
from practicum.types import SampleRequest, SamplingParams


class Packer:
    """Packs the weights of a model one by one, and counts the weights that it had to pack."""

    def __init__(self, language_model: LanguageModel) -> None:
        self.language_model = language_model
        self.packed: list[str] = []

    def __call__(self, overlay=None, max_bytes: int = 2**20, panel: int = 48) -> list[str]:
        """Return the names of the weights that were packed again; all copies must be right."""
        self.packed = []
        weights = dict(self.language_model.model.named_parameters())
        jobs = [
            PackJob([weight.detach()], panel, lambda name=name: self._pack(name))
            for name, weight in weights.items()
        ]
        results = pack_weights(self.language_model, overlay or {}, jobs, max_bytes)
        for weight, result in zip(weights.values(), results, strict=True):
            assert torch.equal(result["copy"], weight)
        return self.packed

    def _pack(self, name: str) -> dict[str, torch.Tensor]:
        self.packed.append(name)
        weights = dict(self.language_model.model.named_parameters())
        return {"copy": weights[name].detach().clone()}


@pytest.fixture
def packer() -> Packer:
    packer = Packer(make())
    packer.language_model.model.requires_grad_(False)
    return packer


def test_frozen_weights_are_packed_for_the_first_two_batches_alone(packer):
    everything = packer()
    assert len(everything) > 10
    assert packer() == everything, "most teachers sample once: nothing is kept for them"
    assert packer() == packer() == []
    assert packer(panel=24) == everything, "another program has other panels"


def test_weights_that_learn_or_are_replaced_are_packed_for_every_batch(packer):
    norm, down = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
    packer.language_model.model.get_parameter(norm).requires_grad_(True)
    for _ in range(3):
        packer({down: torch.zeros(1)})
    assert set(packer({down: torch.zeros(1)})) == {norm, down}


@torch.no_grad()
def test_a_weight_that_changed_or_moved_is_packed_again(packer):
    for _ in range(3):
        packer()
    first, second, *_ = weights = dict(packer.language_model.model.named_parameters())
    weights[first].add_(1.0)
    assert packer() == [first]
    weights[second].data = weights[second].data.clone()
    assert packer() == [second]
    assert packer() == []


def test_no_more_is_kept_than_the_bound(packer):
    sizes = [weight.nbytes for weight in packer.language_model.model.parameters()]
    for _ in range(2):
        everything = packer(max_bytes=sizes[0])
    assert packer(max_bytes=sizes[0]) == everything[1:], "only the first one fits"
    packer(max_bytes=0)
    assert packer(max_bytes=0) == everything


def test_what_is_kept_goes_with_the_model(packer):
    for _ in range(2):
        packer()
    weight = weakref.ref(packer.language_model.model.get_parameter("model.norm.weight"))
    packer.language_model = make()
    gc.collect()
    assert weight() is None


def test_tokens_are_those_of_the_weights_of_now(compiled):  # noqa: F811
    model = make()
    for name, weight in model.model.named_parameters():
        weight.requires_grad_("layers.2" in name)
    sampler, params = LocalSampler(model, {}, 4), SamplingParams(12)
    requests = [SampleRequest(random_tokens(6, seed), seed) for seed in range(5)]
    samples = [sampler.sample(requests, params) for _ in range(4)]
    for repeated in samples[1:]:
        for one, other in zip(samples[0], repeated, strict=True):
            assert torch.equal(one.policy_logprobs, other.policy_logprobs)
    with torch.no_grad():
        for weight in model.model.parameters():
            weight.mul_(1.05)
    assert_alike(model)
