"""The score of a text does not depend on its batch, for all kinds of rotary positions."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from backends.families import forward_alone, learn
from backends.tiny import VOCABULARY, random_tokens
from practicum.backends.local.cached_texts import CachedTexts
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.loading import fix_length
from practicum.backends.local.packing import enable_packing
from practicum.backends.local.prefixes import PrefixStore
from practicum.backends.local.sampler import LocalSampler
from practicum.errors import ModelError
from practicum.models.config import ModelConfig
from practicum.objective import Sampled
from practicum.types import SampleRequest, SamplingParams, ScoreRequest

ORIGINAL, LONGEST = 16, 48
"""The length at which rotations change, and the longest text of the run, in tokens."""

SHAPES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [4.0, 6.0, 8.0, 12.0]}
ROTATIONS = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {**FACTORS, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}
MODELS = {
    **{f"llama, {kind}": ("llama", kind, {}) for kind in ROTATIONS},
    "phi3, longrope": ("phi3", "longrope", {"original_max_position_embeddings": ORIGINAL}),
    "phimoe, longrope": ("phimoe", "longrope", {"num_local_experts": 2}),
}
ALL = pytest.mark.parametrize("name", MODELS)
CHANGING = pytest.mark.parametrize("name", [n for n in MODELS if "dyn" in n or "long" in n])


def build(name: str, longest_text: int | None = LONGEST) -> LanguageModel:
    """Return a small model with a rotation, fixed as `load` does; None leaves it to transformers."""
    model_type, kind, settings = MODELS[name]
    rotation = {"rope_type": kind, "rope_theta": 10000.0, **ROTATIONS[kind]}
    if model_type == "phimoe":
        rotation |= {"short_mscale": 1.1, "long_mscale": 1.4}
    config = AutoConfig.for_model(
        model_type,
        **SHAPES,
        max_position_embeddings=ORIGINAL if kind == "dynamic" else 4 * ORIGINAL,
        rope_parameters=rotation,
        **settings,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    language_model = LanguageModel(model, VOCABULARY)
    if longest_text is not None:
        language_model = fix_length(
            language_model, ModelConfig(model="", longest_text=longest_text)
        )
    return enable_packing(language_model)


def list_texts() -> list[ScoreRequest]:
    """Return texts below and above the threshold; two of them have the same prompt."""
    shared = random_tokens(9, 5)
    return [
        ScoreRequest(shared, random_tokens(4, 1)),
        ScoreRequest(shared, random_tokens(LONGEST - 9, 2)),
        ScoreRequest(random_tokens(3, 3), random_tokens(6, 4)),
        ScoreRequest(random_tokens(20, 6), random_tokens(10, 7)),
    ]


@ALL
@pytest.mark.parametrize("packs", [True, False])
def test_the_score_of_a_text_does_not_depend_on_its_company(name, packs):
    model = build(name)
    if not packs:
        model = enable_packing(model, 0)
        model = LanguageModel(model.model, VOCABULARY, longest_text=model.longest_text)
    sampler = LocalSampler(model)
    together = sampler.score(list_texts(), Sampled())
    for text, scores in zip(list_texts(), together, strict=True):
        (alone,) = sampler.score([text], Sampled())
        torch.testing.assert_close(scores.logprobs, alone.logprobs, rtol=0.0, atol=2e-5)
        expected = forward_alone(model, text.prompt_tokens, text.tokens)
        torch.testing.assert_close(scores.logprobs, expected, rtol=0.0, atol=1e-4)


@CHANGING
def test_the_longest_text_is_read_as_transformers_reads_it(name):
    text = list_texts()[1]
    (scores,) = LocalSampler(build(name)).score([text], Sampled())
    plain = forward_alone(build(name, None), text.prompt_tokens, text.tokens)
    torch.testing.assert_close(scores.logprobs, plain, rtol=0.0, atol=1e-4)


@CHANGING
def test_a_run_of_short_texts_reads_them_as_transformers_does(name):
    text = list_texts()[0]
    (scores,) = LocalSampler(build(name, ORIGINAL)).score([text], Sampled())
    plain = forward_alone(build(name, None), text.prompt_tokens, text.tokens)
    torch.testing.assert_close(scores.logprobs, plain, rtol=0.0, atol=1e-4)


@ALL
@pytest.mark.parametrize("packs", [True, False])
def test_sampling_beyond_the_threshold_is_the_forward_pass_of_the_text(name, packs):
    model = build(name)
    if not packs:
        model = LanguageModel(model.model, VOCABULARY, longest_text=model.longest_text)
    requests = [SampleRequest(random_tokens(3 + 7 * row, row), row) for row in range(3)]
    params = SamplingParams(24)
    for request, drawn in zip(
        requests, LocalSampler(model, batch_size=2).sample(requests, params), strict=True
    ):
        expected = forward_alone(model, request.prompt_tokens, tuple(drawn.tokens.tolist()))
        torch.testing.assert_close(drawn.policy_logprobs, expected, rtol=0.0, atol=1e-4)


@CHANGING
def test_texts_that_go_on_keep_their_frequencies(name):
    model = build(name)
    sampler = LocalSampler(model, kept=CachedTexts())
    prompt = random_tokens(8, 1)
    for turn in range(2):
        (drawn,) = sampler.sample([SampleRequest(prompt, turn)], SamplingParams(12))
        tokens = tuple(drawn.tokens.tolist())
        expected = forward_alone(model, prompt, tokens)
        torch.testing.assert_close(drawn.policy_logprobs, expected, rtol=0.0, atol=1e-4)
        prompt = (*prompt, *tokens, *random_tokens(3, turn))


@CHANGING
def test_the_gradient_of_a_text_does_not_depend_on_its_company(name):
    learn(build(name), list_texts())


@CHANGING
def test_a_text_beyond_what_the_frequencies_serve_is_refused(name):
    model = build(name, ORIGINAL)
    long = random_tokens(ORIGINAL + 1, 1)
    calls = [
        lambda: LocalSampler(model).score([ScoreRequest(long[:4], long[4:])], Sampled()),
        lambda: LocalSampler(model, prefixes=PrefixStore()).score(
            [ScoreRequest(long[:4], long[4:])], Sampled()
        ),
        lambda: LocalSampler(model).sample([SampleRequest(long[:9], 0)], SamplingParams(8)),
    ]
    for call in calls:
        with pytest.raises(ModelError, match=f"a text of {ORIGINAL + 1} tokens.*longest_text: 17"):
            call()


def test_rotations_of_one_kind_for_all_lengths_have_no_limit():
    assert build("llama, yarn").longest_text is None
    assert build("llama, dynamic").longest_text == LONGEST
    assert build("llama, longrope").longest_text == 4 * ORIGINAL
    assert build("llama, longrope", ORIGINAL).longest_text == ORIGINAL
    assert build("llama, dynamic").context_length == 4 * ORIGINAL


def test_the_exported_config_says_what_the_folder_said(tmp_path):
    model = build("phimoe, longrope").model
    model.save_pretrained(tmp_path)
    rotation = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert rotation["rope_type"] == "longrope"
    assert (rotation["short_mscale"], rotation["long_mscale"]) == (1.1, 1.4)
