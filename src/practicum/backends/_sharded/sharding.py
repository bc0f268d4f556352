"""Shard a language model with FSDP2 (arXiv 2304.11277), and read and write its sharded tensors.

Each layer is gathered before it computes and freed afterwards. The head's weight (and the
embedding, if the two are tied) is gathered once per update, not once per pass (see `gather_head`),
so it is not in one of FSDP's own groups.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from transformers import PreTrainedModel

from practicum.backends.local.adapters import is_adapter
from practicum.backends.local.language_model import LanguageModel, find_body, find_layers
from practicum.errors import ModelError


def build_mesh(device: torch.device, nodes: int = 1) -> DeviceMesh:
    """Return the mesh of all ranks; with several nodes, shards stay within a node (HSDP)."""
    count = dist.get_world_size()
    if nodes == 1:
        return init_device_mesh(device.type, (count,))
    return init_device_mesh(device.type, (nodes, count // nodes), mesh_dim_names=("node", "rank"))


@dataclass(frozen=True, slots=True)
class SharedWeight:
    """A weight that FSDP ignores, and the modules that hold it under a name."""

    shard: torch.nn.Parameter
    places: tuple[tuple[torch.nn.Module, str], ...]

    def put(self, parameter: torch.nn.Parameter) -> None:
        """Make the modules hold a parameter."""
        for module, name in self.places:
            setattr(module, name, parameter)


def shard(language_model: LanguageModel, mesh: DeviceMesh) -> tuple[SharedWeight, ...]:
    """Shard the weights of a model, and return the weights of its head.

    Adapters stay whole in every process. Raises ModelError if the model has no list of layers.
    """
    model = language_model.model
    layers = find_layers(model)
    if layers is None:
        raise ModelError(
            f"{model.name_or_path}: its layers were not found, so it cannot be sharded; use "
            "backend local or another architecture"
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear), "a causal language model ends in a linear head"
    apart = [weight for weight in head.parameters() if isinstance(weight, torch.nn.Parameter)]
    adapters = [weight for name, weight in parameters.items() if is_adapter(name)]
    policy = MixedPrecisionPolicy()
    if language_model.autocast:
        # Gathers move half the bytes, and sums over ranks keep float32 precision.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    ignored = {*apart, *adapters}
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    body = find_body(model)
    fully_shard(
        body, mesh=mesh, mp_policy=policy, ignored_params=ignored, reshard_after_forward=False
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is a sum, and the full batch determines each rank's share: gradients are
            # summed, not averaged. gloo has no scaled sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return tuple(_share(model, weight, mesh) for weight in apart)


def _share(model: torch.nn.Module, weight: torch.nn.Parameter, mesh: DeviceMesh) -> SharedWeight:
    """Replace a weight by this rank's rows of it."""
    places = tuple(
        (module, name)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter is weight
    )
    rows = torch.nn.Parameter(cut_rows(weight.detach(), mesh), requires_grad=weight.requires_grad)
    shared = SharedWeight(rows, places)
    shared.put(rows)
    return shared


def place_rows(mesh: DeviceMesh) -> list[Placement]:
    """Return the placements of a tensor with rows that are divided within a node."""
    return [*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0)]


def find_rows(count: int, mesh: DeviceMesh) -> slice:
    """Return this rank's rows of a tensor that has `count` rows."""
    # Divided as torch.chunk and DTensor do: the last shards may be empty.
    size = -(-count // mesh.size(-1))
    start = min(size * mesh.get_local_rank(mesh.ndim - 1), count)
    return slice(start, min(start + size, count))


def cut_rows(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Shard a tensor that every rank has."""
    rows = tensor[find_rows(len(tensor), mesh)].clone()
    return DTensor.from_local(
        rows,
        mesh,
        place_rows(mesh),
        run_check=False,
        shape=tensor.shape,
        stride=tensor.contiguous().stride(),
    )


def copy_rows(tensor: Tensor, full: Tensor) -> None:
    """Copy this rank's rows of a full tensor."""
    if isinstance(tensor, DTensor):
        full = full[find_rows(len(full), tensor.device_mesh)]
    get_local(tensor).copy_(full)


def gather_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor in every rank, without a gradient."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def get_local(tensor: Tensor) -> Tensor:
    """Return this rank's rows, or the tensor itself if every rank has all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def gather_head(weights: tuple[SharedWeight, ...], *, learns: bool = True) -> Iterator[None]:
    """Give the modules the full weights of the head within the block.

    At the end of the block, the gradients are summed over the ranks into the gradients of the
    shards, unless the block failed or `learns` is False.
    """
    full = [
        torch.nn.Parameter(gather_tensor(weight.shard), requires_grad=weight.shard.requires_grad)
        for weight in weights
    ]
    try:
        for weight, parameter in zip(weights, full, strict=True):
            weight.put(parameter)
        yield
        for weight, parameter in zip(weights, full, strict=True):
            if learns and parameter.requires_grad:
                weight.shard.grad = _sum_rows(parameter, weight.shard)
    finally:
        for weight in weights:
            weight.put(weight.shard)


@contextmanager
def gather_weights(model: PreTrainedModel, weights: tuple[SharedWeight, ...]) -> Iterator[None]:
    """Within the block, let the model be called like a model of one process; all ranks call this.

    At the end of the block, every rank holds only its shard again.
    """
    try:
        with gather_head(weights, learns=False):
            yield
    finally:
        # The body keeps the weights outside of its layers until a backward pass, which may not
        # happen.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _sum_rows(parameter: torch.nn.Parameter, rows: Tensor) -> DTensor:
    """Return this rank's rows of the sum of all ranks' gradients."""
    assert isinstance(rows, DTensor), "the head's weights are in shards"
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    mesh = rows.device_mesh
    partial = DTensor.from_local(
        gradient, mesh, [Partial() for _ in range(mesh.ndim)], run_check=False
    )
    # Scatter first: then each node adds up only a shard, not the full tensor.
    scattered = partial.redistribute(
        placements=[*(Partial() for _ in range(mesh.ndim - 1)), Shard(0)]
    )
    return scattered.redistribute(placements=place_rows(mesh))
