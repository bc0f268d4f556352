"""Load a model in shards, and build the trainer of one rank."""

import logging
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from practicum.backends._sharded.fsdp_ranks import FsdpRanks
from practicum.backends._sharded.sharding import build_mesh, shard
from practicum.backends._sharded.slices import ShardedModel, read_sharded_model
from practicum.backends.local.adapter_folders import copy_adapter
from practicum.backends.local.device_limits import TrainerLimits
from practicum.backends.local.graph import measure_activation_bytes
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.loading import LoadedModel, load_by_role, open_files
from practicum.backends.local.pictures import reads_pictures
from practicum.backends.local.trainer import LocalTrainer
from practicum.errors import ModelError
from practicum.models.config import ModelConfig, StudentConfig
from practicum.models.sources import find_base, is_adapter_folder

log = logging.getLogger(__name__)


def load_in_shards(
    config: ModelConfig,
    scratch_folder: Path | None = None,
    seed: int = 0,
    nodes: int = 1,
    decoding: str = "auto",
) -> tuple[LoadedModel, ShardedModel]:
    """Load a model and keep this rank's shard of it; all ranks of the process group call this.

    A student is trainable as its settings say; every other model is frozen. `decoding` is the
    backend's setting.
    """
    files = open_files(config, scratch_folder)
    if reads_pictures(find_base(files.source)):
        raise ModelError(
            f"{files.source}: a model of pictures is not split between processes; set backend: local"
        )
    sharded = read_sharded_model(
        files.source, config, files.vocab_size, files.device, seed, nodes, decoding
    )
    if sharded is None:
        log.info(
            f"{files.source}: its files do not hold the weights as its modules do, so each rank "
            "loads the whole model before it keeps a shard"
        )
        loaded = load_by_role(config, seed, scratch_folder, decoding)
        return loaded, put_in_shards(loaded.language_model, nodes)
    model = sharded.language_model.model
    files.check_rows(model)
    if isinstance(config, StudentConfig) and config.lora and is_adapter_folder(files.source):
        copy_adapter(files.source, model)
    language_model = replace(sharded.language_model, tokenizer=files.tokenizer)
    loaded = LoadedModel(language_model, files.build_renderer(config, model), files.source)
    return loaded, replace(sharded, language_model=language_model)


def put_in_shards(language_model: LanguageModel, nodes: int = 1) -> ShardedModel:
    """Keep this rank's shard of a model that every rank has loaded in full."""
    weights = shard(language_model, build_mesh(language_model.device, nodes))
    return ShardedModel(language_model, weights)


def build_sharded_trainer(
    sharded: ShardedModel,
    limits: TrainerLimits,
    special_ids: frozenset[int] | None = None,
    *,
    dropout: bool = False,
) -> tuple[LocalTrainer, FsdpRanks]:
    """Return the trainer of this rank; all ranks call this."""
    language_model = sharded.language_model
    bytes_a_token = None
    if limits.micro_batch_tokens is None:
        language_model.model.train(dropout)
        with sharded.open():
            measured = torch.tensor(measure_activation_bytes(language_model))
        # All ranks must plan the same passes.
        dist.all_reduce(measured, op=dist.ReduceOp.MAX)
        bytes_a_token = int(measured)
    ranks = FsdpRanks(sharded.head_weights)
    trainer = LocalTrainer(
        language_model,
        limits,
        special_ids,
        dropout=dropout,
        ranks=ranks,
        bytes_a_token=bytes_a_token,
    )
    return trainer, ranks
