"""Adapter folders of peft: merged, trained on, written, or refused in one line."""

import json
import warnings
from functools import partial

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from backends.folders import change_json, model_folder
from backends.local.test_export import logits, trained
from backends.mixtures import FAMILIES, family_folder
from practicum.backends.local.adapter_folders import write_adapter
from practicum.backends.local.loading import load, load_student
from practicum.backends.local.paper import load_weightless
from practicum.errors import ModelError
from practicum.models.config import Lora, ModelConfig, StudentConfig
from practicum.models.digests import digest_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
"""peft calls a name that transformers has deprecated."""

EVERY_MAP = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapter_folder(folder, base, *, tokenizer=False, **settings):
    """Write a folder with peft itself; return the logits of base and adapter together."""
    torch.manual_seed(0)
    choices = {"r": 4, "lora_alpha": 8, "target_modules": EVERY_MAP, "init_lora_weights": False}
    config = LoraConfig(**{**choices, "task_type": "CAUSAL_LM", **settings})
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(folder)
    if tokenizer:
        AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return logits(model.eval())


@pytest.mark.parametrize("tokenizer", [True, False])
def test_an_adapter_folder_is_merged_into_the_base_that_it_names(tmp_path, tokenizer):
    base = model_folder(tmp_path / "base")
    expected = adapter_folder(tmp_path / "adapter", base, tokenizer=tokenizer)
    loaded = load(ModelConfig(model=str(tmp_path / "adapter")))
    torch.testing.assert_close(logits(loaded.language_model.model), expected, rtol=1e-5, atol=1e-5)
    plain = load(ModelConfig(model=str(base)))
    assert loaded.renderer.stop_ids == plain.renderer.stop_ids
    assert (logits(plain.language_model.model) - expected).abs().max() > 1e-2


def test_a_student_of_an_adapter_folder_trains_all_merged_weights(tmp_path):
    base = model_folder(tmp_path / "base")
    expected = adapter_folder(tmp_path / "adapter", base, target_modules=["q_proj", "v_proj"])
    loaded = load_student(StudentConfig(model=str(tmp_path / "adapter")), 0)
    model = loaded.language_model.model
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_student_with_lora_goes_on_with_the_adapter_itself(tmp_path):
    base = model_folder(tmp_path / "base")
    expected = adapter_folder(tmp_path / "adapter", base)
    config = StudentConfig(model=str(tmp_path / "adapter"), lora=Lora(rank=4, alpha=8))
    model = load_student(config, 0).language_model.model
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    trainable = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert trainable
    assert all(".lora_" in name for name in trainable)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 2}, r"rank 2 and alpha 8 and student\.lora rank 4 and alpha 8; set"),
        ({"use_rslora": True}, r"rank 4 and alpha 16 and student\.lora rank 4 and alpha 8"),
        ({"target_modules": ["q_proj"]}, r"adapts 2 weights and student\.lora 14 \(it does not"),
        ({"target_modules": ["q_proj"]}, r"set the same modules in student\.lora\.targets, or"),
        ({"use_dora": True}, r"more than plain low-rank adapters \(LORA, use_dora\)"),
        ({"bias": "all"}, r"more than plain low-rank adapters \(LORA, bias\)"),
        ({"modules_to_save": ["norm"]}, r"low-rank adapters \(LORA, modules_to_save\)"),
    ],
    ids=["rank", "scale", "targets", "advice", "dora", "bias", "saved modules"],
)
def test_other_adapters_than_the_recipes_cannot_be_trained_on(tmp_path, settings, message):
    base = model_folder(tmp_path / "base")
    adapter_folder(tmp_path / "adapter", base, **settings)
    config = StudentConfig(model=str(tmp_path / "adapter"), lora=Lora(rank=4, alpha=8))
    with pytest.raises(ModelError, match=message) as error:
        load_student(config, 0)
    assert "leave student.lora out" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"use_dora": True},
        {"use_rslora": True},
        {"modules_to_save": ["norm"]},
        {"target_modules": ["q_proj", "down_proj"], "rank_pattern": {"q_proj": 2}},
    ],
    ids=str,
)
def test_every_kind_of_adapter_is_merged_as_peft_does(tmp_path, choices):
    base = model_folder(tmp_path / "base")
    expected = adapter_folder(tmp_path / "adapter", base, **choices)
    found = logits(load(ModelConfig(model=str(tmp_path / "adapter"))).language_model.model)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        (
            partial(LoraConfig, target_modules=["q_proj"], alora_invocation_tokens=[1]),
            "LORA, alora_invoc",
        ),
        (partial(PromptTuningConfig, num_virtual_tokens=2), "PROMPT_TUNING"),
    ],
    ids=["activated", "prompt"],
)
def test_an_adapter_that_is_no_change_of_weights_is_refused_by_name(tmp_path, build, kind):
    base = model_folder(tmp_path / "base")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), build(task_type="CAUSAL_LM"))
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ModelError, match=rf"\({kind}.*is no change of weights") as error:
        load(ModelConfig(model=str(tmp_path / "adapter")))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("written", "settings"),
    [
        ({"rslora": True}, {"use_rslora": True}),
        ({"targets": ("q_proj", "v_proj")}, {"target_modules": ["q_proj", "v_proj"]}),
    ],
    ids=["scale", "targets"],
)
def test_a_student_goes_on_with_an_adapter_of_the_same_settings(tmp_path, written, settings):
    base = model_folder(tmp_path / "base")
    expected = adapter_folder(tmp_path / "adapter", base, **settings)
    lora = Lora(rank=4, alpha=8, **written)
    loaded = load_student(StudentConfig(model=str(tmp_path / "adapter"), lora=lora), 0)
    torch.testing.assert_close(logits(loaded.language_model.model), expected, rtol=1e-5, atol=1e-5)
    found = write_and_read(loaded, base, tmp_path / "out")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    again = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (again["r"], again["lora_alpha"]) == (4, 8)
    assert again["use_rslora"] == settings.get("use_rslora", False)


