"""Merged models: each method against its formula over whole vectors, and what cannot be merged."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from practicum.errors import ModelError
from practicum.models.config import MergeConfig
from practicum.models.merging import merge_models

SHAPES = {"a": (5, 3), "b": (4,), "c": (2, 7)}
FILES = {"one.safetensors": ("a", "b"), "two.safetensors": ("c",)}


def draw_weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def write_model(folder: Path, weights: Mapping[str, Tensor]) -> Path:
    """Write weights in two files, as a large model has them, next to a config."""
    folder.mkdir()
    for file, names in FILES.items():
        save_file({name: weights[name] for name in names}, folder / file)
    (folder / "config.json").write_text(f'{{"name": "{folder.name}"}}', encoding="utf-8")
    return folder


def read_model(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in FILES for name, tensor in load_file(folder / file).items()}


def flatten(weights: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([weights[name].flatten() for name in SHAPES])


def merge(folder: Path, config: MergeConfig, *seeds: int) -> Tensor:
    """Return the flat weights merged from models with these seeds; the base has seed 0."""
    base = write_model(folder / "base", draw_weights(0))
    models = [write_model(folder / str(index), draw_weights(s)) for index, s in enumerate(seeds)]
    merge_models(config, models, None if config.method == "mean" else base, folder / "merged")
    assert (folder / "merged" / "config.json").read_text() == '{"name": "0"}'
    with safe_open(folder / "merged" / "one.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}, "transformers reads no other file"
    return flatten(read_model(folder / "merged"))


def build_config(method: str, **keys: float) -> MergeConfig:
    return MergeConfig.model_validate({"merge": ("x", "y"), "method": method, **keys})


def merge_by_ties(base: Tensor, models: list[Tensor], density: float, scale: float) -> Tensor:
    """Merge weight by weight, in Python's numbers."""
    changes = []
    for model in models:
        change = (model - base).tolist()
        largest = sorted(range(len(change)), key=lambda index: -abs(change[index]))
        kept = set(largest[: round(density * len(change))])
        changes.append([value if index in kept else 0.0 for index, value in enumerate(change)])
    merged = []
    for values in zip(*changes, strict=True):
        total = sum(values)
        agreeing = [value for value in values if value * total > 0]
        merged.append(sum(agreeing) / len(agreeing) if agreeing else 0.0)
    return base + scale * torch.tensor(merged)


@given(seed=st.integers(1, 500), count=st.integers(2, 4), scale=st.sampled_from([0.3, 1.0, 2.0]))
def test_a_method_has_its_formula(
    seed: int, count: int, scale: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    seeds = range(seed, seed + count)
    models = [flatten(draw_weights(each)) for each in seeds]
    base = flatten(draw_weights(0))
    cases = [
        (build_config("mean"), torch.stack(models).mean(dim=0)),
        (
            build_config("task_arithmetic", scale=scale),
            base + scale * sum(model - base for model in models),
        ),
        (
            build_config("ties", scale=scale, density=0.4),
            merge_by_ties(base, models, 0.4, scale),
        ),
        (build_config("ties", density=1.0), merge_by_ties(base, models, 1.0, 1.0)),
    ]
    for config, values in cases:
        found = merge(tmp_path_factory.mktemp("merge"), config, *seeds)
        torch.testing.assert_close(found, values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["mean", "ties"])
def test_equal_models_merge_to_themselves(method: str, tmp_path: Path) -> None:
    config = build_config(method, **({} if method == "mean" else {"density": 1.0}))
    torch.testing.assert_close(merge(tmp_path, config, 3, 3), flatten(draw_weights(3)))


def test_weights_keep_the_first_model_s_type(tmp_path: Path) -> None:
    halves = {name: weight.bfloat16() for name, weight in draw_weights(1).items()}
    models = [write_model(tmp_path / name, halves) for name in "xy"]
    merge_models(build_config("mean"), models, None, tmp_path / "merged")
    assert {weight.dtype for weight in read_model(tmp_path / "merged").values()} == {torch.bfloat16}


def test_other_weights_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    model = write_model(tmp_path / "x", draw_weights(1))
    wide = write_model(tmp_path / "y", draw_weights(1) | {"a": torch.zeros(6, 3)})
    other = tmp_path / "z"
    other.mkdir()
    for models, message in (
        ([model, wide], "a has the shapes [6, 3] and [5, 3]"),
        ([model, other], "no safetensors file"),
    ):
        with pytest.raises(ModelError, match=re.escape(message)):
            merge_models(build_config("mean"), models, None, tmp_path / "merged")
    with pytest.raises(ModelError, match="a has the shapes"):
        merge_models(build_config("ties"), [model, model], wide, tmp_path / "merged")
    save_file({"a": torch.zeros(5, 3)}, other / "model.safetensors")
    with pytest.raises(ModelError, match=re.escape("b has the shapes none and [4]")):
        merge_models(build_config("mean"), [model, other], None, tmp_path / "merged")
    assert not list(tmp_path.glob("merged*"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"scale": 0.5}, "method mean has no scale"),
        ({"method": "task_arithmetic", "density": 0.5}, "method task_arithmetic has no density"),
        ({"merge": ("x",)}, "at least 2"),
        ({"method": "dare"}, "'mean', 'task_arithmetic' or 'ties'"),
    ],
)
def test_a_key_that_is_not_used_is_refused(keys: Mapping[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MergeConfig.model_validate({"merge": ("x", "y"), **keys})
