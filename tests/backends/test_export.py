"""An exported folder is a plain model folder with the logits of the student."""

import pytest
import torch
from toy import in_check
from transformers import AutoModelForCausalLM, AutoTokenizer

from practicum.backends.local.adapters import merge_adapters
from practicum.backends.local.export import export
from practicum.backends.local.loading import load, load_student
from practicum.backends.local.trainer import LocalTrainer
from practicum.errors import ResourceError
from practicum.models.config import Lora, ModelConfig, StudentConfig
from practicum.objective import Objective
from practicum.ports import AdamParams

from .folders import model_folder
from .tiny import ARCHITECTURES
from .toys import toy_data

IDS = torch.tensor([[3, 8, 9, 10, 4, 7, 7, 2]])


def trained(folder, **choices):
    """A student two steps away from its base."""
    loaded = load_student(StudentConfig(model=str(folder), **choices), 0)
    trainer = LocalTrainer(loaded.language_model)
    for step in range(2):
        trainer.forward_backward(toy_data(folder), Objective(), step)
        assert trainer.optim_step(AdamParams(0.05))["skipped"] == 0
    loaded.language_model.model.eval()
    return loaded


@torch.no_grad()
def logits(model):
    return model(IDS).logits.float()


@pytest.mark.parametrize("architecture", in_check(ARCHITECTURES, "llama"))
@pytest.mark.parametrize("choices", [{}, {"lora": Lora(rank=4)}, {"trainable_layers": 1}], ids=str)
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
