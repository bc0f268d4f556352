"""Save and load sharded checkpoints: a rank writes some tensors in full, and reads its own rows.

The tensors have the names and values that a trainer of one process saves, so any number of ranks
can resume from them. The files of n ranks are named `student-00001-of-0000n.safetensors`, counting
up.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from practicum.backends._sharded.fsdp_ranks import deal_passes
from practicum.backends._sharded.sharding import find_rows, gather_tensor, place_rows
from practicum.backends.local.trainer import LocalTrainer
from practicum.models.tensors import find_parts, name_part, write_tensors


def collect_part(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather the tensors that this rank writes in full, on the CPU; all ranks call this.

    One tensor at a time is gathered on the device.
    """
    sizes = [tensor.numel() for tensor in tensors.values()]
    dealt = set(deal_passes(sizes, dist.get_world_size())[dist.get_rank()])
    part: dict[str, Tensor] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        full = gather_tensor(tensor)
        if number in dealt:
            part[name] = full.to("cpu", copy=True)
    return part


def save_parts(trainer: LocalTrainer, folder: Path) -> None:
    """Write this rank's tensors of weights and moments into a folder that all ranks see."""
    rank, count = dist.get_rank(), dist.get_world_size()
    for stem, tensors in trainer.save_state().items():
        write_tensors(folder / name_part(stem, rank, count), collect_part(tensors))


def copy_parts(trainer: LocalTrainer) -> Callable[[Path], None]:
    """Copy this rank's tensors to the host; return a function that writes them from any thread."""
    rank, count = dist.get_rank(), dist.get_world_size()
    parts = {
        name_part(stem, rank, count): collect_part(tensors)
        for stem, tensors in trainer.save_state().items()
    }

    def write(folder: Path) -> None:
        for name, part in parts.items():
            write_tensors(folder / name, part)

    return write


def load_parts(trainer: LocalTrainer, folder: Path, *, moments: bool) -> None:
    """Restore the files of any number of ranks, reading only this rank's rows.

    Raises CheckpointError if they belong to another model.
    """
    parameters = trainer.save_state()["student"]
    trainer.load_state(
        {
            "student": _read_rows(folder, "student", parameters),
            "optimizer": _read_rows(folder, "optimizer", parameters) if moments else {},
        }
    )


def _read_rows(folder: Path, stem: str, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the saved tensors; of a sharded parameter, return only this rank's rows."""
    tensors: dict[str, Tensor] = {}
    for path in find_parts(folder, stem):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (the file is not a mapping)
                stored = file.get_slice(name)
                shape = torch.Size(stored.get_shape())
                parameter = (
                    parameters.get(name)
                    if stem == "student"
                    else parameters.get(name.rpartition("/")[0])
                )
                if not isinstance(parameter, DTensor) or shape != parameter.shape:
                    tensors[name] = file.get_tensor(name)
                    continue
                mesh = parameter.device_mesh
                rows = stored[find_rows(shape[0], mesh)].to(parameter.device)
                tensors[name] = DTensor.from_local(
                    rows,
                    mesh,
                    place_rows(mesh),
                    run_check=False,
                    shape=shape,
                    stride=torch.empty(shape, device="meta").stride(),
                )
    return tensors
