"""Merged models: the mean of the weights, and task arithmetic."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from laboratory.measures.runs import merge_models


def write_models(folder: Path, count: int) -> tuple[list[Path], list[dict[str, Tensor]]]:
    draw = torch.Generator().manual_seed(count)
    paths, weights = [], []
    for number in range(count):
        path = folder / f"model-{number}"
        path.mkdir()
        tensors = {name: torch.randn(3, 4, generator=draw) for name in ("a", "b")}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text("{}")
        paths.append(path)
        weights.append(tensors)
    return paths, weights


@pytest.mark.parametrize("count", [1, 2, 5])
def test_one_over_their_number_gives_the_mean(tmp_path: Path, count: int) -> None:
    (base, *paths), (_, *weights) = write_models(tmp_path, count + 1)
    merged = merge_models(paths, base, 1 / count, tmp_path / "merged")
    assert (merged / "config.json").is_file()
    for name, tensor in load_file(merged / "model.safetensors").items():
        mean = torch.stack([tensors[name] for tensors in weights]).mean(dim=0)
        torch.testing.assert_close(tensor, mean)


def test_changes_are_added_to_the_base(tmp_path: Path) -> None:
    (base, first, second), (start, *weights) = write_models(tmp_path, 3)
    both = merge_models([first, second], base, 0.5, tmp_path / "merged")
    for name, tensor in load_file(both / "model.safetensors").items():
        expected = start[name].clone()
        for tensors in weights:
            expected += 0.5 * (tensors[name] - start[name])
        torch.testing.assert_close(tensor, expected)
    nothing = merge_models([base, base], base, 3.0, tmp_path / "merged")
    torch.testing.assert_close(load_file(nothing / "model.safetensors"), start)


def test_merges_of_other_scales_are_kept_apart(tmp_path: Path) -> None:
    (base, first), _ = write_models(tmp_path, 2)
    folders = {merge_models([first], base, scale, tmp_path / "merged") for scale in (0.5, 1, 1)}
    assert len(folders) == 2
