"""Faults of a model folder are reported before training starts; valid folders load unchanged."""

import json
import os
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from statistics import fmean

import pytest
import torch
from extras import write_gguf
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from toy import in_check
from transformers import AutoModelForCausalLM, AutoTokenizer, BartConfig, BartForCausalLM

from backends.folders import ALPHABET, TOKENS, change_json, change_weights, model_folder
from backends.tiny import ARCHITECTURES
from backends.toys import toy_data
from practicum.backends.local import language_model, scratch
from practicum.backends.local.loading import load, load_student
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.scratch import (
    build_scratch_model,
    list_lessons,
    prepare_scratch_folder,
)
from practicum.backends.local.trainer import LocalTrainer
from practicum.errors import DataError, ModelError
from practicum.models.config import Lora, ModelConfig, PretrainConfig, ScratchConfig, StudentConfig
from practicum.models.sources import (
    locate,
    locate_cache,
    needs_conversion,
)
from practicum.objective import Objective
from practicum.ports import AdamParams, TaskContext
from practicum.recipe import read_recipe
from practicum.rows import PromptSet
from practicum.tasks import reverse, walker
from practicum.teachers.model import compute_fingerprint
from practicum.types import Message, Prompt, SampleRequest, SamplingParams


@pytest.fixture
def folder(tmp_path):
    return model_folder(tmp_path / "model")


def student(folder, seed: int = 0, **choices):
    return load_student(StudentConfig(model=str(folder), **choices), seed)


@pytest.mark.parametrize("architecture", in_check(ARCHITECTURES, "llama"))
def test_a_folder_loads_as_transformers_loads_it(tmp_path, architecture):
    folder = model_folder(tmp_path / "model", architecture=architecture, padded_vocabulary=24)
    loaded = load(ModelConfig(model=str(folder)))
    plain = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[3, 8, 9, 10, 4]])
    with torch.no_grad():
        found = loaded.language_model.head().logprobs(
            loaded.language_model.body(ids, torch.ones_like(ids).bool())
        )
        expected = torch.log_softmax(plain(ids).logits[..., :TOKENS], dim=-1)
    torch.testing.assert_close(found, expected)
    assert loaded.language_model.vocab_size == TOKENS
    assert loaded.language_model.trainable_parameters() == {}
    assert not loaded.language_model.model.training
    assert loaded.source == str(folder)
    assert loaded.renderer.stop_ids == {2}


def test_all_stop_tokens_are_united(folder):
    change_json(folder / "generation_config.json", eos_token_id=[2, 9])
    assert load(ModelConfig(model=str(folder), stop=("a",))).renderer.stop_ids == {2, 9, 7}


def test_a_named_stop_token_serves_where_the_model_has_none(folder):
    change_json(folder / "generation_config.json", eos_token_id=None)
    change_json(folder / "config.json", eos_token_id=None)
    change_json(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ModelError, match="no end-of-sequence token is known"):
        load(ModelConfig(model=str(folder)))
    assert load(ModelConfig(model=str(folder), stop=("a",))).renderer.stop_ids == {7}


def refused(folder, message: str, **choices) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load(ModelConfig(model=str(folder), **choices))
    assert len(str(caught.value).splitlines()) == 1


def test_a_folder_without_config_is_no_model(tmp_path):
    refused(
        tmp_path,
        "no config.json, so this is not a model folder; point to one that save_pretrained wrote",
    )


@pytest.mark.parametrize("text", ['{"model_type": ', "", "\x00\x01"])
def test_a_config_that_is_not_json(folder, text):
    (folder / "config.json").write_text(text)
    refused(folder, r"config.json: not JSON \(.*\); copy the file again")


def test_a_config_that_is_not_a_mapping(folder):
    (folder / "config.json").write_text("[1, 2]")
    refused(folder, r"config.json: not a mapping of names to values")


def test_a_config_of_an_unknown_architecture(folder):
    change_json(folder / "config.json", model_type="xyzzy", architectures=["Xyzzy"])
    refused(folder, "config.json is missing or cannot be used .* model type `xyzzy`")


