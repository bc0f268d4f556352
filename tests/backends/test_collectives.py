"""The measured bytes of an update's collectives in the ranks equal the plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from practicum.backends._sharded.building import build_sharded_trainer, put_in_shards
from practicum.backends.local.adapters import add_adapters
from practicum.backends.local.device_limits import TrainerLimits
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.sizes import measure_dims, measure_trainable
from practicum.costs.collectives import count_collective_bytes
from practicum.models.config import Lora
from practicum.objective import Objective

from .rank_forks import run_ranks
from .test_sharded import datums
from .tiny import tiny


class ReceivedBytes(TorchDispatchMode):
    """Counts the received bytes of weights and gradients of a rank, and separately the bytes of per-token numbers.

    In a ring of n ranks, each receives all but one n-th of gathered or reduced tensors, and twice that for an all-reduce.
    """

    def __init__(self, shards: int, count: int) -> None:
        super().__init__()
        self.shards, self.count = shards, count
        self.tensors, self.others = 0.0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if "c10d" in name and "wait" not in name and "wrap" not in name:
            self.add(name, torch.utils._pytree.tree_leaves((args, result)))
        return result

    def add(self, name: str, leaves: list[Any]) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        size = max((tensor.nbytes for tensor in tensors), default=0)
        if not tensors or not all(tensor.is_floating_point() for tensor in tensors):
            self.others += size * (self.count - 1)
        elif "reduce_scatter" in name or "gather" in name:
            self.tensors += size * (self.shards - 1) / self.shards
        else:
            assert "reduce" in name, name
            # Over all ranks for adapters, over the copies for shards.
            ranks = self.count // self.shards if self.shards < self.count else self.count
            self.tensors += 2 * size * (ranks - 1) / ranks


def build(architecture: str, lora: bool) -> LanguageModel:
    model = replace(tiny(architecture), autocast=True)
    if lora:
        add_adapters(model.model, Lora(rank=2), 0, [0, 1])
        # Frozen weights are loaded in the dtype of products.
        model.model.lm_head.to(torch.bfloat16)  # type: ignore[operator, union-attr]
    return model


@pytest.mark.parametrize(
    ("architecture", "lora", "shards", "nodes"),
    [
        ("llama", False, 2, 1),
        ("qwen3", False, 2, 1),
        pytest.param("qwen3", True, 2, 1, marks=pytest.mark.long),
        pytest.param("qwen3", False, 2, 2, marks=pytest.mark.slow),
    ],
    ids=["tied", "untied", "adapters", "two nodes"],
)
def test_measured_bytes_are_planned_within_one_percent(
    tmp_path: Path, architecture: str, lora: bool, shards: int, nodes: int
) -> None:
    count = shards * nodes

    def work(rank: int) -> tuple[float, float, int]:
        model = build(architecture, lora)
        trainer, ranks = build_sharded_trainer(put_in_shards(model, nodes), TrainerLimits(60, 7))
        with ReceivedBytes(shards, count) as received:
            trainer.forward_backward(datums(architecture), Objective(), 0)
        return received.tensors, received.others, ranks.total

    answers = run_ranks(tmp_path, count, work)
    model = build(architecture, lora)
    planned = count_collective_bytes(
        measure_dims(model), measure_trainable(model), count, shards, answers[0][2], 2
    )
    assert sum(tensors for tensors, _, _ in answers) == pytest.approx(planned, rel=0.01)
    # The statistics of an update: some numbers per token.
    tokens = sum(len(datum.rollout.tokens) for datum in datums(architecture))
    assert answers[0][1] < (count - 1) * (100 * tokens + 4096)
