"""Adapters over a base with fewer bits compute and learn what they do over the same base expanded."""

import gc
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor
from toy import assert_same_run, forked, toy_data, toy_recipe, toy_run
from transformers import AutoModelForCausalLM
from vision_checks import get_pictures
from vision_models import build_vision_model

from backends import toys
from backends.folders import change_weights, model_folder
from practicum.backends.local.adapters import is_adapter, merge_adapters
from practicum.backends.local.export import export
from practicum.backends.local.loading import LoadedModel, add_pictures, load, load_student
from practicum.backends.local.packing import compute_hidden_states
from practicum.backends.local.quantising import ROUNDERS, expand_weight, is_packed
from practicum.backends.local.trainer import LocalTrainer
from practicum.errors import ModelError, RecipeError
from practicum.models.config import Lora, ModelConfig, StudentConfig
from practicum.models.quantization import count_weight_bytes
from practicum.objective import Objective, Sampled
from practicum.ports import AdamParams, SampleRequest, SamplingParams, WeightUpdateRule
from practicum.prompts import Message
from practicum.recipe.loader import parse_recipe
from practicum.runs.exporting import export_run
from practicum.runs.identity import warn_of_equal_teacher
from practicum.runs.plan import plan
from practicum.types import ScoreRequest

FORMATS = ("int8", "nf4")
TEXT = ScoreRequest((3, 8, 9, 10), (4, 7, 7, 2, 5, 11))
BITS = {"int8": 8.2, "nf4": 4.2}
"""The most bits per weight of matrices that are 256 wide, with scales and tables."""

PACKED = {"lora": {"rank": 2}, "quantization": "nf4"}
"""Settings of a student or of the model of a learned scorer."""

needs_torchao = pytest.mark.usefixtures("torchao")


@pytest.fixture(scope="module")
def torchao() -> object:
    return pytest.importorskip("torchao")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("base") / "model")


def open_student(folder: Path, name: str | None, **settings) -> LoadedModel:
    """Return a student with adapters that change its answers."""
    config = StudentConfig(
        model=str(folder), lora=Lora(rank=4), quantization=name, device="cpu", **settings
    )
    loaded = load_student(config, 0)
    stream = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in loaded.language_model.trainable_parameters().values():
            weight.add_(0.2 * torch.randn(weight.shape, generator=stream))
    return loaded


def expand(folder: Path, name: str, target: Path) -> Path:
    """Write the folder's model with each linear weight replaced by the product of its rounding and 1."""
    model = load(ModelConfig(model=str(folder), device="cpu")).language_model.model
    layers = dict(model.base_model.named_modules())
    names = [key for key, layer in layers.items() if isinstance(layer, torch.nn.Linear)]

    def change(weights: dict[str, Tensor]) -> None:
        for key in names:
            weight = weights[f"model.{key}.weight"]
            identity = torch.eye(weight.shape[1])
            weights[f"model.{key}.weight"] = torch.nn.functional.linear(
                identity, ROUNDERS[name](weight)
            ).T.contiguous()

    model_folder(target)
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    change_weights(target, change)
    return target


def differentiate(loaded: LoadedModel, folder: Path) -> dict[str, Tensor]:
    trainer = LocalTrainer(loaded.language_model)
    trainer.forward_backward(toys.toy_data(folder), Objective(), 0)
    parameters = loaded.language_model.model.named_parameters()
    return {name: weight.grad for name, weight in parameters if weight.grad is not None}


@torch.no_grad()
def compute_logits(model) -> Tensor:
    return model(torch.tensor([[*TEXT.prompt_tokens, *TEXT.tokens]])).logits.float()


@needs_torchao
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
def test_logits_and_gradients_are_those_of_the_expanded_base(
    folder: Path, tmp_path: Path, name: str, dtype: str
) -> None:
    student = open_student(folder, name, dtype=dtype)
    twin = open_student(expand(folder, name, tmp_path / "twin"), None, dtype=dtype)
    exact = open_student(folder, None, dtype=dtype)
    rounding, relative = (2e-6, 2e-5) if dtype == "float32" else (0.01, 0.2)
    found, expected = (compute_logits(each.language_model.model) for each in (student, twin))
    torch.testing.assert_close(found, expected, rtol=0, atol=rounding)
    if dtype == "float32":
        change = compute_logits(exact.language_model.model) - expected
        assert change.abs().max() > 100 * rounding
    gradients, slow = differentiate(student, folder), differentiate(twin, folder)
    assert gradients.keys() == slow.keys() and all(map(is_adapter, gradients))
    assert gradients.keys() == student.language_model.trainable_parameters().keys()
    for key, gradient in gradients.items():
        assert (gradient - slow[key]).norm() <= relative * slow[key].norm(), key


