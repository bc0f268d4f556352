"""An exported folder is a plain model folder with the logits of the student."""

import copy
import json

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from toy import in_check
from transformers import AutoModelForCausalLM, AutoTokenizer

from backends.folders import TOKENS, change_json, change_weights, model_folder
from backends.tiny import ARCHITECTURES
from backends.toys import toy_data
from practicum.backends.local import export as exporting
from practicum.backends.local.adapters import merge_adapters
from practicum.backends.local.export import export
from practicum.backends.local.loading import load, load_student
from practicum.backends.local.trainer import LocalTrainer
from practicum.core.waits import display_waits
from practicum.errors import ModelError, ResourceError
from practicum.models.config import Lora, ModelConfig, StudentConfig
from practicum.objective import Objective
from practicum.ports import AdamParams

CHOICES = [{}, {"lora": Lora(rank=4)}, {"trainable_layers": 1}]
IDS = torch.tensor([[3, 8, 9, 10, 4, 7, 7, 2]])


def trained(folder, **choices):
    """Return a student two steps away from its base."""
    loaded = load_student(StudentConfig(model=str(folder), **choices), 0)
    trainer = LocalTrainer(loaded.language_model)
    for step in range(2):
        trainer.forward_backward(toy_data(folder), Objective(), step)
        assert trainer.optim_step(AdamParams(0.05))["skipped"] == 0
    loaded.language_model.model.eval()
    return loaded


def folder_with_own_head(folder):
    """Return a folder with its own head although its config ties it, as merged adapters leave."""
    model_folder(folder)
    head = torch.randn(TOKENS, 32, generator=torch.Generator().manual_seed(0)) / 4
    change_weights(folder, lambda weights: weights.update({"lm_head.weight": head}))
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    return folder


@torch.no_grad()
def logits(model):
    return model(IDS).logits.float()


