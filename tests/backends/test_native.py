"""The compiled decode step gives the results of transformers' modules, for each vector width and number of threads."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.minimax_m2.modeling_minimax_m2 import (
    apply_rotary_pos_emb as rotate_the_first_part,
)

from practicum.backends.local import drawing
from practicum.backends.local.decode_batch import (
    SlotDecodeBatch,
    open_decode_batch,
    open_draft_batch,
)
from practicum.backends.local.language_model import Decoding, LanguageModel
from practicum.backends.local.llama_weights import find_llama_weights
from practicum.backends.local.native import NativeStep, library
from practicum.backends.local.packing import enable_packing
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.trial import can_decode_natively
from practicum.types import SampleRequest, SamplingParams

from .programs import open_program
from .tiny import VOCABULARY, random_tokens, tiny

WIDTHS = ("AVX512", "AVX2")
PARAMS = SamplingParams(24, temperature=0.7, stop_ids=frozenset({2, 17, 30}))


@pytest.fixture(params=WIDTHS)
def compiled(request, monkeypatch):
    """Return the program for one vector width, in place of the program for the widest."""
    made = open_program(request.param)
    for place in ("", ".library"):
        monkeypatch.setattr(f"practicum.backends.local.native{place}.load_library", lambda: made)
    monkeypatch.setattr("practicum.backends.local.sampler.load_library", lambda: made)
    return made


def make(settings=None, adapters=False, seed=0, rows=VOCABULARY):
    """Return a Llama-like model with sizes that are no multiple of a vector or of a panel."""
    chosen = {
        "model_type": "llama",
        "hidden_size": 42,
        "intermediate_size": 70,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **(settings or {}),
    }
    config = AutoConfig.for_model(chosen.pop("model_type"), vocab_size=rows, **chosen)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        for name, weight in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                torch.nn.init.uniform_(weight, 0.5, 1.5)
        if adapters:
            lora = LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj"])
            inject_adapter_in_model(lora, model)
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(weight, std=0.1)
    return enable_packing(LanguageModel(model, VOCABULARY, decoding=Decoding.NATIVE))


MODELS = {
    "llama": {},
    "one group": {"num_key_value_heads": 1},
    "own heads": {"num_key_value_heads": 6},
    "biases": {"model_type": "qwen2"},
    "all biases": {"attention_bias": True},
    "head norms": {"model_type": "qwen3"},
    "scaled rotation": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "untied": {"tie_word_embeddings": False},
}


def requests(count=9):
    return [SampleRequest(random_tokens(3 + 5 * (row % 4), row), row) for row in range(count)]


def sample(model, rows=4, params=PARAMS):
    return LocalSampler(model, batch_size=rows).sample(requests(), params)


def assert_alike(model):
    twins = sample(replace(model, decoding=Decoding.TORCH))
    for fast, twin in zip(sample(model), twins, strict=True):
        assert torch.equal(fast.tokens, twin.tokens)
        error = (fast.policy_logprobs - twin.policy_logprobs).abs().max()
        tempered = (fast.sampling_logprobs - twin.sampling_logprobs).abs().max()
        assert error <= 1e-5
        assert tempered <= 1e-5 / PARAMS.temperature


@pytest.mark.parametrize("kind", MODELS)
def test_texts_of_ragged_lengths_are_those_of_the_modules(compiled, kind):
    model = make(MODELS[kind])
    assert isinstance(_open(model)._program, NativeStep)
    assert_alike(model)


def test_adapters_are_a_part_of_the_weights(compiled):
    model = make(adapters=True)
    assert isinstance(_open(model)._program, NativeStep)
    assert_alike(model)


def test_weights_that_replace_the_models_are_used(compiled):
    """A snapshot or self-teacher has separate weights; the model's are untouched."""
    model, other = make(), make(seed=1)
    overlay = {name: weight.data for name, weight in other.model.named_parameters()}
    expected = sample(other)
    for own, twin in zip(
        LocalSampler(model, overlay, 4).sample(requests(), PARAMS), expected, strict=True
    ):
        assert torch.equal(own.policy_logprobs, twin.policy_logprobs)
    assert_alike(model)


def test_rows_of_padding_in_the_embedding_get_no_probability(compiled):
    assert_alike(make({"tie_word_embeddings": True}, rows=VOCABULARY + 13))


