"""Join the weights of models that began as one, without training: the rival of distilling them.

`mean` averages the weights. `task_arithmetic` adds the sum of all models' changes to the base.
`ties` keeps each model's largest changes, elects a sign for each weight, and adds the mean of the
changes with that sign (Yadav et al., arXiv 2306.01708).
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from practicum.errors import ModelError
from practicum.models.config import MergeConfig
from practicum.models.files import name_when_complete


def merge_models(config: MergeConfig, models: Sequence[Path], base: Path | None, out: Path) -> None:
    """Write the merged model to `out`; its other files are the first model's.

    `mean` needs no base. Weights are merged one by one in float32. Raises ModelError if the models
    differ in the names or shapes of their weights.
    """
    folders = [*models, *([] if base is None else [base])]
    files = [_find_weights(folder) for folder in folders]
    for folder, weights in zip(folders, files, strict=True):
        _check_equal(models[0], files[0], folder, weights)
    is_trimmed = config.method == "ties" and config.density < 1.0
    thresholds = [
        _find_threshold(weights, files[-1], config.density) if is_trimmed else 0.0
        for weights in files[: len(models)]
    ]
    with name_when_complete(out) as staging:
        shutil.copytree(models[0], staging, ignore=shutil.ignore_patterns("*.safetensors"))
        for file in sorted(set(files[0].values())):
            merged = {}
            for name in (name for name, path in files[0].items() if path == file):
                weights = [_read(name, paths) for paths in files]
                stacked = torch.stack([weight.float() for weight in weights])
                joined = _join(config, stacked, thresholds)
                merged[name] = joined.to(weights[0].dtype).contiguous()
            # transformers reads files with this entry only.
            save_file(merged, staging / file.name, metadata={"format": "pt"})


def _join(config: MergeConfig, weights: Tensor, thresholds: Sequence[float]) -> Tensor:
    """Join the weights of all models, stacked along the first axis; a base is the last of them."""
    if config.method == "mean":
        return weights.mean(dim=0)
    base = weights[-1]
    changes = weights[:-1] - base
    if config.method == "task_arithmetic":
        return base + config.scale * changes.sum(dim=0)
    for change, threshold in zip(changes, thresholds, strict=True):
        change[change.abs() < threshold] = 0.0
    agrees = changes.sign() == changes.sum(dim=0).sign()
    agreeing = torch.where(agrees, changes, 0.0)
    count = (agreeing != 0).sum(dim=0).clamp(min=1)
    return base + config.scale * agreeing.sum(dim=0) / count


def _find_threshold(files: Mapping[str, Path], base: Mapping[str, Path], share: float) -> float:
    """Return the size of the smallest change among the largest `share` of a model's changes."""
    sizes = [(_read(name, files).float() - _read(name, base).float()).abs() for name in files]
    flat = torch.cat([size.flatten() for size in sizes])
    count = max(round(share * len(flat)), 1)
    return flat.kthvalue(len(flat) - count + 1).values.item()


def _check_equal(
    first: Path, files: Mapping[str, Path], second: Path, second_files: Mapping[str, Path]
) -> None:
    """Raise ModelError if two models differ in the names or shapes of their weights."""
    if files.keys() != second_files.keys():
        name = min(files.keys() ^ second_files.keys())
        raise ModelError(f"{second} and {first} cannot be merged: only one has {name}")
    for name in files:
        shapes = [_read_shape(name, second_files), _read_shape(name, files)]
        if shapes[0] != shapes[1]:
            raise ModelError(
                f"{second} and {first} cannot be merged: {name} has the shapes {shapes[0]} and "
                f"{shapes[1]}"
            )


def _find_weights(folder: Path) -> dict[str, Path]:
    """Return the file that holds each weight of a model folder."""
    paths: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            paths |= dict.fromkeys(file.keys(), path)
    if not paths:
        raise ModelError(f"{folder}: no safetensors file, so it cannot be merged")
    return paths


def _read_shape(name: str, files: Mapping[str, Path]) -> tuple[int, ...]:
    with safe_open(files[name], framework="pt") as file:
        return tuple(file.get_slice(name).get_shape())


def _read(name: str, files: Mapping[str, Path]) -> Tensor:
    with safe_open(files[name], framework="pt") as file:
        return file.get_tensor(name)