@pytest.mark.parametrize(
    "changes", [{"hidden_size": "x"}, {"num_attention_heads": 0}, {"hidden_size": -5}], ids=str
)
def test_a_config_that_makes_no_sense(folder, changes):
    change_json(folder / "config.json", **changes)
    refused(folder, r"config.json is missing or cannot be used \(.+\)")


def test_an_encoder_decoder_model_is_refused(folder):
    change_json(folder / "config.json", model_type="bart", is_encoder_decoder=True)
    refused(folder, "'bart' is an encoder-decoder model .* which is not supported")


def test_an_encoder_decoder_model_by_its_class_is_refused(folder):
    settings = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(settings))
    refused(folder, "'t5' is an encoder-decoder model")


def test_a_decoder_saved_without_its_encoder_is_refused_in_one_line(folder):
    settings = {"vocab_size": 300, "d_model": 16, "max_position_embeddings": 64}
    # Its cache has as many layers as the encoder that was left out.
    sizes = {"encoder_layers": 1, "decoder_layers": 2}
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 16)
    torch.manual_seed(0)
    BartForCausalLM(BartConfig(**settings, **sizes)).save_pretrained(folder)
    refused(folder, r"BartForCausalLM fails on a short text \(list index out of range\)")


def test_generation_settings_that_are_not_json(folder):
    (folder / "generation_config.json").write_text("{")
    refused(folder, "generation_config.json: not JSON")


def test_what_is_refused_is_said_in_one_line_and_nowhere_else(folder, capfd):
    change_json(folder / "config.json", intermediate_size=64)
    refused(folder, "another shape")
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    refused(
        folder,
        r"only pickle weights \(pytorch_model.bin\), which can run code when read; convert them to safe",
    )


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "no weights; convert them to safetensors with save_pretrained")


def test_a_folder_without_a_vocabulary(folder):
    """transformers invents a tokenizer from the model's type, also next to a tokenizer's settings."""
    (folder / "tokenizer.json").unlink()
    for missing in ("tokenizer_config.json", "special_tokens_map.json"):
        refused(folder, r"no tokenizer \(tokenizer.json, or a vocabulary such as tokenizer.model\)")
        (folder / missing).unlink(missing_ok=True)
    with pytest.raises(ModelError, match="no tokenizer"):
        locate(ModelConfig(model=str(folder)), needs_weights=False)


@pytest.mark.parametrize("names", ["modeling_evil.Evil", ["modeling_evil.Evil", None]])
def test_code_of_a_model_folder_does_not_run(folder, names):
    change_json(folder / "config.json", auto_map={"AutoModelForCausalLM": names})
    (folder / "modeling_evil.py").write_text("raise SystemExit('ran')")
    refused(
        folder,
        r"brings its own code \(modeling_evil.py\), which is not run; read it, then write trust_remote_code",
    )


