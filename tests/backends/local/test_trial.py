"""A model that computes another function token by token is refused by name, unless it only scores."""

import inspect
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toy import toy_recipe
from transformers import AutoConfig, AutoModelForCausalLM

from backends.families import FAMILIES, SHORT, VOCABULARY, build, config_of, forward_alone, learn
from backends.tiny import ARCHITECTURES, random_tokens, tiny
from practicum.backends.local.decode_step import SlotStep
from practicum.backends.local.language_model import (
    CACHE_NAMES,
    UNBOUNDED,
    LanguageModel,
    find_body,
    patch_forwards,
)
from practicum.backends.local.loading import load, load_student
from practicum.backends.local.packing import enable_packing
from practicum.backends.local.prepared import PrepackedModel
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.trial import choose_decoding, explain_no_sampling, find_graph
from practicum.errors import ModelError
from practicum.models.config import ModelConfig, StudentConfig
from practicum.objective import Sampled
from practicum.runs.assembly import assemble_run
from practicum.types import SampleRequest, SamplingParams, ScoreRequest

RECIPE = {"task.alphabet": "ABCD"}
"""The letters of the families' tokenizer."""


def folder_of(name: str, folder: Path) -> Path:
    (family,) = (family for family in FAMILIES if family.name == name)
    return build(family, folder)


def model_of(name: str) -> LanguageModel:
    """Return a tiny model of a family, without a folder."""
    (family,) = (family for family in FAMILIES if family.name == name)
    model = AutoModelForCausalLM.from_config(config_of(family)).eval()
    return enable_packing(LanguageModel(model, VOCABULARY))


@pytest.fixture(scope="module")
def rwkv(tmp_path_factory) -> Path:
    return folder_of("RWKV", tmp_path_factory.mktemp("rwkv") / "model")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("packs", [True, False])
def test_models_that_decode_as_they_read_are_sampled_from(architecture, packs):
    model = tiny(architecture)
    assert explain_no_sampling(model if packs else replace(model, max_packed_tokens=0)) == ""


def test_a_model_that_forgets_its_cache_is_refused_and_by_how_much():
    model = replace(tiny(), max_packed_tokens=0)
    body = find_body(model.model)
    whole = body.forward

    name = next(name for name in CACHE_NAMES if name in inspect.signature(whole).parameters)

    def forgetful(*, input_ids, position_ids, use_cache, **others):
        return whole(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

    # The name of the cache comes from the body's signature.
    forgetful.__signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)]
    )

    with patch_forwards({body: forgetful}):
        found = explain_no_sampling(model)
    assert "LlamaForCausalLM read token by token is not the model that reads whole texts" in found
    assert "nats" in found
    assert "\n" not in found


def test_slots_that_mix_up_their_rows_are_refused(monkeypatch):
    monkeypatch.setattr(SlotStep, "move_slot", lambda self, source, slot, length: None)
    assert "is not the model that reads whole texts" in explain_no_sampling(tiny())


def test_the_trial_draws_nothing_and_leaves_no_trace():
    model = tiny()
    before = torch.random.get_rng_state()
    assert explain_no_sampling(model) == ""
    assert torch.equal(before, torch.random.get_rng_state())
    assert not model.model.training
    assert not any("forward" in module.__dict__ for module in model.model.modules())


def test_a_student_that_cannot_be_sampled_from_is_refused_at_load_by_name(rwkv):
    with pytest.raises(
        ModelError, match=r"RwkvForCausalLM cannot be read token by token.*teacher that only scores"
    ) as raised:
        load_student(StudentConfig(model=str(rwkv)), 0)
    assert raised.value.exit_code == 4
    assert "\n" not in str(raised.value)


def test_a_model_that_keeps_its_states_in_itself_is_refused():
    """Its forward takes a cache and answers without one."""
    assert "RecurrentGemmaModel does not use a transformers cache" in explain_no_sampling(
        model_of("RecurrentGemma")
    )


def test_the_same_model_scores_and_refuses_to_be_sampled_from(rwkv):
    model = load(ModelConfig(model=str(rwkv))).language_model
    (signal,) = LocalSampler(model).score([ScoreRequest((3, 4, 5), (6, 7))], Sampled())
    with torch.no_grad():
        expected = torch.log_softmax(
            model.model(torch.tensor([[3, 4, 5, 6, 7]])).logits[0, 2:4, :VOCABULARY], dim=-1
        )
    torch.testing.assert_close(signal.logprobs, expected.gather(1, torch.tensor([[6], [7]]))[:, 0])
    with pytest.raises(ModelError, match="RwkvForCausalLM"):
        LocalSampler(model).sample([SampleRequest((3, 4), 1)], SamplingParams(2))


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, False),
        ({"evaluation.prompts": 8}, True),
        ({"evaluation.prompts": 8, "evaluation.teacher": False}, False),
        ({"rollout.source": "teacher"}, True),
    ],
    ids=str,
)
def test_a_teacher_is_refused_where_the_recipe_lets_it_write(rwkv, tmp_path, changes, refused):
    student = folder_of("Llama", tmp_path / "student")
    recipe = toy_recipe(
        tmp_path, {**RECIPE, **changes, "student.model": str(student), "teacher.model": str(rwkv)}
    )
    if refused:
        with pytest.raises(ModelError, match=r"RwkvForCausalLM .* set evaluation\.teacher: false"):
            assemble_run(recipe, tmp_path)
    else:
        assemble_run(recipe, tmp_path)


