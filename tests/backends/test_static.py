"""The static step samples the same tokens as transformers' modules, for any slots, windows and pages."""

from dataclasses import replace

import pytest
import torch
from toy import in_check

from practicum.backends.local.decode_step import SlotStep
from practicum.backends.local.language_model import Decoding
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.static import choose_settings, open_static_loop
from practicum.backends.local.trial import find_graph
from practicum.backends.local.varlen import HAS_PAGES
from practicum.errors import NumericError
from practicum.text import build_character_tokenizer, stop_check
from practicum.types import SampleRequest, SamplingParams

from .places import CPU, SECOND
from .tiny import VOCABULARY, random_tokens, tiny

STOPS = frozenset({2, 17, 30, 41})
PARAMS = SamplingParams(24, 0.7, stop_ids=STOPS)
EXACT = {"rtol": 0, "atol": 1e-5}
TEMPERED = {"rtol": 0, "atol": 1e-5 / PARAMS.temperature}
TOKENIZER = build_character_tokenizer([chr(33 + number) for number in range(VOCABULARY)])


def requests(count=9):
    """Return prompts of unequal lengths, two of them twice."""
    prompts = [random_tokens(3 + 7 * (row % 4) % 19, row % 7) for row in range(count)]
    return [SampleRequest(prompt, row) for row, prompt in enumerate(prompts)]


def open_loop(model, params=PARAMS, rows=4, asked=None, window=16, page_tokens=8, **changes):
    asked = requests() if asked is None else asked
    settings = choose_settings(replace(model, decoding=Decoding.MASKED_GRAPH))
    settings = replace(settings, window=window, page_tokens=page_tokens, **changes)
    loop = open_static_loop(
        model, {}, asked, params, rows, stop_check(params, model.tokenizer), settings
    )
    assert loop is not None
    return loop


def finish(steps):
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def sample(model, params=PARAMS, rows=4, **settings):
    return finish(open_loop(model, params, rows, **settings).run(rows))


def assert_alike(samples, expected):
    for one, twin in zip(samples, expected, strict=True):
        assert torch.equal(one.tokens, twin.tokens)
        assert one.stop_reason == twin.stop_reason
        torch.testing.assert_close(one.policy_logprobs, twin.policy_logprobs, **EXACT)
        torch.testing.assert_close(one.sampling_logprobs, twin.sampling_logprobs, **TEMPERED)


@pytest.mark.float32
@pytest.mark.parametrize("window", in_check([16, 5, 1], 5))
@pytest.mark.parametrize("kind", in_check(["llama", "qwen3"], "qwen3"))
def test_texts_of_ragged_lengths_are_those_of_the_modules(kind, window):
    model = tiny(kind)
    expected = LocalSampler(model, batch_size=4).sample(requests(), PARAMS)
    for page_tokens in (3, 256):
        assert_alike(sample(model, window=window, page_tokens=page_tokens), expected)


@pytest.mark.float32
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 5},
        {"top_p": 0.8, "banned_ids": frozenset({5, 9})},
        {"max_new_tokens": 1},
        {"max_new_tokens": 0},
    ],
    ids=lambda settings: ", ".join(settings),
)
def test_every_sampling_distribution_is_that_of_the_modules(settings):
    model, params = tiny(), replace(PARAMS, **settings)
    expected = LocalSampler(model, batch_size=4).sample(requests(), params)
    assert_alike(sample(model, params), expected)


@pytest.mark.float32
def test_a_completion_does_not_depend_on_its_company():
    model, params = tiny(), replace(PARAMS, max_new_tokens=10)
    expected = sample(model, params, rows=1)
    for rows, window in ((3, 4), (64, 1)):
        assert_alike(sample(model, params, rows=rows, window=window), expected)
    backwards = sample(model, params, rows=3, asked=requests()[::-1])
    assert_alike(backwards[::-1], expected)


@pytest.mark.float32
def test_what_is_drawn_after_a_stop_text_is_dropped():
    model = replace(tiny(), tokenizer=TOKENIZER)
    free = sample(model, SamplingParams(24))
    text = TOKENIZER.decode(free[0].tokens[5:7].tolist())
    params = SamplingParams(24, stop_texts=(text,), stop_ids=frozenset({17}))
    expected = LocalSampler(model, batch_size=4).sample(requests(), params)
    assert {item.stop_reason for item in expected} == {"stop", "length"}
    assert len(expected[0].tokens) <= 7
    for window in (1, 16):
        assert_alike(sample(model, params, window=window), expected)


def test_the_sampler_takes_the_static_step_and_says_what_the_model_says():
    """Also in bfloat16: the log-probabilities equal a forward pass over the texts, up to rounding."""
    model = replace(tiny("qwen3"), decoding=Decoding.MASKED_GRAPH)
    samples = LocalSampler(model, batch_size=4).sample(requests(), SamplingParams(20))
    for request, item in zip(requests(), samples, strict=True):
        ids = torch.tensor([[*request.prompt_tokens, *item.tokens.tolist()]], device=model.device)
        with torch.no_grad():
            hidden = model.body(ids, torch.ones_like(ids, dtype=torch.bool))[0]
            logprobs = model.head().logprobs(hidden).cpu()
        first = len(request.prompt_tokens) - 1
        said = logprobs[first:-1].gather(1, item.tokens[:, None])[:, 0]
        error = (said - item.policy_logprobs).abs().mean()
        assert error < (1e-5 if model.is_exact else 0.1)


