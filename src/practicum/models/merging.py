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
from torch import Tensor

from practicum.errors import ModelError
from practicum.models.config import MergeConfig
from practicum.models.files import name_when_complete
from practicum.models.tensors import write_tensors


def merge_models(config: MergeConfig, models: Sequence[Path], base: Path | None, out: Path) -> None:
    """Write the merged model to `out`; its other files are the first model's.

    `mean` needs no base. Weights are merged one by one in float32. Raises ModelError if the models
    differ in the names or shapes of their weights.
    """
    folders = [*models, *([] if base is None else [base])]
    files = [_find_weights(folder) for folder in folders]
    for folder, weights in zip(folders, files, strict=True):
        if weights.keys() != files[0].keys():
            name = min(weights.keys() ^ files[0].keys())
            raise ModelError(f"{folder} and {models[0]} cannot be merged: only one has {name}")
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
                joined = _join(config, _read_all(name, files, folders), thresholds)
                merged[name] = joined.to(_read(name, files[0]).dtype)
            write_tensors(staging / file.name, merged)


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


def _read_all(name: str, files: Sequence[Mapping[str, Path]], models: Sequence[Path]) -> Tensor:
    """Return a weight of every model in float32. Raises ModelError if their shapes differ."""
    weights = [_read(name, paths).float() for paths in files]
    for model, weight in zip(models, weights, strict=True):
        if weight.shape != weights[0].shape:
            raise ModelError(
                f"{model} and {models[0]} cannot be merged: {name} has the shapes "
                f"{tuple(weight.shape)} and {tuple(weights[0].shape)}"
            )
    return torch.stack(weights)


def _find_weights(folder: Path) -> dict[str, Path]:
    """Return the file that holds each weight of a model folder."""
    paths: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            paths |= dict.fromkeys(file.keys(), path)
    if not paths:
        raise ModelError(f"{folder}: no safetensors file, so it cannot be merged")
    return paths


def _read(name: str, files: Mapping[str, Path]) -> Tensor:
    with safe_open(files[name], framework="pt") as file:
        return file.get_tensor(name)
