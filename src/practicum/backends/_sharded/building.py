"""Build the trainer of one rank from a model that this process has loaded in full."""

import torch
import torch.distributed as dist

from practicum.backends._sharded.fsdp_ranks import FsdpRanks
from practicum.backends._sharded.sharding import build_mesh, shard
from practicum.backends.local.device_limits import TrainerLimits
from practicum.backends.local.graph import measure_activation_bytes
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.trainer import LocalTrainer


def build_sharded_trainer(
    language_model: LanguageModel,
    limits: TrainerLimits,
    special_ids: frozenset[int] | None = None,
    *,
    dropout: bool = False,
    nodes: int = 1,
) -> tuple[LocalTrainer, FsdpRanks]:
    """Put the model in shards over the ranks of the process group, and return their trainer."""
    bytes_a_token = None
    if limits.micro_batch_tokens is None:
        # Of the whole model: a pass over shards also holds what other ranks lent it. All ranks
        # must plan the same passes.
        language_model.model.train(dropout)
        measured = torch.tensor(measure_activation_bytes(language_model))
        dist.all_reduce(measured, op=dist.ReduceOp.MAX)
        bytes_a_token = int(measured)
    weights = shard(language_model, build_mesh(language_model.device, nodes))
    ranks = FsdpRanks(weights)
    trainer = LocalTrainer(
        language_model,
        limits,
        special_ids,
        dropout=dropout,
        ranks=ranks,
        bytes_a_token=bytes_a_token,
    )
    return trainer, ranks