def test_the_bits_depend_neither_on_the_slots_nor_on_the_threads(compiled):
    model, threads = make(), torch.get_num_threads()
    expected = sample(model, rows=1)
    try:
        for rows, count in ((2, 1), (9, 1), (4, 2), (9, 3), (3, 7)):
            torch.set_num_threads(count)
            for one, twin in zip(sample(model, rows), expected, strict=True):
                assert torch.equal(one.tokens, twin.tokens)
                # The prompts are read by torch, and its products do depend on both.
                torch.testing.assert_close(
                    one.policy_logprobs, twin.policy_logprobs, rtol=0, atol=1e-5
                )
    finally:
        torch.set_num_threads(threads)


def test_a_step_gives_a_row_the_same_bits_in_any_company(compiled):
    batch = open_decode_batch(make(), {}, [random_tokens(20, row) for row in range(11)], 11, 12)
    program = batch._program
    generator = torch.Generator().manual_seed(0)
    stores = [
        torch.randn(store.shape, generator=generator) for store in (program._keys, program._values)
    ]
    lengths, tokens = list(range(9, 20)), torch.arange(5, 16)

    def advance(rows, threads):
        program._threads, program._room = threads, torch.empty(1 << 20)
        for store, random in zip((program._keys, program._values), stores, strict=True):
            store[:, : len(rows)] = random[:, rows]
        hidden = program.read(tokens[rows][:, None], [lengths[row] for row in rows])[:, 0]
        return torch.cat([hidden, program.logits(hidden)], dim=1)

    alone = torch.cat([advance([row], 1) for row in range(11)])
    for threads in (1, 2, 5):
        assert torch.equal(advance(list(range(11)), threads), alone)
        assert torch.equal(advance([7, 2, 9], threads), alone[[7, 2, 9]])


@pytest.mark.parametrize("seed", range(5))
def test_a_tree_gives_each_path_the_bits_of_its_tokens_read_one_by_one(compiled, seed):
    draw, count = Random(seed), 12
    parents = [draw.randrange(node) for node in range(1, count)]
    paths = [[0]]
    for node, parent in enumerate(parents, start=1):
        paths.append([*paths[parent], node])
    depths = torch.tensor([len(path) - 1 for path in paths])
    sees = torch.zeros(1, count, count, dtype=torch.bool)
    for node, path in enumerate(paths):
        sees[0, node, path] = True
    tokens = torch.tensor([random_tokens(count, seed)])

    def open_text():
        batch = open_draft_batch(make(), [random_tokens(9, seed)], 12, (1, 2), count)
        assert batch.admit(1) == 1
        return batch

    def read_on(batch, nodes):
        one = torch.zeros(1, dtype=torch.long), torch.ones(1, 1, 1, dtype=torch.bool)
        results = []
        for node in nodes:
            results.append(batch.read_tree(tokens[:, [node]], *one))
            batch.append_path(0, tokens[0, [node]].tolist(), [0])
        return results[-1]

    for node, path in enumerate(paths):
        batch = open_text()
        # Threads meet before a token reads the other tokens' keys.
        batch._program._threads, batch._program._room = 1 + node % 3, torch.empty(1 << 20)
        logits, states = batch.read_tree(tokens, depths, sees)
        expected = open_text()
        for result, one in zip((logits, states), read_on(expected, path), strict=True):
            assert torch.equal(result[:, node], one[:, 0])
        batch.append_path(0, tokens[0].tolist(), path)
        for pair in zip(read_on(batch, [3, 5]), read_on(expected, [3, 5]), strict=True):
            assert torch.equal(*pair)


def _open(model):
    batch = open_decode_batch(model, {}, [(1, 2, 3)], 1, 24)
    assert isinstance(batch, SlotDecodeBatch)
    return batch


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "gemma3_text"},
        {"mlp_bias": True},
        {"model_type": "olmo2"},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ],
)
def test_other_layouts_go_through_their_modules(compiled, settings):
    model = make(settings)
    assert find_llama_weights(model.model) is None
    assert not can_decode_natively(model)


