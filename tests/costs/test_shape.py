"""Operations counted by hand, and against the products that torch sees in a real forward and backward pass."""

from dataclasses import replace

import pytest
import torch
from backends.tiny import ARCHITECTURES, VOCABULARY, random_tokens, tiny
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from practicum.backends.local.adapters import add_adapters
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.packing import PackedBatch
from practicum.backends.local.sizes import measure_dims, measure_trainable
from practicum.costs import ModelDims, ReadTokens, TrainableDims, count_read_tokens
from practicum.models.config import Lora
from practicum.types import ScoreRequest

TINY = ModelDims(
    parameters=13_000, body=1000, vocabulary=50, width=8, layers=2, heads=2, kv_heads=1, head_dim=4
)


def test_forward_by_hand() -> None:
    """Check F(c) = 2 (1000 + 50 x 8) + 4 x 2 x 2 x 4 c."""
    assert TINY.count_forward_flops(0) == 2800
    assert TINY.count_forward_flops(10) == 2800 + 640
    assert TINY.count_hidden_flops(3, 6) == 6000 + 64 * 6
    assert TINY.count_kv_bytes(7, 4) == 2 * 2 * 1 * 4 * 4 * 7


def test_an_update_of_everything_is_three_forward_passes_and_with_recomputation_four() -> None:
    everything = TrainableDims(parameters=13_000, layers=2, body=1000, adapters=0, head=True)
    read = ReadTokens(tokens=10, prompt_tokens=4, contexts=55)
    body, head = TINY.count_hidden_flops(10, 55), TINY.count_head_flops(6)
    assert everything.count_update_flops(TINY, read, 6) == 3 * body + 3 * head
    assert everything.count_update_flops(TINY, read, 6, recompute=True) == 4 * body + 3 * head


def test_what_is_frozen_costs_its_forward_pass_alone() -> None:
    upper = TrainableDims(parameters=500, layers=1, body=500, adapters=0, head=False)
    read = ReadTokens(tokens=10, prompt_tokens=4, contexts=55)
    # forward; gradient through one of two layers (attention twice); 500 weights; the head forward and into its input
    assert (
        upper.count_update_flops(TINY, read, 6)
        == 2 * 1000 * 10 + 64 * 55 + 1000 * 10 + 2 * 32 * 55 + 2 * 500 * 10 + 2 * 800 * 6
    )


def test_texts_are_read_as_the_packed_backend_reads_them() -> None:
    shared, rest = tuple(range(20)), (1,) * 16
    texts = [((*shared, *rest), 5), ((*shared, *rest), 1), ((*shared, 3), 4)]
    read = count_read_tokens(texts)
    packing = PackedBatch(
        [ScoreRequest(prompt, (7,) * count) for prompt, count in texts], torch.device("cpu")
    )
    assert read.prompt_tokens == 20 + 16 + 1
    assert read.tokens == 37 + 4 + 0 + 3 == len(packing.ids)
    assert read.contexts == int((packing.positions + 1).sum())


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 15, 16, 17, 40]),
            st.sampled_from([1, 2, 15, 16, 17]),
            st.integers(1, 4),
        ),
        min_size=1,
        max_size=6,
    ),
    st.data(),
)
def test_reading_equals_packing(sizes: list[tuple[int, int, int]], data: st.DataObject) -> None:
    texts = [
        ((1,) * begins + (data.draw(st.integers(2, 3)),) * rest, count)
        for begins, rest, count in sizes
    ]
    packing = PackedBatch(
        [ScoreRequest(prompt, (7,) * count) for prompt, count in texts], torch.device("cpu")
    )
    read = count_read_tokens(texts)
    assert (read.tokens, read.contexts) == (len(packing.ids), int((packing.positions + 1).sum()))


def test_a_sampler_reads_every_equal_prompt_once() -> None:
    assert count_read_tokens([((1, 2), 4)] * 3).prompt_tokens == 6
    assert count_read_tokens([((1, 2), 4)] * 3, decoded=True).prompt_tokens == 2


def test_nothing_is_read_of_nothing() -> None:
    assert count_read_tokens([]) == ReadTokens()
    assert count_read_tokens([((1, 2, 3), 0)]) == ReadTokens(tokens=3, prompt_tokens=3, contexts=6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("part", ["all", "last layer", "adapters"])
def test_the_count_is_that_of_torch(architecture: str, part: str) -> None:
    """Check matrix products and attention of one text, forward and backward; torch counts attention without its mask."""
    model = tiny(architecture)
    model.model.train()
    _let_learn(model, part)
    shape, learning = measure_dims(model), measure_trainable(model)
    length = 64
    ids = torch.tensor(random_tokens(length, 0))[None]
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        _logits(model, ids)
    with FlopCounterMode(display=False) as both:
        _logits(model, ids).sum().backward()
    whole = length * length  # without a mask every token attends to all tokens
    read = ReadTokens(tokens=length, prompt_tokens=0, contexts=whole)
    assert (
        shape.count_hidden_flops(length, whole) + shape.count_head_flops(length)
        == forward.get_total_flops()
    )
    lowest = _entry(model, length) if part == "adapters" else 0
    counted = learning.count_update_flops(shape, read, length) - lowest
    assert counted == pytest.approx(both.get_total_flops(), rel=0.02)


def _let_learn(model: LanguageModel, part: str) -> None:
    model.model.requires_grad_(part == "all")
    if part == "last layer":
        model.model.base_model.layers[-1].requires_grad_(True)
    if part == "adapters":
        add_adapters(model.model, Lora(rank=4), 0, [1])


def _logits(model: LanguageModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        mask = torch.ones_like(ids, dtype=torch.bool)
        return model.head().logits(model.body(ids, mask))


def _entry(model: LanguageModel, tokens: int) -> int:
    """Return the operations counted in addition to the needed ones: the input gradient of the lowest layer with adapters."""
    attention = model.model.base_model.layers[-1].self_attn
    maps = [attention.q_proj, attention.k_proj, attention.v_proj]
    return sum(
        2 * weight.numel() * tokens
        for part in maps
        for name, weight in part.named_parameters()
        if "lora_B" not in name
    )


def test_a_model_of_random_sizes() -> None:
    shape = measure_dims(tiny("qwen3"))
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48
    assert (shape.body, shape.head, shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (
        2 * layer,
        VOCABULARY * 32,
        2,
        4,
        2,
        8,
    )
    assert measure_trainable(tiny("qwen3")) == TrainableDims(
        shape.parameters, 2, shape.body, 0, True
    )
    assert replace(shape, adapters=0) == shape
