"""Compare the files that ranks load with the files that the run recorded; all ranks call this."""

import socket
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from practicum.backends._sharded.crossing import gather_all
from practicum.models.digests import ModelRecord

T = TypeVar("T")


def load_recorded(
    load: Callable[[], T], record: ModelRecord | None
) -> tuple[T, ModelRecord | None]:
    """Load a model from the recorded files; return it with the record after the load.

    The ranks of a machine divide the files among them, so each file is read once per machine.
    Raises ModelError if a file differs from its record, or if another rank loaded different files.
    """
    if record is None:
        return load(), None
    hosts = gather_all(socket.gethostname())
    neighbours = [rank for rank, host in enumerate(hosts) if host == socket.gethostname()]
    record.check(thorough=True, share=(neighbours.index(dist.get_rank()), len(neighbours)))
    loaded = load()
    record = record.confirm()
    record.require_equal(gather_all(record))
    return loaded, record