@pytest.mark.parametrize(
    ("name", "length"),
    [("Llama", 256), ("GPT-2", 256), ("MPT", 256), ("Mamba", UNBOUNDED), ("Bloom", UNBOUNDED)],
)
def test_the_context_is_what_the_config_says_by_any_of_its_names(name, length):
    assert model_of(name).context_length == length


def test_a_bloom_of_the_hub_names_its_context():
    model = model_of("Bloom")
    model.model.config.seq_length = 2048
    assert model.context_length == 2048


def test_a_model_whose_layers_do_not_hand_the_layout_on_is_padded():
    assert model_of("StableLM").max_packed_tokens == 0


def test_a_gated_norm_is_not_exchanged_for_a_plain_one():
    """Also if the gate is optional: with one it would be another function."""
    model = model_of("Bamba")
    norms = [
        module
        for module in model.model.modules()
        if type(module).__name__.startswith("BambaRMSNorm")
    ]
    gated = {module for module in norms if type(module).__name__ == "BambaRMSNormGated"}
    exchanged = set(PrepackedModel(model, steps=100)._forwards)
    assert gated
    assert not gated & exchanged
    assert set(norms) - gated <= exchanged


# Programs


def defaults_of(model_type: str, layers: int, **settings: object) -> LanguageModel:
    """Return a small model with its config's own defaults except for sizes, tried as `load` does."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(
        model_type,
        **{**sizes, "num_hidden_layers": layers, "max_position_embeddings": 256},
        **settings,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    return enable_packing(LanguageModel(model, VOCABULARY))


SHORT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
PROGRAMS = {
    "SmolLM3": ("smollm3", 4, {}),
    "SmolLM3 over two periods": ("smollm3", 8, {}),
    "Ministral 3": (
        "ministral3",
        2,
        {"rope_parameters": {**SHORT_YARN, "llama_4_scaling_beta": 0.1}},
    ),
    "Mistral": ("mistral", 2, {"sliding_window": 8}),
    "Qwen2 with two types of layer": (
        "qwen2",
        4,
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
}


@pytest.mark.parametrize("find_way", [lambda model: choose_decoding(model, "auto"), find_graph])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_chosen_way_is_the_model_that_transformers_computes(name, find_way):
    model_type, layers, settings = PROGRAMS[name]
    model = defaults_of(model_type, layers, **settings)
    # Sampled, scored and trained texts reach beyond each threshold of the config.
    texts = [ScoreRequest(random_tokens(n, n), random_tokens(30, n + 50)) for n in (1, 7, 20)]
    chosen = replace(model, decoding=find_way(model))
    assert_samples_alike(chosen)
    sampler = LocalSampler(chosen)
    for text, scores in zip(texts, sampler.score(texts, Sampled()), strict=True):
        expected = forward_alone(model, text.prompt_tokens, text.tokens)
        torch.testing.assert_close(scores.logprobs, expected, rtol=0.0, atol=1e-4)
    learn(chosen, texts)


@pytest.mark.parametrize(
    "key",
    [
        {"sliding_window": 8},
        {"attention_chunk_size": 8},
        {"layer_types": ["sliding_attention"] * 2},
    ],
    ids=str,
)
def test_a_window_that_the_model_does_not_read_is_left_out(tmp_path, caplog, key):
    """transformers' cache obeys it, and LlamaModel does not."""
    folder = folder_of("Llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **key}))
    with caplog.at_level("INFO"):
        model = load(ModelConfig(model=str(folder))).language_model
    (name,) = key
    assert f"config.json sets {name}, which LlamaForCausalLM does not read" in caplog.text
    assert model.max_packed_tokens == model.context_length
    assert_samples_alike(model)
    assert_samples_alike(replace(model, max_packed_tokens=0))


def test_rows_are_short_where_a_model_counts_the_places_of_a_row():
    """Llama 4 scales queries by their position in the row: padding and texts before them would count."""
    model = model_of("Llama 4 text")
    assert (model.row_limit, model.max_packed_tokens) == (SHORT - 1, 0)
    requests = [SampleRequest(random_tokens(length, length), length) for length in (1, 4)]
    drawn = LocalSampler(model).sample(requests, SamplingParams(3))
    for request, sample in zip(requests, drawn, strict=True):
        expected = forward_alone(model, request.prompt_tokens, tuple(sample.tokens.tolist()))
        torch.testing.assert_close(sample.policy_logprobs, expected, rtol=0.0, atol=1e-4)
    with pytest.raises(ModelError, match="texts of more than 7 tokens cannot be sampled from"):
        LocalSampler(model).sample(requests, SamplingParams(4))


def assert_samples_alike(model: LanguageModel) -> None:
    """Compare sampled log-probabilities with transformers' forward pass over each text."""
    requests = [SampleRequest(random_tokens(3 + 4 * row, row), row) for row in range(4)]
    for request, drawn in zip(
        requests,
        LocalSampler(model, batch_size=3).sample(requests, SamplingParams(24)),
        strict=True,
    ):
        expected = forward_alone(model, request.prompt_tokens, tuple(drawn.tokens.tolist()))
        torch.testing.assert_close(drawn.policy_logprobs, expected, rtol=0.0, atol=1e-4)
