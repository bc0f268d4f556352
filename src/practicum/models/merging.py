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
    files, shapes = zip(*map(_find_weights, folders), strict=True)
    for folder, folder_shapes in zip(folders, shapes, strict=True):
        for name in sorted({**shapes[0], **folder_shapes}):
            if folder_shapes.get(name) != shapes[0].get(name):
                raise ModelError(
                    f"{folder} and {models[0]} cannot be merged: {name} has the shapes "
                    f"{folder_shapes.get(name, 'none')} and {shapes[0].get(name, 'none')}"
                )
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


def _find_weights(folder: Path) -> tuple[dict[str, Path], dict[str, list[int]]]:
    """Return the file that holds each weight of a model folder, and the weight's shape."""
    files: dict[str, Path] = {}
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            for name in names:
                files[name], shapes[name] = path, file.get_slice(name).get_shape()
    if not files:
        raise ModelError(f"{folder}: no safetensors file, so it cannot be merged")
    return files, shapes


def _read(name: str, files: Mapping[str, Path]) -> Tensor:
    with safe_open(files[name], framework="pt") as file:
        return file.get_tensor(name)
