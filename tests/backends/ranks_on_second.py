"""Gather statistics of a device that is not the CPU over two ranks: python -m backends.ranks_on_second FOLDER."""

import sys
from pathlib import Path

import second_device
import torch

from practicum.backends._sharded.crossing import pack
from practicum.backends._sharded.fsdp_ranks import FsdpRanks
from practicum.losses.measures import UpdateStatistics

from .rank_forks import run_ranks


def gather(rank: int) -> dict[str, float]:
    device = torch.device(second_device.NAME)
    records = UpdateStatistics(4, device)
    numbers = torch.arange(1.0, 3.0, device=device)
    records.add("both", numbers * (rank + 1))
    records.add(f"of_rank_{rank}", numbers)
    assert b"SecondTensor" not in pack(records), "a tensor travels with its device"
    ranks = FsdpRanks(())
    indices, values = zip(*ranks.gather((torch.tensor([rank]), [numbers])), strict=True)
    assert [index.tolist() for index in indices] == [[0], [1]]
    # The parts of all ranks are on this rank's own device, so they can be put together.
    assert torch.cat([part for parts in values for part in parts]).device.type == device.type
    records.merge(ranks.gather(records))
    assert ranks.decide(lambda: numbers).device.type == device.type
    return records._compute_means()


if __name__ == "__main__":
    first, second = run_ranks(Path(sys.argv[1]), 2, gather)
    assert first == second == {"both": 2.25, "of_rank_0": 1.5, "of_rank_1": 1.5}, (first, second)