def test_few_tokens_do_not_repay_the_packing(monkeypatch):
    model = replace(tiny(), decoding=Decoding.MASKED_GRAPH)
    monkeypatch.setattr("practicum.backends.local.sampler.open_static_loop", None)
    assert len(LocalSampler(model).sample(requests(2), SamplingParams(7))) == 2


def test_two_models_in_lockstep_keep_their_modules():
    model = replace(tiny(), decoding=Decoding.MASKED_GRAPH)
    batch = LocalSampler(model).open_decode_batch([(3, 4)], 1, 24)
    assert isinstance(batch._program, SlotStep)


@pytest.mark.float32
def test_weights_that_replace_the_models_are_used():
    model, other = tiny(), tiny(seed=1)
    overlay = {name: weight.data for name, weight in other.model.named_parameters()}
    model, params = (
        replace(model, decoding=Decoding.MASKED_GRAPH),
        replace(PARAMS, max_new_tokens=9),
    )
    replaced = LocalSampler(model, overlay, 4).sample(requests(), params)
    assert_alike(replaced, sample(other, params))
    own = LocalSampler(model, batch_size=4).sample(requests(), params)
    assert_alike(own, sample(tiny(), params))


def test_a_model_that_diverged_is_an_error():
    model = tiny()
    model.model.base_model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(NumericError, match="not numbers"):
        sample(model)


def test_a_call_can_be_left_often():
    """Other work of a service continues between windows and between the prompts that are read."""
    steps = open_loop(tiny(), SamplingParams(24), rows=9, window=4).run(9)
    assert sum(1 for _ in steps) == 9 + 24 // 4


# Memory


def test_pages_are_those_of_the_tokens_and_all_come_back():
    """One long text among short ones does not make every row equally long."""
    short = [SampleRequest(random_tokens(4, row), row) for row in range(20)]
    asked = [SampleRequest(random_tokens(90, 99), 99), *short]
    loop = open_loop(tiny(), SamplingParams(8), rows=4, asked=asked)
    pool = loop._program.pool
    finish(loop.run(4))
    pages = len(pool.keys[0])
    assert pages - 1 <= -(-98 // 8) + 3 * -(-12 // 8)
    assert sorted(pool._free) == list(range(1, pages))


def test_a_text_takes_pages_as_it_grows():
    loop = open_loop(tiny(), SamplingParams(100), rows=2, asked=requests(2), window=4)
    steps, sizes = loop.run(2), []
    for _ in steps:
        sizes.append(len(loop._program.pool.keys[0]))
    assert sizes[0] <= 8
    assert sizes == sorted(sizes)
    assert sizes[-1] == 1 + sum(-(-(len(item.prompt_tokens) + 100) // 8) for item in requests(2))


def test_rows_beyond_the_memory_wait():
    """As many texts decode as fit at their full length, and always at least one; the texts are the same."""
    model, asked = tiny(), requests(6)
    expected = sample(model, rows=6, asked=asked)
    page = open_loop(model)._program.pool.page_bytes
    for pages, most in ((9, 2), (1, 1)):
        loop = open_loop(model, rows=6, asked=asked, most_bytes=pages * page)
        run, counts = loop._program.run, []
        loop._program.run = lambda rows, run=run, counts=counts: (
            counts.append(len(rows)),
            run(rows),
        )[1]
        assert_alike(finish(loop.run(6)), expected)
        assert max(counts) == most


# Transfers


def test_a_window_is_one_transfer_there_and_one_back(place):
    if place not in (SECOND,):
        pytest.skip("counted on the second device")
    from second_device import SecondTensor

    def count(tokens, window):
        loop = open_loop(tiny(), SamplingParams(tokens), rows=2, asked=requests(2), window=window)
        steps = loop.run(2)
        for _ in range(2):
            next(steps)
        SecondTensor.counts.clear()
        assert all(len(item.tokens) == tokens for item in finish(steps))
        return dict(SecondTensor.counts)

    assert count(64, 16) == {"from the CPU": 4, "to the CPU": 4}
    assert count(64, 4) == {"from the CPU": 16, "to the CPU": 16}


# A GPU


@pytest.mark.gpu
@pytest.mark.parametrize("decoding", [Decoding.FLASH_GRAPH, Decoding.MASKED_GRAPH])
def test_a_captured_step_samples_what_the_same_step_samples_without_a_graph(place, decoding):
    from practicum.backends.local.static.capture import run_eagerly

    if not place.device.startswith("cuda"):
        pytest.skip("a graph is captured on a CUDA device")
    if decoding is Decoding.FLASH_GRAPH and (place.is_exact or not HAS_PAGES):
        pytest.skip("the flash kernel over pages is for 16 bits and torch 2.13")
    model = replace(tiny(), decoding=decoding)
    settings = choose_settings(model)
    check = stop_check(PARAMS, None)
    assert settings is not None
    both = [
        finish(open_static_loop(model, {}, requests(), PARAMS, 4, check, way).run(4))
        for way in (settings, replace(settings, capture=run_eagerly))
    ]
    for one, twin in zip(*both, strict=True):
        assert torch.equal(one.tokens, twin.tokens)


@pytest.mark.gpu
def test_the_trial_takes_the_flash_kernel(place):
    """Its texts occupy more than one page; a warning states why it is refused."""
    if place == CPU or place.is_exact:
        pytest.skip("the flash kernel is for 16 bits on a CUDA device")
    model = tiny("qwen3")
    model.model.config.max_position_embeddings = 1024
    assert find_graph(model) is (Decoding.FLASH_GRAPH if HAS_PAGES else Decoding.MASKED_GRAPH)