@pytest.mark.parametrize("turned", [0.2, 0.4, 0.8])
def test_heads_of_which_a_part_is_rotated_go_through_their_modules(compiled, monkeypatch, turned):
    """The program would read past the table of rotations, which is narrower than half a head."""
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate_the_first_part)
    rotation = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    model = make({"rope_parameters": {**rotation, "partial_rotary_factor": turned}})
    assert model.max_packed_tokens
    assert find_llama_weights(model.model) is None
    assert not can_decode_natively(model)
    assert make({"rope_parameters": rotation}).max_packed_tokens
    assert can_decode_natively(make({"rope_parameters": rotation}))


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "granite", "residual_multiplier": 0.5},
        {"model_type": "granite", "attention_multiplier": 0.2},
        {"model_type": "granite", "embedding_multiplier": 3.0},
        {"hidden_act": "gelu"},
    ],
)
def test_what_names_do_not_show_is_found_by_the_trial(compiled, settings):
    model = make(settings)
    assert find_llama_weights(model.model) is not None
    assert not can_decode_natively(model)


@pytest.mark.parametrize("kind", MODELS)
def test_the_trial_takes_what_the_step_computes(compiled, kind):
    assert can_decode_natively(make(MODELS[kind]))


def test_few_tokens_do_not_repay_the_packing(compiled):
    batch = open_decode_batch(make(), {}, [(1, 2, 3)], 1, 7)
    assert not isinstance(batch._program, NativeStep)


def test_half_precision_and_an_adapter_of_another_kind_keep_their_modules(compiled):
    assert not can_decode_natively(replace(tiny(), autocast=True))
    model = make()
    lora = LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    inject_adapter_in_model(lora, model.model)
    assert not isinstance(_open(model)._program, NativeStep)


# The race


def draw(logits, noise, temperature=1.0, program=None):
    params = SamplingParams(1, temperature=temperature)
    return drawing.sample_tokens(logits, params, noise, program or library.load_library())


@given(
    st.integers(1, 5),
    st.integers(1, 300),
    st.floats(0.1, 30.0),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.integers(0, 10**6),
)
def test_the_race_is_that_of_the_torch_function(rows, vocabulary, scale, temperature, seed):
    if library.load_library() is None:
        pytest.skip("no compiled program")
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, vocabulary, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -torch.inf
    logits[:, 0] = 0.0
    streams = [drawing.open_random_stream(seed + row) for row in range(rows)]
    noise = drawing.draw_exponentials(streams, vocabulary)
    tokens, sampled, policy = draw(logits, noise, temperature)
    expected, logprobs = drawing.sample_by_exponential_race(logits / temperature, noise)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(sampled, logprobs, rtol=1e-5, atol=2e-6)
    untempered = torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(policy, untempered, rtol=1e-5, atol=1e-5)


def test_a_token_of_probability_0_never_wins(compiled):
    logits = torch.full((1, 200), -torch.inf)
    logits[0, 130] = -1000.0
    for seed in range(50):
        noise = drawing.draw_exponentials([drawing.open_random_stream(seed)], 200)
        assert draw(logits, noise)[0].item() == 130


def test_logits_that_are_not_numbers_give_logprobs_that_are_not(compiled):
    logits = torch.zeros(2, 70)
    logits[1, 66] = torch.nan
    streams = [drawing.open_random_stream(seed) for seed in range(2)]
    _, sampled, policy = draw(logits, drawing.draw_exponentials(streams, 70))
    assert sampled.isnan().tolist() == policy.isnan().tolist() == [False, True]


# The compiler


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("PRACTICUM_CACHE", str(tmp_path))
    library._load.cache_clear()
    yield tmp_path
    library._load.cache_clear()


def test_without_a_compiler_models_decode_through_torch(empty_cache, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert library.load_library() is None
    model = make()
    assert not isinstance(_open(model)._program, NativeStep)
    assert not can_decode_natively(model)
    assert len(sample(model)) == 9


def test_a_compiler_that_fails_is_one_line(empty_cache, monkeypatch, caplog):
    monkeypatch.setattr(library, "FLAGS", ("--no-such-option",))
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    assert library.load_library() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "could not be compiled" in caplog.text
    assert not list(empty_cache.rglob("*.so"))


@pytest.mark.slow
def test_the_program_is_compiled_once_for_a_processor(empty_cache, monkeypatch):
    if library.load_library() is None:
        pytest.skip("no C compiler")
    runs = []
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: runs.append(a[0]) or real(*a, **k))
    library._load.cache_clear()
    library.load_library()
    assert [Path(command[1]).name for command in runs] == ["--version"]
    monkeypatch.setattr(library, "read_processor", lambda: ("another processor",))
    library._load.cache_clear()
    library.load_library()
    assert len(list(empty_cache.rglob("*.so"))) == 2
