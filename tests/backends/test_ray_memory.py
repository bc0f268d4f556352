"""The driver of a cluster reads no large tensor, and a rank holds no more than it must."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from toy import make_model, toy_run

from practicum.backends._sharded.building import build_sharded_trainer, put_in_shards
from practicum.backends.local.device_limits import TrainerLimits
from practicum.backends.ray import references
from practicum.objective import Objective

from .rank_forks import run_ranks
from .ray_session import cluster
from .test_sharded import datums
from .tiny import tiny

assert cluster
MIB = 2**20


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.nbytes)
        return result


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_driver_reads_no_large_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = tmp_path / "models"
    make_model(models / "student", hidden_size=256, padded_vocabulary=4096, seed=1)
    make_model(models / "teacher", hidden_size=256, padded_vocabulary=4096, seed=2)

    def refuse(reference: Any) -> Any:
        raise AssertionError("the driver fetched a tensor")

    monkeypatch.setattr(references, "fetch", refuse)
    with LargestTensor() as seen:
        changes = {
            "backend": {"type": "ray", "trainers": 2, "samplers": 1},
            "train.steps": 2,
            "reference": {"type": "self", "weights": "ema"},
            "objective": {
                "losses": [{"signal": "full"}, {"signal": "topk(4)", "against": "reference"}]
            },
            "scorers": {"critic": {"type": "value"}},
        }
        folder = toy_run(models, tmp_path, changes).folder
    for name in ("student-*", "reference.*", "scorer-critic.*"):
        files = (folder / "checkpoints" / "step-2").glob(name)
        assert sum(path.stat().st_size for path in files) > 4 * MIB
    assert seen.largest < MIB


def test_a_rank_holds_its_shard_one_layer_and_the_head(tmp_path: Path) -> None:
    def work(rank: int) -> tuple[list[set[str]], int, int]:
        trainer, _ = build_sharded_trainer(put_in_shards(tiny("qwen3")), TrainerLimits(24, 7))
        model = trainer.language_model.model
        held: list[set[str]] = []

        def look(*_: object) -> None:
            parameters = model.named_parameters()
            held.append({name for name, p in parameters if not isinstance(p, DTensor)})

        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.mlp.register_forward_hook(look)  # type: ignore[union-attr]
            layer.mlp.register_full_backward_hook(look)  # type: ignore[union-attr]
        trainer.forward_backward(datums("qwen3"), Objective(), 0)
        parameters = list(model.parameters())
        assert all(isinstance(p, DTensor) for p in parameters)
        local = sum(p.to_local().untyped_storage().nbytes() for p in parameters)  # type: ignore[attr-defined]
        return held, local, sum(p.nbytes for p in parameters)

    for held, local, total in run_ranks(tmp_path, 2, work):
        assert local <= 0.51 * total
        assert len(held) >= 8
        for names in held:
            layers = {name.split(".")[2] for name in names if ".layers." in name}
            others = {name for name in names if ".layers." not in name}
            assert len(layers) == 1
            assert others <= {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
