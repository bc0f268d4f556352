"""The stored layout of a frozen model for this processor gives the scores of the model's own maps."""

from dataclasses import replace

import pytest
import torch
from toy import in_check

from backends.tiny import ARCHITECTURES, random_tokens, tiny
from practicum.backends.local import prepared
from practicum.backends.local.prepared import ROW_STEP, LayoutStore, _Product, count_cached_bytes
from practicum.backends.local.sampler import LocalSampler
from practicum.objective import Full, Sampled
from practicum.types import ScoreRequest


@pytest.fixture(params=[True, False], ids=["AMD", "another processor"])
def amd(request, monkeypatch) -> bool:
    monkeypatch.setattr(prepared, "is_amd", lambda: request.param)
    monkeypatch.setattr(prepared, "MIN_KEPT_WEIGHTS", 1)
    return request.param


def ragged_requests(first: int) -> list[ScoreRequest]:
    lengths = [7, 1, 0, 23, 70, 12]
    return [
        ScoreRequest(random_tokens(4 + number, first + number), random_tokens(length, first + 50))
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("architecture", in_check(ARCHITECTURES, "llama"))
@pytest.mark.parametrize("signal", [Full(), Sampled()], ids=["full", "sampled"])
def test_scores_are_those_of_the_models_own_maps(architecture, signal, amd):
    plain = LocalSampler(tiny(architecture))
    frozen = plain.freeze()
    for first in (1, 2):
        requests = ragged_requests(first)
        for kept, own in zip(
            frozen.score(requests, signal), plain.score(requests, signal), strict=True
        ):
            left = kept.logprobs if signal.sampled else kept.head.logprobs(kept.hidden)
            right = own.logprobs if signal.sampled else own.head.logprobs(own.hidden)
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
    assert not any("forward" in module.__dict__ for module in plain.language_model.model.modules())


def test_the_layout_is_made_once_and_only_where_it_gains(amd):
    model, store = tiny(), LayoutStore()
    maps = store.open(model)
    assert store.open(model) is maps
    assert bool(maps._forwards) == amd
    assert (count_cached_bytes(1_000) == 4_000) == amd


@pytest.mark.parametrize(
    ("least", "most"), [(1, 1_000), (2**20, 2**30)], ids=["too large", "too small"]
)
def test_a_model_that_a_second_copy_does_not_serve_keeps_its_own_maps(monkeypatch, least, most):
    monkeypatch.setattr(prepared, "is_amd", lambda: True)
    monkeypatch.setattr(prepared, "MIN_KEPT_WEIGHTS", least)
    monkeypatch.setattr(prepared, "MAX_KEPT_BYTES", most)
    assert not LayoutStore().open(tiny())._forwards


def test_weights_that_change_are_not_kept(amd):
    sampler = LocalSampler(tiny())
    before = sampler.score(ragged_requests(1), Sampled())[3].logprobs
    with torch.no_grad():
        for parameter in sampler.language_model.model.parameters():
            parameter.mul_(1.5)
    after = sampler.score(ragged_requests(1), Sampled())[3].logprobs
    assert not torch.allclose(before, after)


def test_ragged_batches_multiply_few_different_numbers_of_rows(monkeypatch):
    weight = torch.randn(24, 16)
    product = prepared._reorder(weight, None)
    counts: set[int] = set()
    multiply = _Product._multiply

    def count(self, rows):
        counts.add(rows.numel() // rows.shape[-1])
        return multiply(self, rows)

    monkeypatch.setattr(_Product, "_multiply", count)
    for number in range(1, 4 * ROW_STEP):
        rows = torch.randn(number, 16)
        torch.testing.assert_close(product(rows), rows @ weight.T, rtol=1e-5, atol=1e-5)
    assert {number for number in counts if number > ROW_STEP} == {128, 192, 256}
    batch = torch.randn(1, 70, 16)
    torch.testing.assert_close(product(batch), batch @ weight.T, rtol=1e-5, atol=1e-5)


def test_freezing_keeps_the_settings():
    sampler = replace(LocalSampler(tiny()), batch_size=3, chunk_tokens=5)
    frozen = sampler.freeze()
    assert (frozen.batch_size, frozen.chunk_tokens) == (3, 5)
    assert frozen.prefixes is not None
    assert frozen.layout is not None