def test_a_missing_shard(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert load(ModelConfig(model=str(folder))).language_model.vocab_size == TOKENS
    shards = sorted(folder.glob("model-*.safetensors"))
    shards[1].unlink()
    refused(
        folder, rf"1 of {len(shards)} weight files are missing \({shards[1].name}\); copy them too"
    )


def test_an_index_that_is_not_json(folder):
    (folder / "model.safetensors.index.json").write_text("{")
    refused(folder, "model.safetensors.index.json: not JSON")


def test_weights_cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(folder, "the weights could not be loaded")


def test_a_header_that_claims_too_much(folder):
    (folder / "model.safetensors").write_bytes((2**40).to_bytes(8, "little") + b"{}")
    refused(folder, "the weights could not be loaded")


def test_weights_of_another_shape(folder):
    change_json(folder / "config.json", intermediate_size=64)
    refused(
        folder,
        "0 weights are missing and 6 have another shape than config.json says "
        r"\(first: model.layers.0.mlp.down_proj.weight\); the files do not belong together",
    )


def test_missing_weights(folder):
    change_weights(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    refused(
        folder,
        r"1 weights are missing .* \(first: model.layers.1.mlp.up_proj.weight\); the files do not belong",
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_weights_that_are_not_finite(folder, name, value):
    def spoil(weights):
        weights[name][-1, -1] = value

    change_weights(folder, spoil)
    refused(
        folder, f"weight {name} holds NaN or infinite values; download or convert the model again"
    )


def test_more_tokens_than_rows(folder):
    def cut(weights):
        weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:11].clone()

    change_weights(folder, cut)
    change_json(folder / "config.json", vocab_size=11)
    refused(
        folder,
        "the tokenizer has 15 tokens but the embedding has 11 rows; use the tokenizer that belongs",
    )


def add_token(folder: Path, content: str, number: int) -> None:
    """Add a special token to a model folder's tokenizer, as a family with pictures has it."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"].append({"id": number, "content": content, "special": True, **flags})
    path.write_text(json.dumps(tokenizer))


def test_a_picture_token_without_a_row_is_left_out(folder, tmp_path, caplog):
    """Text-only Gemma 3 has the tokenizer of the family, with one token more than the embedding has rows."""
    plain = load(ModelConfig(model=str(folder)))
    prompt = [Message("user", "abc<image_soft_token>")]
    tokens = plain.renderer.render(prompt)
    add_token(folder, "<image_soft_token>", plain.language_model.vocab_size)
    refused(folder, "the tokenizer has 16 tokens but the embedding has 15 rows")
    change_json(folder / "tokenizer_config.json", image_token="<image_soft_token>")
    with caplog.at_level("INFO"):
        loaded = load(ModelConfig(model=str(folder)))
    assert "left out <image_soft_token>, which have no row in the embedding" in caplog.text
    assert loaded.language_model.vocab_size == loaded.renderer.vocab_size == 15
    assert loaded.renderer.tokenizer.get_vocab() == plain.renderer.tokenizer.get_vocab()
    assert loaded.renderer.render(prompt) == tokens
    loaded.renderer.save(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved.get_vocab() == plain.renderer.tokenizer.get_vocab()


def test_a_tokenizer_that_is_not_json(folder):
    (folder / "tokenizer.json").write_text("{")
    refused(folder, r"tokenizer.json: not JSON .*copy the file again")


@pytest.mark.parametrize("name", ["smollm", "./nowhere", "/no/where", "~/no/where", "a/b/c"])
def test_an_unknown_name(name):
    refused(
        name,
        r"it is not a folder or a GGUF file, not a hub name such as .*, and not one of the packaged models \(smollm2-135m",
    )


def test_a_stop_token_that_is_none(folder):
    refused(
        folder,
        "stop token 'END' is not in the vocabulary; write a token, not a text",
        stop=("END",),
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_that_is_not_there(folder):
    refused(
        folder,
        "device is 'cuda', but no CUDA device is available; set device: auto or cpu",
        device="cuda",
    )


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has MPS")
def test_mps_that_is_not_there(folder):
    refused(
        folder,
        "device is 'mps', but this torch or this machine has no MPS; set device: auto or cpu",
        device="mps",
    )


def test_an_operation_that_mps_lacks_is_no_mistake_of_the_sizes(folder, monkeypatch):
    def fail(_: object) -> None:
        raise NotImplementedError(
            "The operator 'aten::erfc' is not currently implemented for the MPS device."
        )

    monkeypatch.setattr(language_model.LanguageModel, "check_split", fail)
    refused(folder, "device is 'mps', and this torch has no aten::erfc there; set device: cpu")


@pytest.mark.long
def test_a_hub_name_without_network_fails_quickly():
    code = (
        "from practicum.backends.local.loading import load\n"
        "from practicum.errors import ModelError\n"
        "from practicum.models.config import ModelConfig\n"
        "try:\n    load(ModelConfig(model='nobody/nothing'))\n"
        "except ModelError as error:\n    print('ModelError', error)\n"
    )
    start = time.monotonic()
    child = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stdout.startswith(
        "ModelError nobody/nothing: no folder, and the hub gave no config.json of nobody/nothing ("
    )
    assert len(child.stdout.splitlines()) == 1
    assert time.monotonic() - start < 60


def test_a_student_learns_whole(folder):
    model = student(folder).language_model.model
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_student_may_learn_in_its_last_layers_only(folder):
    language_model = student(folder, trainable_layers=1).language_model
    assert language_model.trainable_parameters()
    assert all(".layers.1." in name for name in language_model.trainable_parameters())


def test_more_layers_than_there_are(folder):
    with pytest.raises(ModelError, match=r"student.trainable_layers is 3, but .* has 2 layers"):
        student(folder, trainable_layers=3)


@pytest.mark.parametrize("choices", [{}, {"lora": Lora(rank=2)}, {"trainable_layers": 1}], ids=str)
def test_what_learns_is_float32_and_the_rest_as_asked(folder, choices):
    language_model = student(folder, dtype="bfloat16", **choices).language_model
    assert {value.dtype for value in language_model.trainable_parameters().values()} == {
        torch.float32
    }
    frozen = {value.dtype for value in language_model.model.parameters() if not value.requires_grad}
    assert frozen == ({torch.bfloat16} if choices else set())
    trainer = LocalTrainer(language_model)
    assert "nonfinite" not in trainer.forward_backward(toy_data(folder), Objective(), 0).metrics
    assert trainer.optim_step(AdamParams(0.01))["skipped"] == 0


@pytest.mark.parametrize("architecture", in_check(ARCHITECTURES, "llama"))
def test_a_fresh_lora_student_is_exactly_its_base(tmp_path, architecture):
    folder = model_folder(tmp_path / "model", architecture=architecture)
    ids = torch.tensor([[3, 8, 9, 10, 4]])
    with torch.no_grad():
        base = load(ModelConfig(model=str(folder))).language_model.model(ids).logits
        adapted = student(folder, lora=Lora(rank=4)).language_model.model(ids).logits
    assert torch.equal(base, adapted)


def test_lora_trains_its_adapters_and_nothing_else(folder):
    language_model = student(folder, lora=Lora(rank=4)).language_model
    before = {
        name: value.detach().clone() for name, value in language_model.model.named_parameters()
    }
    trainer = LocalTrainer(language_model)
    for step in range(2):
        trainer.forward_backward(toy_data(folder), Objective(), step)
        trainer.optim_step(AdamParams(0.01))
    moved = {
        name
        for name, value in language_model.model.named_parameters()
        if not torch.equal(value, before[name])
    }
    assert moved == set(language_model.trainable_parameters())
    assert all(".lora_A." in name or ".lora_B." in name for name in moved)
    projections = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in moved}
    assert projections == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    assert len(moved) == 2 * 7 * 2


def test_lora_may_adapt_the_last_layers_only(folder):
    names = set(
        student(folder, lora=Lora(rank=2), trainable_layers=1).language_model.trainable_parameters()
    )
    assert len(names) == 7 * 2
    assert all(".layers.1." in name for name in names)


def test_adapters_are_seeded_and_leave_the_random_numbers_alone(folder):
    state = torch.get_rng_state()
    one, same, other = (
        student(folder, seed, lora=Lora(rank=2)).language_model.trainable_parameters()
        for seed in (1, 1, 2)
    )
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, same[name]) for name, value in one.items())
    assert any(not torch.equal(value, other[name]) for name, value in one.items())


def test_scratch_models_are_seeded(tmp_path):
    one, same, other = (
        model_folder(tmp_path / str(n), seed=seed) for n, seed in enumerate((1, 1, 2))
    )
    weights = [(folder / "model.safetensors").read_bytes() for folder in (one, same, other)]
    assert weights[0] == weights[1] != weights[2]


def test_pretraining_teaches_the_responses_or_else_the_answers(tmp_path):
    prompts = [
        Prompt(
            str(n),
            (Message("user", letter),),
            answer=letter * (1 + n % 2),
            response=None if n % 2 else letter * 2,
        )
        for n, letter in enumerate(ALPHABET)
    ]
    settings = ScratchConfig(
        hidden_size=32,
        layers=1,
        heads=2,
        pretrain=PretrainConfig(steps=60, batch=8, learning_rate=0.01),
    )
    build_scratch_model(tmp_path / "model", settings, ALPHABET, prompts)
    loaded = load(ModelConfig(model=str(tmp_path / "model")))
    requests = [SampleRequest(loaded.renderer.render(prompt.messages), 0) for prompt in prompts]
    params = SamplingParams(5, temperature=0.0, stop_ids=loaded.renderer.stop_ids)
    samples = LocalSampler(loaded.language_model).sample(requests, params)
    right = [
        loaded.renderer.decode(s.tokens.tolist()) == p.question * 2
        for s, p in zip(samples, prompts, strict=True)
    ]
    assert sum(right) >= 7


def test_pretraining_can_ask_another_question_in_the_template_of_the_recipe(tmp_path):
    """The weights depend on the passage and on the template, and not on the document."""
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

    def teach(
        question: str | None, document: str, template: str | None = None
    ) -> dict[str, torch.Tensor]:
        pretrain = PretrainConfig(steps=2, batch=2, question=question)
        config = ScratchConfig(hidden_size=16, layers=1, heads=2, pretrain=pretrain)
        passage = {"passage": "b" * document.count("b")}
        train = [Prompt("0", (Message("user", document),), answer="a", privileged=passage)]
        task = PromptSet(train, [Prompt("1", (Message("user", ALPHABET),))])
        folder = prepare_scratch_folder(tmp_path / str(next(numbers)), config, task, template)
        return load_file(folder / "model.safetensors")

    def is_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(first[name], second[name]) for name in first)

    numbers = count()
    short = teach("{passage}", "cbc")
    assert is_equal(short, teach("{passage}", "dbdd")) and is_equal(short, teach(None, "b"))
    assert not is_equal(short, teach("{passage}", "cbbc"))
    assert not is_equal(short, teach(None, "cbc"))
    assert not is_equal(short, teach("{passage}", "cbc", template))
    with pytest.raises(DataError, match="prompt '0' has no field 'hint'; its fields are question,"):
        teach("{hint}", "cbc")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_pretraining_can_end_at_a_loss(tmp_path, seed):
    prompts = [
        Prompt(str(n), (Message("user", letter),), answer=letter * 2)
        for n, letter in enumerate(ALPHABET)
    ]

    def measure_loss(loss: float | None) -> float:
        folder = tmp_path / str(loss)
        pretrain = PretrainConfig(steps=100, batch=8, learning_rate=0.01, loss=loss)
        shape = {"hidden_size": 32, "layers": 1, "heads": 2}
        config = ScratchConfig(**shape, seed=seed, pretrain=pretrain)
        build_scratch_model(folder, config, ALPHABET, prompts)
        loaded = load(ModelConfig(model=str(folder)))
        stop = min(loaded.renderer.stop_ids)
        losses = []
        for prompt in prompts:
            context = loaded.renderer.render(prompt.messages)
            answer = [*loaded.renderer.encode(prompt.answer), stop]
            logits = loaded.language_model.model(torch.tensor([[*context, *answer]])).logits[0]
            losses.append(cross_entropy(logits[len(context) - 1 : -1], torch.tensor(answer)).item())
        return fmean(losses)

    ended, complete = measure_loss(1.0), measure_loss(None)
    assert 0.4 < ended < 1.0 and complete < 0.2
    with pytest.raises(DataError, match=r"mean loss of the last 10 of 100 steps is 0\.\d+; set a"):
        measure_loss(1e-6)
    assert not (tmp_path / "1e-06").exists()


def test_pretraining_without_answers_is_refused(tmp_path):
    with pytest.raises(DataError, match="no training prompt has an answer to learn"):
        model_folder(tmp_path / "model", pretrain=PretrainConfig(steps=1))


def test_of_a_task_that_answers_back_the_turns_of_its_expert_are_learned_first(tmp_path):
    """The lessons are a conversation about each prompt, as the environment holds it."""
    config = walker.Config(turns=3, train_size=8, heldout_size=2)
    task = walker.build(config, TaskContext(0, tmp_path))
    lessons = list_lessons(task, seed=5)
    assert len(lessons) == 3 * 8 and lessons == list_lessons(task, seed=5)
    assert lessons != list_lessons(task, seed=6), "the expert slips by the seed"
    for prompt, *turns in zip(
        task.train_prompts(), *(lessons[place::3] for place in range(3)), strict=True
    ):
        episode, spoken = task.open(prompt, 0), list(prompt.messages)
        for turn in turns:
            assert turn.id == prompt.id and list(turn.messages) == spoken
            assert turn.answer in walker.ACTIONS
            reply = episode.step(turn.answer).message
            spoken += [Message("assistant", turn.answer), *([reply] if reply else [])]
        assert reply is None, "the conversation is whole"
    plain = reverse.build(reverse.Config(), TaskContext(0, tmp_path))
    assert list_lessons(plain, seed=5) == plain.train_prompts()


def test_a_conversation_with_an_expert_that_does_not_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "MAX_TURNS", 2)
    config = walker.Config(turns=3, train_size=8, heldout_size=2)
    with pytest.raises(DataError, match=r"not ended after 2 turns; set pretrain: \{steps: 0\}"):
        list_lessons(walker.build(config, TaskContext(0, tmp_path)), seed=5)


def test_a_from_scratch_model_is_found_where_it_was_made(tmp_path):
    assert locate(ModelConfig(model=ScratchConfig()), tmp_path) == str(tmp_path)


def test_a_gguf_file_is_a_model_that_is_converted_once(tmp_path, monkeypatch, capfd):
    pytest.importorskip("gguf")
    monkeypatch.setenv("PRACTICUM_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "recipe.yaml").write_text("student: {model: tiny.gguf}\nteacher: tiny.gguf\n")
    recipe = read_recipe(tmp_path / "recipe.yaml")
    config = ModelConfig(model=recipe["student"]["model"])
    assert recipe["teacher"]["model"] == config.model == str(tmp_path / "tiny.gguf")
    assert needs_conversion(config.model)
    folder = locate(config)
    assert "GGUF tensors" not in capfd.readouterr().err, "no bar of transformers"
    made = (Path(folder) / "model.safetensors").stat().st_mtime_ns
    assert load(config).source == folder == locate(config) and not needs_conversion(config.model)
    assert (Path(folder) / "model.safetensors").stat().st_mtime_ns == made
    write_gguf(tmp_path / "other.gguf", seed=1)
    other = ModelConfig(model=str(tmp_path / "other.gguf"))
    assert compute_fingerprint(other) != compute_fingerprint(config)


def test_the_cache_is_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("PRACTICUM_CACHE", "/a")
    assert str(locate_cache()) == "/a"
    monkeypatch.delenv("PRACTICUM_CACHE")
    assert str(locate_cache()) == "/b/practicum"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert str(locate_cache()) == "/c/.cache/practicum"


def test_a_model_whose_own_code_fails_is_refused_in_one_line(folder, monkeypatch):
    def forward(self, **inputs):
        raise RuntimeError("The size of tensor a (8) must match the size of tensor b (4)\nat 3")

    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", forward)
    with pytest.raises(ModelError) as caught:
        load(ModelConfig(model=str(folder)))
    message = str(caught.value)
    assert message.startswith(
        f"{folder}: LlamaForCausalLM fails on a short text (The size of tensor"
    )
    assert message.endswith("check the sizes in config.json, or use another architecture")
    assert "\n" not in message
