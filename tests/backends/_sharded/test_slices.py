"""A model that each rank reads by slices equals the model that one process reads completely."""

import string
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from backends.rank_forks import run_ranks
from backends.test_sharded import compare, datums, update
from backends.tiny import ARCHITECTURES, tiny
from practicum.backends._sharded import slices
from practicum.backends._sharded.building import build_sharded_trainer, load_in_shards
from practicum.backends._sharded.sharding import gather_tensor, get_local
from practicum.backends.local.device_limits import TrainerLimits
from practicum.backends.local.graph import measure_activation_bytes
from practicum.backends.local.loading import load_by_role, load_student
from practicum.backends.local.trainer import LocalTrainer
from practicum.errors import ModelError
from practicum.losses.passes import count_tokens
from practicum.models.config import Lora, ModelConfig, StudentConfig
from practicum.text import build_character_tokenizer

ALPHABET = string.ascii_letters + "01234"
"""With the special tokens, as many as the tiny models have."""


def write_folder(folder: Path, model: Any, **saving: Any) -> Path:
    model.save_pretrained(folder, **saving)
    build_character_tokenizer(ALPHABET).save_pretrained(folder)
    return folder


def read_all(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: gather_tensor(tensor).clone()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


STUDENTS = [
    {},
    {"dtype": "bfloat16"},
    {"trainable_layers": 1},
    {"lora": Lora(rank=2), "dtype": "bfloat16"},
]


@pytest.mark.long
def test_every_weight_and_limit_is_that_of_the_whole_model(tmp_path: Path) -> None:
    folders = [write_folder(tmp_path / name, tiny(name).model) for name in ARCHITECTURES]
    # Several files, and names without the prefix of the class.
    folders.append(write_folder(tmp_path / "parts", tiny().model, max_shard_size="20KB"))
    assert len(list(folders[-1].glob("*.safetensors"))) > 1
    configs: list[ModelConfig] = [StudentConfig(model=str(folder)) for folder in folders]
    configs += [StudentConfig(model=str(folders[1]), **settings) for settings in STUDENTS[1:]]
    configs.append(ModelConfig(model=str(folders[0])))

    def work(rank: int) -> list[dict[str, Any]]:
        found = []
        for config in configs:
            loaded, sharded = load_in_shards(config, seed=3)
            model = loaded.language_model
            with sharded.open():
                activation_bytes = measure_activation_bytes(model)
            found.append(
                {
                    "weights": read_all(model.model),
                    "trainable": [*model.trainable_parameters()],
                    "packed": model.max_packed_tokens,
                    "dtypes": {n: p.dtype for n, p in model.model.named_parameters()},
                    "bytes": activation_bytes,
                    "stops": loaded.renderer.stop_ids,
                }
            )
        return found

    answers = run_ranks(tmp_path / "ranks", 2, work)
    for place, config in enumerate(configs):
        whole = load_by_role(config, 3)
        model = whole.language_model
        for answer in (ranks[place] for ranks in answers):
            expected = read_all(model.model)
            assert answer["weights"].keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(answer["weights"][name], tensor), name
            assert answer["trainable"] == [*model.trainable_parameters()]
            assert answer["packed"] == model.max_packed_tokens > 0
            assert answer["dtypes"] == {n: p.dtype for n, p in model.model.named_parameters()}
            assert answer["stops"] == whole.renderer.stop_ids
            if model.is_exact:
                assert answer["bytes"] == measure_activation_bytes(model)


def is_real(leaf: object) -> bool:
    """Return whether a leaf is a plain tensor with memory; a DTensor's own storage has none, its local rows have."""
    return type(leaf) in (torch.Tensor, torch.nn.Parameter) and not leaf.is_meta  # type: ignore[attr-defined]


class LiveBytes(TorchDispatchMode):
    """Records the peak bytes of live storages; FSDP empties the storages that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.storages: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves(result) if is_real(leaf)]
        new = {leaf.untyped_storage()._cdata: leaf.untyped_storage() for leaf in leaves}
        # Looking at all storages after each small operation would take most of the time.
        if any(storage.nbytes() >= 2048 for storage in new.values()):
            live = {key: storage for key, ref in self.storages.items() if (storage := ref())} | new
            self.storages = {key: weakref.ref(storage) for key, storage in live.items()}
            self.peak = max(self.peak, sum(storage.nbytes() for storage in live.values()))
        else:
            self.storages |= {key: weakref.ref(storage) for key, storage in new.items()}
        return result


@pytest.mark.long
def test_no_rank_holds_more_than_its_shard_one_layer_and_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Any = tiny("qwen3").model.config
    config.num_hidden_layers, config.layer_types = 16, ["full_attention"] * 16
    model = AutoModelForCausalLM.from_config(config)
    folder = write_folder(tmp_path / "model", model)
    read_sizes: list[int] = []
    read = slices._StoredWeight.read

    def count(stored: Any, rows: slice | None = None) -> torch.Tensor:
        tensor = read(stored, rows)
        read_sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(slices._StoredWeight, "read", count)

    def work(rank: int) -> dict[str, int]:
        with LiveBytes() as live:
            loaded, _ = load_in_shards(StudentConfig(model=str(folder)))
        model: Any = loaded.language_model.model
        shard = sum(get_local(weight).nbytes for weight in model.parameters())
        layer = sum(weight.nbytes for weight in model.model.layers[0].parameters())
        outside = model.model.embed_tokens.weight.nbytes + model.lm_head.weight.nbytes
        return {
            "read": sum(read_sizes),
            "peak": live.peak,
            "shard": shard,
            # FSDP gathers into a buffer and copies from it; the buffer lives until the next layer's.
            "most": shard + 3 * layer + 2 * outside,
            "total": sum(weight.nbytes for weight in model.parameters()),
        }

    # The ranks remember that the compiled program computes the twin, which has another size than the model.
    load_student(StudentConfig(model=str(folder)), 0)
    read_sizes.clear()
    answers = run_ranks(tmp_path / "ranks", 3, work)
    assert sum(answer["read"] for answer in answers) == answers[0]["total"]
    for answer in answers:
        assert answer["read"] == answer["shard"] < 0.4 * answer["total"]
        # The trial's activations of some tokens are added.
        assert answer["peak"] < answer["most"] + 40_000 < 0.8 * answer["total"], answer


def test_files_in_another_form_are_read_as_a_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=2,
        num_experts_per_tok=1,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    write_folder(tmp_path / "moe", AutoModelForCausalLM.from_config(config))
    settings = StudentConfig(model=str(tmp_path / "moe"))

    def work(rank: int) -> tuple[str, dict[str, torch.Tensor]]:
        with caplog.at_level("INFO"):
            loaded, _ = load_in_shards(settings)
        return caplog.text, read_all(loaded.language_model.model)

    expected = read_all(load_student(settings, 0).language_model.model)
    for text, weights in run_ranks(tmp_path / "ranks", 2, work):
        assert "loads the whole model" in text
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_a_number_that_is_not_finite_is_refused_by_all_ranks(tmp_path: Path) -> None:
    model: Any = tiny("llama").model
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[47, 3] = float("nan")
    write_folder(tmp_path / "model", model)

    def work(rank: int) -> str:
        with pytest.raises(ModelError) as caught:
            load_in_shards(StudentConfig(model=str(tmp_path / "model")))
        return str(caught.value)

    for text in run_ranks(tmp_path / "ranks", 2, work):
        assert "layers.1.mlp.up_proj.weight holds NaN" in text


def test_a_model_read_by_slices_learns_as_a_whole_one(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", tiny("gemma3").model)
    settings = StudentConfig(model=str(folder))

    def work(rank: int) -> dict[str, Any]:
        _, sharded = load_in_shards(settings)
        # Its passes are planned from the memory of an activation, measured over shards.
        trainer, _ = build_sharded_trainer(sharded, TrainerLimits(chunk_tokens=7, graph_mib=1))
        return update(trainer, datums("gemma3"), {})

    answers = run_ranks(tmp_path / "ranks", 2, work)
    limits = TrainerLimits(-(-count_tokens(datums("gemma3")) // 2), chunk_tokens=7)
    whole = LocalTrainer(load_student(settings, 0).language_model, limits)
    expected = update(whole, datums("gemma3"), {})
    for answer in answers:
        compare(expected, answer)
