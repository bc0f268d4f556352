"""A model that is another one token by token is refused by name, unless it only scores."""

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toy import toy_recipe
from transformers import AutoModelForCausalLM

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
from practicum.backends.local.trial import explain_no_sampling
from practicum.errors import ModelError
from practicum.models.config import ModelConfig, StudentConfig
from practicum.objective import Sampled
from practicum.runs.assembly import assemble_run
from practicum.types import SampleRequest, SamplingParams, ScoreRequest

from .families import FAMILIES, VOCABULARY, build, config_of
from .tiny import ARCHITECTURES, tiny

RECIPE = {"task.alphabet": "ABCD"}
"""The letters of the families' tokenizer."""


def folder_of(name: str, folder: Path) -> Path:
    (family,) = (family for family in FAMILIES if family.name == name)
    return build(family, folder)


def model_of(name: str) -> LanguageModel:
    """A tiny model of a family, without a folder."""
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

    # The body's signature tells what its cache is called.
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
    assert "RecurrentGemmaModel keeps what it has read in no cache" in explain_no_sampling(
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
        with pytest.raises(
            ModelError, match=r"RwkvForCausalLM .* write evaluation\.teacher: false"
        ):
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
    """Also where the gate may be left out: called with one it would be another function."""
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
