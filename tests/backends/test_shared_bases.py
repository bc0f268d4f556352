"""Adapters with a shared base give, bit for bit, the results of merged adapters, and the base is in memory once."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from practicum.backends.local import Config
from practicum.backends.local.backend import LocalBackend
from practicum.errors import ModelError
from practicum.models.config import ScorerConfig
from practicum.objective import Full
from practicum.ports import BackendContext, Model, SampleRequest
from practicum.types import SamplingParams, ScoreRequest

from .folders import change_json, model_folder

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
"""peft calls a name that transformers has deprecated."""

REQUESTS = [ScoreRequest((3, 4, 5), (6, 7, 8, 9)), ScoreRequest((5,), (4,))]
COUNT = 4

VARIANTS: dict[str, dict[str, Any]] = {
    "maps": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True},
    "a separate head": {"target_modules": ["v_proj", "lm_head"]},
    "magnitudes": {"target_modules": ["v_proj"], "use_dora": True},
}


def write_adapter(folder: Path, base: Path, seed: int, **settings: Any) -> Path:
    """Write an adapter folder with peft itself."""
    torch.manual_seed(seed)
    choices = {"r": 2, "lora_alpha": 8, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    config = LoraConfig(**{**choices, "target_modules": ["q_proj", "down_proj"], **settings})
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(
        folder, save_embedding_layers=False
    )
    return folder


def untie_head(folder: Path) -> None:
    """Give the model a head that is not its embedding, so that an adapter may change only the head."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file(
        weights | {"lm_head.weight": weights["model.embed_tokens.weight"] * 2},
        path,
        {"format": "pt"},
    )
    change_json(folder / "config.json", tie_word_embeddings=False)


@pytest.fixture
def load(tmp_path: Path) -> Callable[[Path, str], Model]:
    """Load models into one backend, as the members of a route are."""

    def refuse(*_: object) -> Any:
        raise AssertionError("models that are named need neither a task nor a local twin")

    backend = LocalBackend(Config(), BackendContext(0, tmp_path, refuse, refuse))
    return lambda folder, residency: backend.load_scorer(
        ScorerConfig.model_validate({"model": str(folder), "residency": residency}), folder.name
    )


def count_weights() -> int:
    """Return the bytes of all live parameters, each storage once."""
    gc.collect()
    weights = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Parameter)]
    storages = [weight.untyped_storage() for weight in weights if weight.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_answer_is_that_of_the_merged_model(
    tmp_path: Path, load: Callable[[Path, str], Model], variant: str
) -> None:
    base = model_folder(tmp_path / "base")
    untie_head(base)
    folders = [
        write_adapter(tmp_path / str(seed), base, seed, **VARIANTS[variant]) for seed in (1, 2)
    ]
    shared = [load(folder, "shared") for folder in [*folders, base]]
    for folder, one in zip([*folders, base], shared, strict=True):
        merged = load(folder, "resident")
        for answer, twin in zip(
            one.client.score(REQUESTS, Full()), merged.client.score(REQUESTS, Full()), strict=True
        ):
            assert answer.hidden.equal(twin.hidden)
            assert answer.head.logprobs(answer.hidden).equal(twin.head.logprobs(twin.hidden))
        wrote, twin_wrote = (
            model.client.sample([SampleRequest((3, 4), 7)], SamplingParams(6))[0]
            for model in (one, merged)
        )
        assert wrote.tokens.equal(twin_wrote.tokens)
    first, second, plain = (model.client.score(REQUESTS, Full())[0].hidden for model in shared)
    assert not first.equal(second) and not first.equal(plain)


def test_several_adapters_keep_one_base(tmp_path: Path, load: Callable[[Path, str], Model]) -> None:
    base = model_folder(tmp_path / "base", hidden_size=64)
    folders = [write_adapter(tmp_path / str(seed), base, seed) for seed in range(COUNT)]
    before = count_weights()
    alone = load(base, "shared")
    one = count_weights() - before
    teachers = [load(folder, "shared") for folder in folders]
    answers = [teacher.client.score(REQUESTS, Full()) for teacher in teachers]
    assert one > 0
    assert count_weights() - before == one
    assert len(answers) == COUNT and alone.client is not teachers[0].client


def test_an_adapter_that_cannot_be_used_is_refused_when_it_is_loaded(
    tmp_path: Path, load: Callable[[Path, str], Model]
) -> None:
    base = model_folder(tmp_path / "base")
    folder = write_adapter(tmp_path / "adapter", base, 0)
    change_json(folder / "adapter_config.json", r=3)
    with pytest.raises(ModelError, match="could not be loaded into its base"):
        load(folder, "shared")
