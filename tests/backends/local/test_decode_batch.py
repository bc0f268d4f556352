"""Decoding slots: samples do not depend on them, they are refilled immediately, and a prompt is read once."""

import gc
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from toy import in_check

from backends.tiny import VOCABULARY, random_tokens, rollout, tiny
from practicum.backends.local.decode_batch import PaddedDecodeBatch, SlotDecodeBatch
from practicum.backends.local.device_limits import ON_CPU
from practicum.backends.local.drawing import (
    VOCABULARY_BLOCK,
    draw_exponentials,
    open_random_stream,
    sample_by_exponential_race,
    sample_tokens,
)
from practicum.backends.local.prepared import PrepackedModel, _Product
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.trainer import LocalTrainer
from practicum.costs.segments import FEWEST_SAVED_TOKENS
from practicum.errors import NumericError
from practicum.objective import Full, Objective
from practicum.ports import AdamParams
from practicum.types import Datum, SampleRequest, SamplingParams, ScoreRequest

STOPS = frozenset({2, 17, 30, 41})
PARAMS = SamplingParams(24, stop_ids=STOPS)


@pytest.fixture(scope="module", params=in_check(["llama", "qwen3"], "llama"))
def model(request):
    return tiny(request.param)


def requests(count=12, group=1):
    return [
        SampleRequest(random_tokens(3 + (row // group) % 5, row // group), 100 + row)
        for row in range(count)
    ]


def token_by_token(model, request, params):
    """Decode slowly as a reference: read the whole text again for every token, without a cache, in float64."""
    stream, tokens, blocks = (
        open_random_stream(request.seed),
        [],
        -(-VOCABULARY // VOCABULARY_BLOCK),
    )
    for _ in range(params.max_new_tokens):
        logits = model.model(input_ids=torch.tensor([[*request.prompt_tokens, *tokens]])).logits[
            0, -1, :VOCABULARY
        ]
        probs = torch.softmax(logits.double() / params.temperature, dim=-1)
        times = torch.empty(blocks + VOCABULARY_BLOCK, dtype=torch.float64).exponential_(
            generator=stream
        )
        rates = [
            float(probs[VOCABULARY_BLOCK * block : VOCABULARY_BLOCK * (block + 1)].sum())
            for block in range(blocks)
        ]
        first = min(range(blocks), key=lambda block: times[block] / rates[block])
        inside = range(VOCABULARY_BLOCK * first, min(VOCABULARY_BLOCK * (first + 1), VOCABULARY))
        tokens.append(
            min(
                inside,
                key=lambda token: times[blocks + token - VOCABULARY_BLOCK * first] / probs[token],
            )
        )
        if tokens[-1] in params.stop_ids:
            break
    return tokens


@torch.no_grad()
@pytest.mark.parametrize("temperature", in_check([1.0, 0.7], 0.7))
def test_slots_sample_what_is_sampled_token_by_token_without_a_cache(model, temperature):
    params = SamplingParams(24, temperature, stop_ids=STOPS)
    for request, sample in zip(
        requests(), LocalSampler(model, batch_size=4).sample(requests(), params), strict=True
    ):
        assert sample.tokens.tolist() == token_by_token(model, request, params)


@pytest.mark.parametrize("group", in_check([1, 4], 4))
def test_any_number_of_slots_samples_the_same_tokens(model, group):
    asked = requests(group=group)
    expected = LocalSampler(model, batch_size=1).sample(asked, PARAMS)
    for slots in (2, 5, 64):
        for one, other in zip(
            LocalSampler(model, batch_size=slots).sample(asked, PARAMS), expected, strict=True
        ):
            assert torch.equal(one.tokens, other.tokens)
            torch.testing.assert_close(
                one.policy_logprobs, other.policy_logprobs, rtol=1e-4, atol=1e-4
            )


def test_equal_settings_give_equal_bits(model):
    first, second = (LocalSampler(model, batch_size=3).sample(requests(), PARAMS) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.policy_logprobs, other.policy_logprobs)


def test_slots_and_lockstep_agree(model, monkeypatch):
    found = LocalSampler(model, batch_size=4).sample(requests(), PARAMS)
    kinds = []
    monkeypatch.setattr(
        "practicum.backends.local.decode_batch.SlotDecodeBatch",
        lambda work, program: kinds.append(1) or PaddedDecodeBatch(work),
    )
    for one, other in zip(
        LocalSampler(model, batch_size=4).sample(requests(), PARAMS), found, strict=True
    ):
        assert torch.equal(one.tokens, other.tokens)
    assert kinds


def test_a_slot_is_refilled_at_once(monkeypatch):
    """At no step is a slot free beyond need, so the steps equal the best schedule in this order."""
    model, steps = tiny(), []
    advance = SlotDecodeBatch.advance
    monkeypatch.setattr(
        SlotDecodeBatch,
        "advance",
        lambda self, tokens, keep: steps.append(len(tokens)) or advance(self, tokens, keep),
    )
    lengths = [
        len(sample.tokens)
        for sample in LocalSampler(model, batch_size=4).sample(requests(), PARAMS)
    ]
    assert sum(steps) == sum(lengths)
    ends = [0] * 4
    for length in lengths:
        ends[ends.index(min(ends))] += length
    assert len(steps) == max(ends)
    assert steps[: min(ends)] == [4] * min(ends)


def test_a_prompt_is_read_once_however_many_complete_it():
    model, read = tiny(), []
    model.model.base_model.embed_tokens.register_forward_pre_hook(
        lambda _, inputs: read.append(inputs[0].numel())
    )
    root = random_tokens(FEWEST_SAVED_TOKENS + 2, 5)
    asked = [
        SampleRequest((*root, *random_tokens(2 + row // 3, row // 3)), row) for row in range(9)
    ]
    samples = LocalSampler(model, batch_size=3).sample(asked, SamplingParams(5))
    decoded = sum(len(sample.tokens) - 1 for sample in samples)
    prompts = {request.prompt_tokens for request in asked}
    assert sum(read) - decoded == len(root) + sum(len(prompt) - len(root) for prompt in prompts)


def test_a_shared_beginning_counts_once_in_the_limit_of_a_prefill(monkeypatch):
    """Worked examples before short questions: each pass would read them again."""
    narrow = replace(ON_CPU, prefill_tokens=64)
    monkeypatch.setattr("practicum.backends.local.prefill.find_limits", lambda device: narrow)
    model, read = tiny(), []
    model.model.base_model.embed_tokens.register_forward_pre_hook(
        lambda _, inputs: read.append(inputs[0].numel())
    )
    root = random_tokens(40, 5)
    prompts = [(*root, *random_tokens(2, row)) for row in range(15)]
    LocalSampler(model).sample([SampleRequest(prompt, 0) for prompt in prompts], SamplingParams(1))
    assert read == [40 + 12 * 2, 40 + 3 * 2]


def test_prompts_wait_unread_until_there_is_room():
    """The cached prompts are limited by the rows, not by the number of waiting requests."""
    model = tiny()
    reading = LocalSampler(model).open_decode_batch(
        [random_tokens(6, row) for row in range(50)], 3, 4
    )
    assert isinstance(reading, SlotDecodeBatch)
    assert reading.admit(10) == 3
    assert len(reading._waiting.prefilled) == 0
    reading.advance(torch.tensor([5, 6, 7]), [2, 1])
    assert reading.admit(10) == 1
    assert len(reading._waiting.prefilled) == 2
    assert reading.logits().shape == (3, VOCABULARY)


def test_admitting_stops_when_the_queue_is_empty():
    reading = LocalSampler(tiny()).open_decode_batch([(3, 4)], 3, 4)
    assert (reading.admit(0), reading.admit(2), reading.admit(2)) == (0, 1, 0)


def test_what_a_slot_held_before_does_not_leak_into_the_next_text():
    """Also NaN: a masked key is still multiplied."""
    model = tiny()
    asked = [SampleRequest(random_tokens(30, 1), 1), SampleRequest(random_tokens(3, 2), 2)]
    after = LocalSampler(model, batch_size=1).sample(asked, SamplingParams(12))[1]
    fresh = LocalSampler(model, batch_size=1).sample(asked[1:], SamplingParams(12))[0]
    assert torch.equal(after.tokens, fresh.tokens)
    assert torch.isfinite(after.policy_logprobs).all()


def test_prepared_weights_multiply_like_the_models_own_and_leave_no_trace(model):
    ids = torch.tensor([[3, 4, 5, 6]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    prepared = PrepackedModel(model, steps=100)
    with torch.no_grad():
        expected = model.body(ids, mask)
        with prepared.use():
            found = model.body(ids, mask)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        prepared.head.logits(expected[0]), model.head().logits(expected[0]).detach()
    )
    with pytest.raises(KeyError), prepared.use():
        raise KeyError
    assert not any("forward" in module.__dict__ for module in model.model.modules())


def test_weights_are_prepared_once_a_call_and_anew_after_an_update():
    model = tiny()
    before = LocalSampler(model).sample(requests(4), PARAMS)
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.mul_(1.5)
    after = LocalSampler(model).sample(requests(4), PARAMS)
    assert any(
        not torch.equal(one.tokens, other.tokens) for one, other in zip(before, after, strict=True)
    )
    for request, sample in zip(requests(4), after, strict=True):
        with torch.no_grad():
            assert sample.tokens.tolist() == token_by_token(model, request, PARAMS)


def test_weights_that_are_no_numbers_are_an_error_that_says_so():
    model = tiny()
    with torch.no_grad():
        model.model.get_output_embeddings().weight[5] = torch.nan
    with pytest.raises(NumericError, match=r"lower optimizer\.learning_rate"):
        LocalSampler(model).sample(requests(3), PARAMS)


@pytest.mark.parametrize("vocabulary", [1, 5, VOCABULARY_BLOCK, VOCABULARY_BLOCK + 1, 1000])
def test_a_draw_is_won_by_the_first_block_and_its_first_token(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(1, vocabulary, generator=generator)
    logits[:, 1::3] = -torch.inf
    probs = torch.softmax(logits[0].double(), dim=-1)
    noise = draw_exponentials([open_random_stream(seed) for seed in range(200)], vocabulary)
    tokens, logprobs = sample_by_exponential_race(logits.expand(len(noise), -1), noise)
    assert (probs[tokens] > 0).all()
    torch.testing.assert_close(logprobs.double(), probs[tokens].log(), rtol=1e-5, atol=1e-5)
    blocks = -(-vocabulary // VOCABULARY_BLOCK)
    for times, token in zip(noise, tokens.tolist(), strict=True):
        arrivals = {
            block: times[block]
            / probs[VOCABULARY_BLOCK * block : VOCABULARY_BLOCK * (block + 1)].sum()
            for block in range(blocks)
        }
        assert token // VOCABULARY_BLOCK == min(arrivals, key=lambda block: float(arrivals[block]))


def test_rounding_changes_few_draws():
    """At most about as many as a change of every log-probability by 1e-5 must change, which is its total variation."""
    vocabulary, draws = 49_152, 400
    logits = 2.5 * torch.randn(
        1, vocabulary, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    moved = logits + 1e-3 * torch.randn(
        1, vocabulary, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    distance = (torch.softmax(logits, -1) - torch.softmax(moved, -1)).abs().sum().item() / 2
    noise = draw_exponentials([open_random_stream(seed) for seed in range(draws)], vocabulary)
    pairs = zip(
        *(
            sample_by_exponential_race(side.expand(draws, -1), noise)[0].tolist()
            for side in (logits, moved)
        ),
        strict=True,
    )
    flips = sum(one != other for one, other in pairs)
    assert flips <= 5 + 10 * draws * distance


def test_frequencies_over_many_blocks_are_the_probabilities():
    vocabulary, draws = 5 * VOCABULARY_BLOCK + 7, 40_000
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1))
    noise = draw_exponentials([open_random_stream(seed) for seed in range(draws)], vocabulary)
    counts = Counter(sample_by_exponential_race(logits.expand(draws, -1), noise)[0].tolist())
    probs = torch.softmax(logits.double(), dim=-1).tolist()
    chi2 = sum(
        (counts[token] - draws * prob) ** 2 / (draws * prob) for token, prob in enumerate(probs)
    )
    freedom = vocabulary - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1),
        SamplingParams(1, 0.5),
        SamplingParams(1, 0.0),
        SamplingParams(1, 1.5, top_p=0.7, top_k=9),
    ],
    ids=str,
)
def test_logprobs_of_a_draw(params):
    logits = 3 * torch.randn(50, 30, generator=torch.Generator().manual_seed(4))
    noise = draw_exponentials([open_random_stream(seed) for seed in range(50)], 30)
    tokens, sampled, natural = sample_tokens(logits, params, noise)
    expected = torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(natural, expected, rtol=1e-5, atol=1e-5)
    if params.temperature == 0:
        assert torch.equal(tokens, logits.argmax(dim=-1))
        assert torch.equal(sampled, torch.zeros(50))
    elif not params.top_k:
        tempered = torch.log_softmax(logits / params.temperature, dim=-1).gather(
            1, tokens[:, None]
        )[:, 0]
        torch.testing.assert_close(sampled, tempered, rtol=1e-5, atol=1e-5)


def test_adapters_are_decoded_as_part_of_the_weights_they_adapt():
    model = tiny()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    inject_adapter_in_model(LoraConfig(r=3, lora_alpha=6, target_modules=targets), model.model)
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    prepared = PrepackedModel(model, steps=100)
    maps = [layer for layer, product in prepared._forwards.items() if isinstance(product, _Product)]
    assert len(maps) == 2 * len(targets), "one map each, without its parts"
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        expected = model.body(ids, torch.ones_like(ids, dtype=torch.bool))
        with prepared.use():
            torch.testing.assert_close(
                model.body(ids, torch.ones_like(ids, dtype=torch.bool)),
                expected,
                rtol=1e-4,
                atol=1e-5,
            )
    for request, sample in zip(
        requests(6), LocalSampler(model).sample(requests(6), PARAMS), strict=True
    ):
        with torch.no_grad():
            assert sample.tokens.tolist() == token_by_token(model, request, PARAMS)


@pytest.mark.slow
def test_nothing_grows_over_two_hundred_steps():
    """Neither tensors nor their bytes: a step frees everything it creates."""
    model = tiny()
    model.model.requires_grad_(True)
    trainer, teacher = LocalTrainer(model), LocalSampler(tiny(seed=1))

    def step(number):
        asked = [
            SampleRequest(random_tokens(4 + row, row), 1000 * number + row) for row in range(2)
        ]
        samples = trainer.build_sampling_client().sample(asked, SamplingParams(4, stop_ids=STOPS))
        scored = [
            ScoreRequest(one.prompt_tokens, tuple(sample.tokens.tolist()))
            for one, sample in zip(asked, samples, strict=True)
        ]
        signals = teacher.score(scored, Full())
        rollouts = [
            replace(rollout(len(one.prompt_tokens), len(sample.tokens), row), tokens=sample.tokens)
            for row, (one, sample) in enumerate(zip(asked, samples, strict=True))
        ]
        data = [Datum(one, signal) for one, signal in zip(rollouts, signals, strict=True)]
        trainer.forward_backward(data, Objective(), number)
        trainer.optim_step(AdamParams(1e-3))

    def held():
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        return len(tensors), sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    for number in range(3):
        step(number)
    before = held()
    for number in range(200):
        step(3 + number)
    after = held()
    assert (
        after[0] <= before[0] and after[1] <= before[1] + 2**14
    )  # a tile may have met a longer batch
