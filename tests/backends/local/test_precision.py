"""The dtype that `dtype: auto` chooses, and the products that stay in float32 on a GPU."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toy import make_model
from transformers import AutoModelForCausalLM

from practicum.backends.local import precision
from practicum.backends.local.loading import load, load_student
from practicum.backends.local.precision import FloatProducts, choose_dtype, prepare_products
from practicum.models.config import ModelConfig, ScorerConfig, StudentConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the precision of products after a test."""
    monkeypatch.setattr(FloatProducts, "are_exact", False)
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def store_as(folder: Path, copy: Path, settings: dict[str, Any]) -> str:
    """Copy a config.json with other settings of the dtype."""
    data = json.loads((folder / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        data.pop(key, None)
    copy.mkdir()
    (copy / "config.json").write_text(json.dumps(data | settings))
    return str(copy)


@pytest.mark.parametrize(
    ("settings", "on_cuda"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "bfloat16"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": None}, "float32"),
        ({}, "float32"),
    ],
)
def test_a_frozen_model_has_the_dtype_of_its_checkpoint_on_cuda(
    folder: Path, tmp_path: Path, settings: dict[str, Any], on_cuda: str
) -> None:
    source = store_as(folder, tmp_path / "model", settings)
    config = ScorerConfig(model=source)
    assert choose_dtype(config, source, "cuda") == on_cuda
    assert choose_dtype(config, source, "cpu") == choose_dtype(config, source, "mps") == "float32"
    # A student computes in bfloat16 over any weights.
    student = StudentConfig(model=source)
    assert choose_dtype(student, source, "cuda") == "bfloat16"
    assert choose_dtype(student, source, "cpu") == "float32"


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dtype_that_is_named_is_kept(device: str, dtype: str) -> None:
    for kind in (ModelConfig, ScorerConfig, StudentConfig):
        assert (
            choose_dtype(kind.model_validate({"model": "m", "dtype": dtype}), "m", device) == dtype
        )


def test_the_default_on_a_cpu_is_float32(folder: Path) -> None:
    for loaded in (
        load(ScorerConfig(model=str(folder), device="cpu")),
        load_student(StudentConfig(model=str(folder), device="cpu"), 0),
    ):
        assert not loaded.language_model.autocast
        assert loaded.language_model.model.dtype == torch.float32


def test_tf32_is_allowed_unless_a_model_names_float32(folder: Path, products: None) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")

    def prepare(dtype: str, device: torch.device) -> str:
        model = AutoModelForCausalLM.from_pretrained(folder)
        config = ModelConfig.model_validate({"model": str(folder), "dtype": dtype})
        prepare_products(config, model, device)
        return torch.get_float32_matmul_precision()

    assert prepare("auto", cpu) == "highest", "nothing changes on a CPU"
    assert prepare("auto", cuda) == prepare("bfloat16", cuda) == "high"
    assert prepare("float32", cuda) == prepare("auto", cuda) == "highest"


class _Products(TorchDispatchMode):
    """Collect the names of products that TF32 could round."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class _Rotary(torch.nn.Module):
    """Angles as some releases of transformers compute them: a product over one number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.rand(5), persistent=False)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        frequencies = self.get_buffer("inv_freq")[None, :, None].expand(positions.shape[0], -1, 1)
        return (frequencies.float() @ positions[:, None, :].float()).transpose(1, 2)


@torch.no_grad()
def test_the_angles_of_rotary_embeddings_need_no_product_that_tf32_rounds() -> None:
    model: Any = torch.nn.Sequential(_Rotary())
    positions = torch.arange(16).reshape(2, 8) * 1001

    def turn() -> tuple[torch.Tensor, list[str]]:
        with _Products() as products:
            return model(positions), products.names

    plain, multiplied = turn()
    assert multiplied == ["bmm"], "otherwise this test tests nothing"
    precision.keep_angles_exact(model)
    exact, multiplied = turn()
    assert not multiplied
    assert plain.equal(exact)
    with pytest.raises(IndexError):
        model(torch.tensor(1))
    assert "bmm" in _collect_products(), "other products are left alone, also after an error"


def _collect_products() -> list[str]:
    with _Products() as products:
        torch.ones(1, 3, 1) @ torch.ones(1, 1, 2)
    return products.names


@torch.no_grad()
def test_trained_weights_stay_float32_under_products_in_bfloat16(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "practicum.backends.local.loading.choose_dtype",
        lambda config, source, _: choose_dtype(config, source, "cuda"),
    )
    chosen = load_student(StudentConfig(model=str(folder), device="cpu"), 0).language_model
    named = load_student(StudentConfig(model=str(folder), device="cpu", dtype="bfloat16"), 0)
    assert chosen.autocast
    weights = chosen.trainable_parameters()
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    expected = named.language_model.trainable_parameters()
    assert all(weight.equal(expected[name]) for name, weight in weights.items())


@pytest.mark.gpu
@torch.no_grad()
def test_on_cuda_a_student_is_rounded_and_its_angles_are_not(folder: Path, products: None) -> None:
    student = load_student(StudentConfig(model=str(folder)), 0).language_model
    teacher = load(ScorerConfig(model=str(folder))).language_model
    assert student.device.type == teacher.device.type == "cuda"
    assert student.autocast and not teacher.autocast
    assert torch.get_float32_matmul_precision() == "high"
    plain: Any = AutoModelForCausalLM.from_pretrained(folder)
    moved: Any = teacher.model
    positions = torch.arange(8)[None] * 1001
    expected = plain.model.rotary_emb(torch.zeros(1, 8, 4), positions)
    found = moved.model.rotary_emb(torch.zeros(1, 8, 4).cuda(), positions.cuda())
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other.cpu(), one, rtol=0, atol=1e-3)