def test_digests_cover_the_adapter_and_its_base(tmp_path):
    base = model_folder(tmp_path / "base")
    adapter_folder(tmp_path / "adapter", base)
    before = digest_model(str(tmp_path / "adapter"))
    assert {"adapter_model.safetensors", "base/config.json", "base/model.safetensors"} <= set(
        before
    )
    change_json(base / "config.json", note="changed")
    after = digest_model(str(tmp_path / "adapter"))
    assert [name for name in before if before[name] != after[name]] == ["base/config.json"]


def test_a_plan_knows_the_sizes_of_an_adapters_base(tmp_path):
    base = model_folder(tmp_path / "base")
    adapter_folder(tmp_path / "adapter", base)
    paper = load_weightless(ModelConfig(model=str(tmp_path / "adapter")))
    assert paper.language_model.model.config.hidden_size == 32


def test_an_adapter_whose_base_is_gone_names_what_to_write(tmp_path):
    base = model_folder(tmp_path / "base")
    adapter_folder(tmp_path / "adapter", base)
    base.rename(tmp_path / "moved")
    with pytest.raises(
        ModelError, match=r"its base model cannot be used .*write where it lies now"
    ):
        load(ModelConfig(model=str(tmp_path / "adapter")))
    change_json(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=None)
    with pytest.raises(ModelError, match=r"names no base model; write its folder or hub name"):
        load(ModelConfig(model=str(tmp_path / "adapter")))


@pytest.mark.parametrize("name", ["adapter_model.bin", "nothing"])
def test_adapters_in_pickles_are_not_read(tmp_path, name):
    base = model_folder(tmp_path / "base")
    adapter_folder(tmp_path / "adapter", base)
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / name)
    with pytest.raises(ModelError, match=r"no adapter_model\.safetensors .*they can run code"):
        load(ModelConfig(model=str(tmp_path / "adapter")))


def test_an_adapter_of_itself_is_refused(tmp_path):
    base = model_folder(tmp_path / "base")
    adapter_folder(tmp_path / "adapter", base)
    change_json(
        tmp_path / "adapter" / "adapter_config.json",
        base_model_name_or_path=str(tmp_path / "adapter"),
    )
    with pytest.raises(ModelError, match=r"is an adapter too; merge the base"):
        load(ModelConfig(model=str(tmp_path / "adapter")))


def test_an_adapter_of_another_model_is_refused(tmp_path):
    adapter_folder(tmp_path / "adapter", model_folder(tmp_path / "base"))
    other = model_folder(tmp_path / "other", hidden_size=64)
    change_json(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=str(other))
    with pytest.raises(ModelError, match=r"the adapter could not be loaded into its base"):
        load(ModelConfig(model=str(tmp_path / "adapter")))


def test_an_adapter_that_lacks_weights_is_refused(tmp_path):
    base = model_folder(tmp_path / "base")
    adapter_folder(tmp_path / "adapter", base, target_modules=["q_proj"])
    change_json(tmp_path / "adapter" / "adapter_config.json", target_modules=["q_proj", "v_proj"])
    with pytest.raises(ModelError, match=r"missing adapter keys"):
        load(ModelConfig(model=str(tmp_path / "adapter")))


def write_and_read(loaded, base, folder):
    """Return the logits that peft gets from the written adapter on the base."""
    write_adapter(loaded.language_model.model, str(base), folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        return logits(
            PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
        )


@pytest.mark.parametrize("choices", [{}, {"trainable_layers": 1}], ids=str)
def test_peft_loads_a_written_adapter_with_the_logits_of_the_student(tmp_path, choices):
    base = model_folder(tmp_path / "base")
    loaded = trained(base, lora=Lora(rank=4, alpha=6), **choices)
    found = write_and_read(loaded, base, tmp_path / "out")
    torch.testing.assert_close(found, logits(loaded.language_model.model), rtol=1e-5, atol=1e-5)


def test_a_written_adapter_can_be_trained_on_here(tmp_path):
    base = model_folder(tmp_path / "base")
    loaded = trained(base, lora=Lora(rank=4, alpha=6))
    write_adapter(loaded.language_model.model, str(base), tmp_path / "out")
    config = StudentConfig(model=str(tmp_path / "out"), lora=Lora(rank=4, alpha=6))
    again = load_student(config, 1).language_model.model.state_dict()
    for name, weight in loaded.language_model.model.state_dict().items():
        assert torch.equal(weight, again[name]), name


def test_weights_trained_as_a_whole_are_no_adapter(tmp_path):
    loaded = trained(model_folder(tmp_path / "base"))
    with pytest.raises(ModelError, match=r"no student\.lora.*leave --adapter out"):
        write_adapter(loaded.language_model.model, "base", tmp_path / "out")


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2", "mixtral"])
def test_peft_loads_the_written_adapters_of_experts_and_transposed_maps(tmp_path, family):
    assert family in FAMILIES
    base = family_folder(tmp_path / "base", family)
    loaded = trained(base, lora=Lora(rank=2, alpha=6))
    found = write_and_read(loaded, base, tmp_path / "out")
    torch.testing.assert_close(found, logits(loaded.language_model.model), rtol=1e-4, atol=1e-4)
