"""Continued texts are read once, and are sampled as if they were read again: for each decoder, and in conversations."""

from dataclasses import replace

import pytest
import torch

from backends.tiny import random_tokens, tiny
from practicum.backends.local import prefill
from practicum.backends.local.cached_texts import CachedTexts
from practicum.backends.local.language_model import Decoding
from practicum.backends.local.native.library import load_library
from practicum.backends.local.packing import PrefixStates
from practicum.backends.local.sampler import LocalSampler
from practicum.costs import Ledger
from practicum.ports.metering import wrap_client
from practicum.types import SampleRequest, SamplingParams

PARAMS = SamplingParams(24, 0.9, stop_ids=frozenset({2, 17, 30}))
EXACT = {"rtol": 0, "atol": 1e-5}


def start(count=7):
    """Return prompts of unequal lengths, two of them the same."""
    prompts = [random_tokens(3 + 7 * (row % 4), row % 6) for row in range(count)]
    return [SampleRequest(prompt, row) for row, prompt in enumerate(prompts)]


def go_on(requests, samples, turn):
    """Return the texts so far, each with a reply of a different length; every third has none, as a truncated turn."""
    return [
        SampleRequest(
            (
                *request.prompt_tokens,
                *sample.tokens.tolist(),
                *random_tokens((row + turn) % 3 * 4, 90 + row + turn),
            ),
            1000 * turn + row,
        )
        for row, (request, sample) in enumerate(zip(requests, samples, strict=True))
    ]


def converse(client, params=PARAMS, turns=4):
    """Return all samples of some turns."""
    requests, every = start(), []
    for turn in range(1, turns + 1):
        samples = client.sample(requests, params)
        every += samples
        requests = go_on(requests, samples, turn)
    return every


def count_read_tokens(model, call):
    counts = []
    hook = model.model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: counts.append(inputs[0].numel())
    )
    call()
    hook.remove()
    return sum(counts)


@pytest.mark.float32
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("decoding", [Decoding.TORCH, Decoding.NATIVE, Decoding.MASKED_GRAPH])
def test_later_turns_are_those_of_whole_texts(architecture, decoding):
    if decoding is Decoding.NATIVE and load_library() is None:
        pytest.skip("no C compiler")
    model = replace(tiny(architecture), decoding=decoding)
    plain = LocalSampler(model, batch_size=3)
    for kept, read in zip(converse(plain.remember_texts()), converse(plain), strict=True):
        assert torch.equal(kept.tokens, read.tokens)
        assert kept.stop_reason == read.stop_reason
        torch.testing.assert_close(kept.policy_logprobs, read.policy_logprobs, **EXACT)
        torch.testing.assert_close(kept.sampling_logprobs, read.sampling_logprobs, **EXACT)


def test_a_turn_reads_only_what_is_new():
    model = tiny()
    client = LocalSampler(model).remember_texts()
    requests = start()
    samples = client.sample(requests, PARAMS)
    requests = go_on(requests, samples, 1)
    new = sum((row + 1) % 3 * 4 + 1 for row in range(len(requests)))
    assert (
        count_read_tokens(model, lambda: client.sample(requests, replace(PARAMS, max_new_tokens=1)))
        == new
    )


def test_the_ledger_counts_what_is_read():
    model, ledger = tiny(), Ledger()
    client = wrap_client(LocalSampler(model), ledger.meter("student")).remember_texts()
    read = count_read_tokens(model, lambda: converse(client))
    costs = ledger.take()
    # The last token of each of the samples was drawn and not read.
    assert read == costs["cost/prompt_tokens"] + costs["cost/sampled_tokens"] - 4 * len(start())


@pytest.mark.parametrize("room", [0, 40_000])
def test_what_has_no_room_is_read_again(room):
    plain = LocalSampler(tiny())
    small = replace(plain, kept=CachedTexts(room))
    for kept, read in zip(converse(small, turns=2), converse(plain, turns=2), strict=True):
        assert torch.equal(kept.tokens, read.tokens)


def test_the_text_used_longest_ago_goes_first():
    def make(*tokens):
        return PrefixStates(
            tokens, {0: (torch.zeros(len(tokens), 1, 2), torch.zeros(len(tokens), 1, 2))}
        )

    store = CachedTexts(max_bytes=16 * 8)
    store.keep(make(1, 2, 3))
    store.keep(make(4, 5, 6))
    assert store.find((1, 2, 3)) is None, "nothing of it is new"
    assert store.find((1, 2, 3, 9)).tokens == (1, 2, 3)
    store.keep(make(7, 8, 9))
    assert store.find((4, 5, 6, 9)) is None
    store.keep(make(1, 2, 3, 9))
    assert store.find((1, 2, 3, 8)) is None, "the longer text took its place"
    assert store.find((1, 2, 3, 9, 8)).tokens == (1, 2, 3, 9)


def test_a_sliding_window_keeps_nothing():
    """Texts beyond the window are padded, which stores nothing; texts within it are stored."""
    plain = LocalSampler(tiny("gemma3"))
    for kept, read in zip(
        converse(plain.remember_texts(), turns=2), converse(plain, turns=2), strict=True
    ):
        assert torch.equal(kept.tokens, read.tokens)


def test_prompts_beyond_a_pass_are_read_in_turn(monkeypatch):
    limits = replace(prefill.find_limits(torch.device("cpu")), prefill_tokens=6)
    monkeypatch.setattr(prefill, "find_limits", lambda device: limits)
    plain = LocalSampler(tiny())
    for kept, read in zip(
        converse(plain.remember_texts(), turns=2), converse(plain, turns=2), strict=True
    ):
        assert torch.equal(kept.tokens, read.tokens)