@needs_torchao
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_expands_to_the_numbers_of_torchao(dtype: torch.dtype) -> None:
    stream = torch.Generator().manual_seed(0)
    for rows, columns in ((1, 64), (48, 64), (32, 100), (256, 192)):
        packed = ROUNDERS["nf4"](torch.randn(rows, columns, generator=stream).to(dtype))
        assert expand_weight(packed).equal(packed.get_original_weight())  # type: ignore[attr-defined]


@needs_torchao
@pytest.mark.parametrize("name", FORMATS)
def test_the_graph_holds_no_expanded_matrix(folder: Path, name: str) -> None:
    model = open_student(folder, name).language_model
    packed = {weight.shape for weight in model.model.parameters() if is_packed(weight)}
    saved: list[torch.Size] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute_hidden_states(model, [TEXT])
    assert saved and packed
    assert not {*packed, *(shape[::-1] for shape in packed)} & set(saved)


def list_storages() -> dict[int, int]:
    """Return the bytes of the storage of every tensor in this process, by address."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    plain = [each for each in tensors if not is_packed(each) and each.layout == torch.strided]
    storages = [each.untyped_storage() for each in plain if each.device.type == "cpu"]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


@needs_torchao
@pytest.mark.parametrize("name", FORMATS)
def test_no_copy_of_the_base_stays_in_memory(tmp_path: Path, name: str) -> None:
    folder = model_folder(tmp_path / "wide", hidden_size=256)
    data = toys.toy_data(folder)
    before = list_storages()
    loaded = open_student(folder, name)
    trainer = LocalTrainer(loaded.language_model)
    trainer.forward_backward(data, Objective(), 0)
    trainer.optim_step(AdamParams(0.01))
    live, snapshot = trainer.build_sampling_client(), trainer.snapshot()
    teacher = trainer.build_self_teacher(WeightUpdateRule("frozen"))
    requests, params = [SampleRequest((3, 4), 1)], SamplingParams(16)
    tokens = live.sample(requests, params)[0].tokens
    assert snapshot.sample(requests, params)[0].tokens.equal(tokens)
    teacher.score([TEXT], Sampled())
    stored = sum(size for key, size in list_storages().items() if key not in before)
    weights = dict(loaded.language_model.model.named_parameters())
    packed = sum(weight.numel() for weight in weights.values() if is_packed(weight))
    learning = sum(w.nbytes for w in loaded.language_model.trainable_parameters().values())
    unrounded = sum(w.nbytes for w in weights.values() if not is_packed(w)) - learning
    # Adapters, two moments, and the copies of the snapshot and of the teacher.
    bits = 8 * (stored - 5 * learning - unrounded) / packed
    print(f"{name}: {bits / 8:.3f} bytes per rounded weight")
    planned = 8 * count_weight_bytes(packed, packed, 4, name) / packed
    assert planned <= bits <= BITS[name]


@needs_torchao
@pytest.mark.parametrize("name", FORMATS)
def test_an_export_reads_back_equal(folder: Path, tmp_path: Path, name: str) -> None:
    loaded = open_student(folder, name)
    expected = compute_logits(loaded.language_model.model)
    export(loaded, tmp_path / "whole")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(compute_logits(merged), expected, rtol=0, atol=1e-5)
    export(loaded, tmp_path / "adapter", adapter=True)
    settings = StudentConfig(
        model=str(tmp_path / "adapter"), lora=Lora(rank=4), quantization=name, device="cpu"
    )
    again = load_student(settings, 1).language_model.model
    assert compute_logits(again).equal(expected)
    assert not any(map(is_packed, merge_adapters(again).values()))


@needs_torchao
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_a_model_of_pictures_learns(tmp_path: Path, family: str) -> None:
    source = build_vision_model(tmp_path / "vision", family)
    settings = StudentConfig(model=str(source), lora=Lora(rank=2), quantization="int8")
    loaded = add_pictures(load_student(settings, 0))
    model = loaded.language_model
    packed = [name for name, weight in model.model.named_parameters() if is_packed(weight)]
    assert packed and not any("visual" in name or "vision" in name for name in packed)
    assert get_pictures(loaded) is not None
    request = ScoreRequest(loaded.renderer.render((Message("user", "how?"),)), (8, 9))
    compute_hidden_states(model, [request]).square().sum().backward()
    assert any(
        weight.grad.any()
        for weight in model.trainable_parameters().values()
        if weight.grad is not None
    )


@needs_torchao
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"teacher": {"type": "self", "weights": "ema", "rate": 0.5}},
        {"rollout.max_staleness": 1},
    ],
    ids=["teacher", "ema", "stale"],
)
def test_a_killed_run_resumes_to_the_same_bytes(
    models: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    changes = {f"student.{key}": setting for key, setting in PACKED.items()} | changes
    whole = toy_run(models, tmp_path / "whole", changes).folder
    cut = tmp_path / "cut"
    assert forked(lambda: toy_run(models, cut, changes), {"PRACTICUM_FAULT": "update:4"}) == 137
    assert_same_run(whole, toy_run(models, cut, changes, resume=True).folder)
    saved = load_file(whole / "checkpoints" / "step-4" / "student.safetensors")
    assert saved and all(map(is_adapter, saved))
    export_run(whole, tmp_path / "out")
    assert load(ModelConfig(model=str(tmp_path / "out"))).language_model.is_exact
    adapter = export_run(whole, tmp_path / "adapter", adapter=True)
    assert "trained over the base in nf4" in adapter.describe()[-1]
    assert "A LoRA adapter of a base in nf4 trained" in (adapter.folder / "README.md").read_text()


@needs_torchao
def test_a_scorer_learns_over_packed_weights(models: Path, tmp_path: Path) -> None:
    scorer = {"type": "value", "model": {"model": str(models / "student"), **PACKED}}
    changes = {
        "objective": {"signal": "score(none)", "scorer": "critic"},
        "scorers": {"critic": scorer},
        "train.steps": 1,
    }
    folder = toy_run(models, tmp_path, changes).folder
    saved = load_file(folder / "checkpoints" / "step-1" / "scorer-critic.safetensors")
    assert any(map(is_adapter, saved))
    assert not any(name.startswith("model.") and not is_adapter(name) for name in saved)


@pytest.mark.parametrize(("bits", "warnings"), [(None, 0), ("int8", 0), ("nf4", 1)])
def test_only_an_equally_rounded_teacher_is_the_same_model(
    models: Path, caplog: pytest.LogCaptureFixture, bits: str | None, warnings: int
) -> None:
    teacher = {"type": "model", "model": str(models / "student"), "quantization": bits}
    changes = {f"student.{key}": setting for key, setting in PACKED.items()} | {"teacher": teacher}
    weights = {f"{part}/model.safetensors": "a" for part in ("student", "teacher")}
    warn_of_equal_teacher(toy_recipe(models, changes), weights)
    assert len(caplog.records) == warnings


@pytest.mark.parametrize("name", FORMATS)
def test_a_plan_counts_the_packed_bytes(models: Path, name: str) -> None:
    lora = {"student.lora": {"rank": 2}}
    whole, rounded = (
        plan(toy_recipe(models, {**lora, "student.quantization": bits}), process=0)
        for bits in (None, name)
    )
    body = whole.run.record.dims.body
    sizes = [found.memory.phases["update"]["student"] for found in (whole, rounded)]
    assert sizes[0] - sizes[1] == count_weight_bytes(body, 0, 4, None) - count_weight_bytes(
        body, body, 4, name
    )
    laid_out = [
        sum(size for key, size in found.memory.phases["sample"].items() if "laid out" in key)
        for found in (whole, rounded)
    ]
    assert laid_out[1] <= laid_out[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "quantization: rounded weights are frozen, so only adapters can be trained; set lora"),
        ({"lora": {}, "trainable_layers": 1}, "adapters in all layers; remove trainable_layers"),
        ({"train_encoder": True}, "adapters in all layers; remove train_encoder"),
        ({"drafter": {}}, "adapters in all layers; remove drafter"),
        ({"lora": {}, "quantization": "nvfp4"}, "Input should be 'int8' or 'nf4'"),
    ],
)
def test_settings_that_train_packed_weights_are_refused(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        StudentConfig.model_validate({"model": "m", "quantization": "nf4", **settings})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": {"type": "ray"}}, "student.quantization: 'nf4' .* backend 'ray' keeps them in shards"),
        ({"backend": {"type": "torchrun"}}, "student.quantization: 'nf4' .* backend 'torchrun'"),
        ({"backend": {"type": "tinker", "url": "http://localhost:1"}}, "student.quantization: the base"),
        ({"rollout.engine": {"type": "auto"}}, "rollout.engine: an engine holds all weights"),
    ],
    ids=["ray", "torchrun", "tinker", "engine"],
)  # fmt: skip
def test_what_holds_other_weights_is_refused(
    models: Path, changes: dict[str, object], message: str
) -> None:
    settings = {f"student.{key}": setting for key, setting in PACKED.items()}
    with pytest.raises(RecipeError, match=message):
        parse_recipe(toy_data(models, settings | changes), "toy")


@needs_torchao
def test_the_compiled_step_is_refused(folder: Path) -> None:
    settings = StudentConfig(model=str(folder), lora=Lora(), quantization="nf4", device="cpu")
    with pytest.raises(ModelError, match=r"backend\.decoding is native, but .* float32 weights"):
        load_student(settings, 0, decoding="native")