@pytest.mark.parametrize("architecture", in_check(ARCHITECTURES, "llama"))
@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_transformers_loads_an_export_with_the_logits_of_the_student(
    tmp_path, architecture, choices
):
    folder = model_folder(tmp_path / "base", architecture=architecture, padded_vocabulary=24)
    loaded = trained(folder, **choices)
    export(loaded, tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert plain.dtype == torch.float32
    found, expected = logits(plain), logits(loaded.language_model.model)
    base = logits(AutoModelForCausalLM.from_pretrained(folder))
    assert (base - expected).abs().max() > 1e-3
    assert (found - expected).abs().max() <= (1e-5 if "lora" in choices else 0)
    assert plain.config.vocab_size == 24
    assert (
        plain.generation_config.eos_token_id
        == AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_a_head_of_its_own_is_exported_whatever_the_config_says(tmp_path, choices, dtype):
    folder = folder_with_own_head(tmp_path / "base")
    loaded = trained(folder, dtype=dtype, **choices)
    export(loaded, tmp_path / "out")
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    # The student's config is not changed by its export.
    assert loaded.language_model.model.config.tie_word_embeddings
    if dtype == "float32":
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
        difference = logits(plain) - logits(loaded.language_model.model)
        assert difference.abs().max() <= (1e-5 if "lora" in choices else 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_an_export_that_is_another_model_is_refused(tmp_path, monkeypatch, choices, dtype):
    """Check that a lost head is found, as in a tied copy of the model."""
    loaded = trained(folder_with_own_head(tmp_path / "base"), dtype=dtype, **choices)
    write = exporting._write_model

    def write_tied(model, folder):
        write(model, folder)
        change_weights(folder, lambda weights: weights.pop("lm_head.weight"))
        change_json(folder / "config.json", tie_word_embeddings=True)

    monkeypatch.setattr(exporting, "_write_model", write_tied)
    with pytest.raises(
        ModelError, match=r"out: not exported.* is not the trained student"
    ) as error:
        export(loaded, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_an_adapter_of_another_scale_is_refused(tmp_path, monkeypatch):
    loaded = trained(model_folder(tmp_path / "base"), lora=Lora(rank=4))
    write = exporting.write_adapter

    def write_halved(model, base, folder):
        write(model, base, folder)
        settings = folder / "adapter_config.json"
        change_json(settings, lora_alpha=json.loads(settings.read_text())["lora_alpha"] / 2)

    export(loaded, tmp_path / "right", adapter=True)
    monkeypatch.setattr(exporting, "write_adapter", write_halved)
    with pytest.raises(ModelError, match="is not the trained student"):
        export(loaded, tmp_path / "out", adapter=True)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_changed_on_the_way_is_refused(tmp_path, monkeypatch):
    loaded = trained(model_folder(tmp_path / "base"))
    changed = copy.deepcopy(loaded.renderer.tokenizer)
    changed.add_tokens(["quick"])
    monkeypatch.setattr(exporting, "_copy_tokenizer", lambda loaded: changed)
    with pytest.raises(ModelError, match="the written tokenizer is not the student's"):
        export(loaded, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), SafetensorError("I/O error: no space (os error 28)")],
    ids=["python", "safetensors"],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, error):
    loaded = trained(model_folder(tmp_path / "base"))

    def fail(*arguments, **settings):
        raise error

    monkeypatch.setattr(type(loaded.language_model.model), "save_pretrained", fail)
    with pytest.raises(
        ResourceError, match=r"out: cannot be written .*[Nn]o space.*nothing of it was kept"
    ):
        export(loaded, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_folder_where_nobody_may_write_is_one_line(tmp_path):
    loaded = trained(model_folder(tmp_path / "base"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot be written"):
        export(loaded, tmp_path / "file" / "out")


def test_a_model_with_its_own_code_is_exported_with_the_code(tmp_path):
    folder = model_folder(tmp_path / "base")
    code = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class Own(LlamaForCausalLM):
    config_class = OwnConfig
"""
    (folder / "modeling_own.py").write_text(code)
    names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    change_json(
        folder / "config.json", architectures=["Own"], model_type="own_llama", auto_map=names
    )
    config = StudentConfig(model=str(folder), trust_remote_code=True)
    export(load_student(config, 0), tmp_path / "out")
    assert (tmp_path / "out" / "modeling_own.py").read_text() == code


def test_an_export_is_read_once_and_both_waits_are_shown(tmp_path, monkeypatch):
    loaded = trained(model_folder(tmp_path / "base"))
    reads, waits = [], []
    read = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM,
        "from_pretrained",
        lambda *arguments, **settings: reads.append(arguments) or read(*arguments, **settings),
    )
    with display_waits(lambda wait: waits.append(wait.path)):
        export(loaded, tmp_path / "out")
    assert len(reads) == 1
    writing = "writing the model folder out"
    assert {writing, f"{writing}: reading it again to compare it with the student"} <= set(waits)


def test_an_export_does_not_name_how_it_was_read_here(tmp_path):
    export(trained(model_folder(tmp_path / "base")), tmp_path / "out")
    assert not [
        path.name
        for path in (tmp_path / "out").glob("*.json")
        if "practicum" in path.read_text("utf-8")
    ]


def test_the_tokenizer_comes_along(tmp_path):
    loaded = trained(model_folder(tmp_path / "base"))
    export(loaded, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.get_vocab() == loaded.renderer.tokenizer.get_vocab()
    assert tokenizer.chat_template == loaded.renderer.tokenizer.chat_template


@pytest.mark.parametrize("choices", [{}, {"lora": Lora(rank=4)}], ids=str)
def test_an_export_loads_here_as_well(tmp_path, choices):
    loaded = trained(model_folder(tmp_path / "base"), **choices)
    export(loaded, tmp_path / "out")
    again = load(ModelConfig(model=str(tmp_path / "out")))
    torch.testing.assert_close(
        logits(again.language_model.model),
        logits(loaded.language_model.model),
        rtol=1e-5,
        atol=1e-5,
    )
    assert again.renderer.stop_ids == loaded.renderer.stop_ids


def test_bfloat16_adapters_merge_into_the_base(tmp_path):
    loaded = trained(model_folder(tmp_path / "base"), lora=Lora(rank=4), dtype="bfloat16")
    export(loaded, tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert plain.dtype == torch.bfloat16
    assert (logits(plain) - logits(loaded.language_model.model.bfloat16())).abs().max() < 0.1


def test_merge_adapters_have_the_names_of_the_base(tmp_path):
    folder = model_folder(tmp_path / "base")
    names = set(AutoModelForCausalLM.from_pretrained(folder).state_dict())
    assert set(merge_adapters(trained(folder, lora=Lora(rank=2)).language_model.model)) == names


def test_merging_leaves_the_student_as_it_is(tmp_path):
    loaded = trained(model_folder(tmp_path / "base"), lora=Lora(rank=4))
    before = {
        name: value.clone() for name, value in loaded.language_model.model.state_dict().items()
    }
    export(loaded, tmp_path / "out")
    after = loaded.language_model.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_nothing_else_is_left_beside_an_export(tmp_path):
    loaded = trained(model_folder(tmp_path / "base"))
    export(loaded, tmp_path / "deep" / "out")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]
    assert not list((tmp_path / "deep" / "out").glob("*.bin"))


def test_an_export_overwrites_nothing(tmp_path):
    loaded = trained(model_folder(tmp_path / "base"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    with pytest.raises(
        ResourceError, match=r"out exists and is not empty; export to another folder"
    ):
        export(loaded, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out"]
