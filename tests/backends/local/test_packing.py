"""Packed texts give the states and the gradient of texts that are read one by one."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.tiny import ARCHITECTURES, VOCABULARY, random_tokens, tiny
from practicum.backends.local import packing, varlen
from practicum.backends.local.attention import attend
from practicum.backends.local.packing import PackedBatch, compute_hidden_states, enable_packing
from practicum.backends.local.varlen import can_attend_varlen
from practicum.costs.segments import (
    FEWEST_SAVED_TOKENS,
    count_fitting_texts,
    count_packed_tokens,
    split_by_tokens,
)
from practicum.types import ScoreRequest

CPU = torch.device("cpu")
ROOT = random_tokens(FEWEST_SAVED_TOKENS + 4, 9)
TEXTS = [
    *(
        ScoreRequest((*ROOT, *random_tokens(18, row // 3)), random_tokens(1 + 3 * row, 100 + row))
        for row in range(6)
    ),
    ScoreRequest((*ROOT, 5), (4,)),
    ScoreRequest((*ROOT, 5, 6), ()),
    ScoreRequest((*ROOT, *random_tokens(18, 0)), ()),
]
"""Texts with two levels of shared beginnings and lengths from zero to sixteen."""


def alone(model, texts):
    """Read one text at a time by transformers, including the last token, which is not needed."""
    states = []
    for text in texts:
        ids = torch.tensor([[*text.prompt_tokens, *text.tokens]])
        first = len(text.prompt_tokens) - 1
        states.append(
            model.body(ids, torch.ones_like(ids, dtype=torch.bool))[
                0, first : first + len(text.tokens)
            ]
        )
    return torch.cat(states)


def gradients(model, hidden):
    weights = torch.randn(
        hidden.shape, generator=torch.Generator().manual_seed(0), dtype=hidden.dtype
    )
    return torch.autograd.grad((hidden * weights).sum(), list(model.model.base_model.parameters()))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_texts_give_the_states_and_the_gradient_of_texts_read_alone(architecture):
    model = tiny(architecture)
    model.model.requires_grad_(True).double()
    found, expected = compute_hidden_states(model, TEXTS), alone(model, TEXTS)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for one, other in zip(gradients(model, found), gradients(model, expected), strict=True):
        assert (
            one - other
        ).norm() <= 2e-6 * other.norm()  # the norms of transformers are computed in float32


@pytest.mark.long
@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_tree_of_texts_is_read_as_its_texts(data):
    """Build prompts from each other, so that beginnings are shared at every depth or not at all."""
    model = tiny()
    model.model.double()
    stems = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    texts = []
    for row, length in enumerate(stems):
        stem = random_tokens(length, data.draw(st.integers(0, 1)))
        for twin in range(data.draw(st.integers(1, 3))):
            texts.append(
                ScoreRequest(stem, random_tokens(data.draw(st.integers(0, 12)), 10 * row + twin))
            )
    torch.testing.assert_close(
        compute_hidden_states(model, texts), alone(model, texts), rtol=1e-10, atol=1e-10
    )


def test_nothing_is_padded_and_what_is_shared_is_read_once():
    model, read = tiny(), []
    model.model.base_model.embed_tokens.register_forward_pre_hook(
        lambda _, inputs: read.append(inputs[0].numel())
    )
    compute_hidden_states(model, TEXTS)
    prompts = (
        len(ROOT) + 2 * 18 + 1 + 2
    )  # the root, two prompts of four and three texts, and two short ones
    answers = sum(max(len(text.tokens) - 1, 0) for text in TEXTS)
    assert read == [prompts + answers]


@pytest.mark.parametrize(
    ("count", "common", "own", "new", "shared"),
    [
        (16, 7, 12, 10, True),  # a chat template's opening before sixteen short questions
        (16, 7, 12, 120, False),  # a small part of all tokens read
        (3, 8, 3, 4, True),
        (3, 7, 3, 4, False),  # fourteen tokens save less than the extra attention calls cost
        (2, 16, 3, 4, True),
        (2, 16, 90, 30, False),
        (40, 1, 3, 4, True),
        (1, 30, 3, 4, False),
    ],
)
def test_a_beginning_is_shared_if_it_saves_enough_of_the_row(count, common, own, new, shared):
    """The reference for every row is each text by itself."""
    beginning, model = random_tokens(common, 3), tiny()
    texts = [
        ScoreRequest((*beginning, row, *random_tokens(own - 1, row)), random_tokens(new, 70 + row))
        for row in range(count)
    ]
    alike = count * (common + own + new - 1)
    saved = (count - 1) * common if shared else 0
    assert len(PackedBatch(texts, CPU).ids) == count_packed_tokens(texts) == alike - saved
    if count * new < 400:
        found, expected = compute_hidden_states(model, texts), alone(model, texts)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_packing_counts_as_many_tokens_as_it_reads():
    for count in range(1, len(TEXTS) + 1):
        assert count_packed_tokens(TEXTS[:count]) == len(PackedBatch(TEXTS[:count], CPU).ids)


@pytest.mark.parametrize("max_packed_tokens", [10**6, 0])
def test_as_many_texts_go_together_as_fit_and_one_more_would_not(max_packed_tokens):
    """Two domains, each with a separate long beginning: only neighbours share it, not all texts."""
    beginnings = [random_tokens(60, 1), random_tokens(60, 2)]
    texts = [
        ScoreRequest((*beginnings[row // 4], *random_tokens(3, row)), random_tokens(5, 50 + row))
        for row in range(8)
    ]

    def read(some):
        longest = max(len(text.prompt_tokens) + len(text.tokens) for text in some)
        return len(PackedBatch(some, CPU).ids) if max_packed_tokens else longest * len(some)

    for limit in (1, 80, 90, 150, 300, 10**4):
        count = count_fitting_texts(texts, 0, limit, max_packed_tokens)
        assert count == 1 or read(texts[:count]) <= limit
        assert count == len(texts) or read(texts[: count + 1]) > limit


@pytest.mark.parametrize("max_packed_tokens", [10**6, 0])
@pytest.mark.parametrize("seed", range(4))
def test_a_few_passes_are_of_similar_cost_and_no_more_of_them(max_packed_tokens, seed):
    generator = random.Random(seed)
    texts = [
        ScoreRequest(
            random_tokens(generator.randint(2, 9), row),
            random_tokens(generator.randint(1, 30), row + 50),
        )
        for row in range(20)
    ]
    for limit in (80, 120, 200, 10**4):
        start = filled = 0
        while start < len(texts):
            start += count_fitting_texts(texts, start, limit, max_packed_tokens)
            filled += 1
        slices = split_by_tokens(texts, limit, max_packed_tokens)
        assert [text for part in slices for text in texts[part]] == texts
        assert len(slices) == filled
    # Eight answers of one length at a limit that seven fill: two passes of four.
    same = [ScoreRequest((row,), random_tokens(9, row)) for row in range(8)]
    assert split_by_tokens(same, 70, max_packed_tokens) == [slice(0, 4), slice(4, 8)]


def test_a_texts_last_token_is_not_read():
    texts = [ScoreRequest((3, 4), (5, 6, 7))]
    assert PackedBatch(texts, CPU).ids.tolist() == [3, 4, 5, 6]
    assert PackedBatch(texts, CPU).output_positions.tolist() == [1, 2, 3]


def test_texts_with_nothing_to_predict_have_no_states():
    model = tiny()
    assert compute_hidden_states(model, [ScoreRequest((3, 4), ())]).shape == (0, 32)
    both = [ScoreRequest((3, 4), ()), ScoreRequest((3, 4), (5,))]
    torch.testing.assert_close(
        compute_hidden_states(model, both), alone(model, both), rtol=1e-5, atol=1e-5
    )


def test_dropout_in_attention_is_in_force_in_training_alone():
    model = tiny(dropout=0.5)
    model.model.train()
    torch.manual_seed(0)
    first, second = compute_hidden_states(model, TEXTS), compute_hidden_states(model, TEXTS)
    assert not torch.equal(first, second)
    model.model.eval()
    torch.testing.assert_close(
        compute_hidden_states(model, TEXTS), alone(model, TEXTS), rtol=1e-4, atol=1e-4
    )


def test_bfloat16_packs_too():
    model = tiny()
    model.model.to(torch.bfloat16)
    model = enable_packing(replace(model, max_packed_tokens=0))
    assert model.max_packed_tokens == 256
    found, expected = compute_hidden_states(model, TEXTS).float(), alone(model, TEXTS).float()
    assert (found - expected).norm() < 0.03 * expected.norm()


def test_a_window_packs_what_fits_in_it():
    assert tiny("gemma3").max_packed_tokens == 8
    assert tiny("llama").max_packed_tokens == tiny("qwen3").max_packed_tokens == 256
    model = tiny("gemma3")
    short = [ScoreRequest((3, 4, 5), (6, 7, 8, 9)), ScoreRequest((3, 4), (5,))]
    for texts in (short, [*short, ScoreRequest(random_tokens(9, 1), (4, 5))]):
        torch.testing.assert_close(
            compute_hidden_states(model, texts), alone(model, texts), rtol=1e-5, atol=1e-5
        )


def test_a_model_that_mixes_tokens_outside_of_attention_is_not_packed(monkeypatch):
    """Its trial fails: a convolution over the row would read from one text into the next."""
    model = replace(tiny(), max_packed_tokens=0)
    layer = model.model.base_model.layers[0].mlp
    shifted = type(layer).forward
    monkeypatch.setattr(layer, "forward", lambda rows: shifted(layer, rows) + rows.roll(1, dims=1))
    assert enable_packing(model).max_packed_tokens == 0


def test_a_model_with_an_attention_of_its_own_is_not_packed():
    model = replace(tiny(), max_packed_tokens=0)
    model.model.set_attn_implementation("eager")
    assert enable_packing(model).max_packed_tokens == 0
    texts = [ScoreRequest((3, 4), (5, 6)), ScoreRequest((7,), (8,))]
    torch.testing.assert_close(
        compute_hidden_states(enable_packing(model), texts),
        alone(model, texts),
        rtol=1e-5,
        atol=1e-5,
    )


def test_groups_that_attend_together_waste_little():
    texts = [
        ScoreRequest((3, 4), random_tokens(length, length))
        for length in (1, 2, 3, 5, 9, 30, 31, 33, 90)
    ]
    groups = PackedBatch(texts, CPU)._groups
    area = sum(
        group.count * -(-(group.row.stop - group.row.start) // group.count) for group in groups
    )
    tokens = sum(group.row.stop - group.row.start for group in groups)
    assert len(groups) < len(texts) and area < packing.MAX_PADDING_RATIO * tokens
    assert all(token < VOCABULARY for token in PackedBatch(texts, CPU).ids.tolist())


def test_a_known_length_is_not_tried_again(monkeypatch):
    model = replace(tiny(), max_packed_tokens=0)
    monkeypatch.setattr(packing, "find_max_packed_length", lambda model: pytest.fail("tried"))
    assert enable_packing(model, 99).max_packed_tokens == 99


def attend_segment_by_segment(
    queries, keys, values, query_ends, key_ends, longest, reach, **settings
):
    """Compute the flash kernel's result: the queries of each segment are aligned with the end of its keys."""
    assert settings["window_size"] == (-1, 0)
    assert settings["enable_gqa"] == (queries.shape[1] != keys.shape[1])
    outputs = []
    for (first, last), (start, stop) in zip(
        pairwise(query_ends.tolist()), pairwise(key_ends.tolist()), strict=True
    ):
        count, length = last - first, stop - start
        assert 0 < count <= longest and count <= length <= reach
        visible = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        mask = torch.zeros(count, length).masked_fill(~visible, -torch.inf)
        heads = (
            t.transpose(0, 1)[None]
            for t in (queries[first:last], keys[start:stop], values[start:stop])
        )
        output = attend(*heads, mask[None, None], settings["scale"])
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize(
    "texts", [TEXTS, TEXTS[:1], [ScoreRequest((1, 2), (3,)), ScoreRequest((4,), (5, 6))]]
)
def test_segments_of_a_flash_kernel_attend_as_groups_with_masks_do(texts):
    """Return texts with shared prefixes of two levels, a single text, and texts without shared tokens."""
    batch = PackedBatch(texts, torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    queries, keys, values = (
        torch.randn(len(batch.ids), heads, 8, generator=draw) for heads in (4, 2, 2)
    )
    expected = batch.attend(0, queries, keys, values, 0.3, 0.0)
    segments = batch.segments
    found = segments.attend(queries, keys, values, 0.3, attend_segment_by_segment)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert (segments.keys is None) == (len(texts) < 3)
    assert segments.query_ends.dtype == segments.key_ends.dtype == torch.int32


def test_a_flash_kernel_gets_no_mask_and_no_padded_group():
    """The groups and their dense masks are built where they are used, not with the batch."""
    batch = PackedBatch(TEXTS, torch.device("cpu"))
    assert "_groups" not in vars(batch)
    assert batch.segments.keys is not None
    assert "_groups" not in vars(batch)
    heads = torch.zeros(3, 2, 8)
    assert not can_attend_varlen(heads, heads, 0.0), "there is no such kernel on a CPU"


@pytest.mark.parametrize("newest", [True, False])
@pytest.mark.parametrize("heads", [4, 2])
def test_the_flash_kernel_gets_grouped_heads_by_a_keyword_only_where_it_has_one(
    heads: int, newest: bool, monkeypatch: pytest.MonkeyPatch
):
    """torch 2.11 has windows and takes fewer key heads; the keyword `enable_gqa` came with 2.13."""
    asked: list[dict[str, object]] = []

    def kernel(queries: torch.Tensor, *_: object, **keywords: object) -> torch.Tensor:
        asked.append(keywords)
        return queries

    monkeypatch.setattr(varlen, "HAS_PAGES", newest)
    segments = varlen.VarlenSegments.build([[range(3)], [range(3, 5)]], CPU)
    states = [torch.zeros(5, count, 8) for count in (4, heads, heads)]
    segments.attend(*states, 0.5, kernel)
    expected = {"scale": 0.5, "window_size": varlen.CAUSAL}
    assert asked == [expected | ({"enable_gqa": heads == 2} if newest else {})]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [4, 2])
def test_the_flash_kernel_attends_as_groups_with_masks_do(heads):
    batch = PackedBatch(TEXTS, torch.device("cuda"))
    draw = torch.Generator().manual_seed(0)
    states = [
        torch.randn(len(batch.ids), count, 16, generator=draw).cuda().requires_grad_()
        for count in (4, heads, heads)
    ]
    half = [state.detach().bfloat16().requires_grad_() for state in states]
    assert can_attend_varlen(half[0], half[2], 0.0)
    expected, found = batch.attend(0, *states, 0.3, 0.0), batch.attend(0, *half, 0.3, 0.0)
    torch.testing.assert_close(found.float(), expected, rtol=0.03, atol=0.03)
    weights = torch.randn(expected.shape, generator=draw).cuda()
    gradients = torch.autograd.grad((expected * weights).sum(), states)
    rounded = torch.autograd.grad((found * weights).sum(), half)
    for one, other in zip(rounded, gradients, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()
