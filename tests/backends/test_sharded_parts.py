"""The checkpoints of sharded ranks: copied from the devices tensor by tensor, and written later."""

import weakref
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from practicum.backends._sharded import parts
from practicum.backends._sharded.building import build_sharded_trainer, put_in_shards
from practicum.backends._sharded.parts import copy_parts, save_parts
from practicum.backends.local.device_limits import TrainerLimits

from .rank_forks import run_ranks
from .test_sharded import datums, update
from .tiny import tiny


def test_a_copy_is_written_as_it_was_and_gathers_one_tensor_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, copied = tmp_path / "saved", tmp_path / "copied"
    saved.mkdir()
    copied.mkdir()

    def work(rank: int) -> int:
        trainer, _ = build_sharded_trainer(put_in_shards(tiny("qwen3")), TrainerLimits(60, 7))
        update(trainer, datums("qwen3"), {})
        save_parts(trainer, saved)
        gathered: list[weakref.ref[torch.Tensor]] = []
        gather_tensor = parts.gather_tensor

        def watch(tensor: torch.Tensor) -> torch.Tensor:
            assert all(reference() is None for reference in gathered[:-1])
            full = gather_tensor(tensor)
            if isinstance(tensor, DTensor):
                gathered.append(weakref.ref(full))
            return full

        monkeypatch.setattr(parts, "gather_tensor", watch)
        write = copy_parts(trainer)
        monkeypatch.undo()
        update(trainer, datums("qwen3"), {})
        write(copied)
        return len(gathered)

    assert min(run_ranks(tmp_path, 2, work)) > 30
    names = [path.name for path in sorted(saved.iterdir())]
    assert len(names) == 4 and names == [path.name for path in sorted(copied.iterdir())]
    for name in names:
        assert (copied / name).read_bytes() == (saved / name).read_bytes(), name
