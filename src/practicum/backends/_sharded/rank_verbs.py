"""The operations of each rank of a sharded trainer, for any program that calls them."""

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from practicum.backends._sharded.building import build_sharded_trainer, load_in_shards
from practicum.backends._sharded.fsdp_ranks import FsdpRanks
from practicum.backends._sharded.parts import copy_parts, load_parts, save_parts
from practicum.backends._sharded.recording import load_recorded
from practicum.backends._sharded.sharding import copy_rows
from practicum.backends._sharded.slices import ShardedModel
from practicum.backends.local.backend import note_noise
from practicum.backends.local.config import MemoryConfig
from practicum.backends.local.device_limits import build_limits
from practicum.backends.local.loading import LoadedModel
from practicum.backends.local.native import name_decoding
from practicum.backends.local.precision import name_dtype
from practicum.backends.local.sizes import measure_dims, measure_trainable
from practicum.backends.local.trainer import LocalTrainer
from practicum.core.faults import VARIABLE, inject_fault
from practicum.core.notes import show_notes
from practicum.errors import ResourceError
from practicum.models.config import ScorerConfig, StudentConfig
from practicum.models.digests import ModelRecord
from practicum.objective import Objective
from practicum.ports import AdamParams, WeightUpdateRule
from practicum.ports.engines import EngineChoice
from practicum.ports.metering import count_heads
from practicum.types import Datum, ForwardResult, Metrics

PACKAGES = ("practicum", "torch", "transformers")
"""The packages that must have the same version on all machines."""


def list_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of the packages that all machines must share."""
    return {package: version(package) for package in packages}


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """The driver's settings, which every process applies."""

    versions: Mapping[str, str]
    threads: int
    limits: MemoryConfig
    faults: str
    """The points at which tests kill processes; see `practicum.core.faults`."""

    @classmethod
    def read(cls, limits: MemoryConfig, packages: Sequence[str] = PACKAGES) -> "ProcessSettings":
        """Return the settings of this process, which is the driver."""
        faults = os.environ.get(VARIABLE, "")
        return cls(list_versions(packages), torch.get_num_threads(), limits, faults)

    def apply(self, title: str) -> None:
        """Prepare this process; raises ResourceError if its packages are not the driver's."""
        torch.set_num_threads(self.threads)
        os.environ[VARIABLE] = self.faults
        for package, installed in list_versions(tuple(self.versions)).items():
            if installed != self.versions[package]:
                raise ResourceError(
                    f"{title} on {socket.gethostname()} has {package} {installed}, the driver has "
                    f"{self.versions[package]}; install the same versions on all machines"
                )


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """A model to load: its settings, the folder of a from-scratch model, and its role."""

    config: ScorerConfig | StudentConfig
    folder: Path | None
    name: str
    seed: int = 0
    engine: EngineChoice | None = None
    """The engine that a sampler uses; None: the sampler decodes by itself."""
    record: ModelRecord | None = None
    """The run's record of the model's files; None: the files are not compared."""


@contextmanager
def collect_notes() -> Iterator[list[str]]:
    """Collect what the block logs for the user."""
    notes: list[str] = []
    with show_notes(notes.append):
        yield notes


def describe_model(loaded: LoadedModel) -> dict[str, Any]:
    """Return the facts about a model that the driver needs."""
    model = loaded.language_model
    return {
        "renderer": loaded.renderer,
        "context_length": loaded.context_length,
        "source": loaded.source,
        "dims": measure_dims(model),
        "decoding": name_decoding(model),
        "dtype": name_dtype(model),
    }


class ShardedRank:
    """A process with a shard of the student, and of the weights that follow it.

    All ranks receive the same calls in the same order.
    """

    def __init__(self, rank: int, nodes: int, settings: ProcessSettings) -> None:
        self._rank = rank
        self._nodes = nodes
        self._settings = settings
        self._verb = ""
        self._trainer: LocalTrainer | None = None
        self._ranks: FsdpRanks | None = None
        self._followers: dict[str, dict[str, Tensor]] = {}
        self._copy: Callable[[Path], None] | None = None

    def load(self, model: ModelSettings) -> dict[str, Any]:
        """Load this rank's shard of the student."""
        self._verb = "load"
        config = model.config
        assert isinstance(config, StudentConfig), "trainers train a student"
        with collect_notes() as notes:
            (loaded, sharded), record = load_recorded(lambda: self._load_shard(model), model.record)
            with sharded.open():
                note_noise(config, loaded)
        language_model = sharded.language_model
        self._trainer, self._ranks = build_sharded_trainer(
            sharded,
            build_limits(language_model.device, self._settings.limits),
            loaded.renderer.special_ids,
            dropout=config.dropout,
        )
        return describe_model(loaded) | {
            "trainable_dims": measure_trainable(language_model),
            "state_bytes": self._trainer.state_bytes,
            "record": record,
            "notes": notes,
        }

    def _load_shard(self, model: ModelSettings) -> tuple[LoadedModel, ShardedModel]:
        decoding = self._settings.limits.decoding
        return load_in_shards(model.config, model.folder, model.seed, self._nodes, decoding)

    def forward_backward(
        self, data: Sequence[Datum], objective: Objective, seed: int
    ) -> tuple[ForwardResult | None, Counter[str]]:
        """Accumulate this rank's gradient; the first rank reports, each counts its heads."""
        self._verb = "forward_backward"
        reads: Counter[str] = Counter()
        result = self._get_trainer().forward_backward(count_heads(data, reads), objective, seed)
        return result if self._rank == 0 else None, reads

    def optim_step(self, params: AdamParams) -> Metrics:
        """Take a step with this rank's rows."""
        self._verb = "optim_step"
        return self._get_trainer().optim_step(params)

    def begin_following(self, follower: str) -> None:
        """Copy this rank's rows of the student for a self-teacher."""
        self._verb = "begin_following"
        weights = self._find_weights()
        self._followers[follower] = {name: weight.clone() for name, weight in weights.items()}

    @torch.no_grad()
    def load_follower(self, follower: str, tensors: Mapping[str, Tensor]) -> None:
        """Restore this rank's rows of a self-teacher."""
        self._verb = "load_follower"
        for name, weight in self._followers[follower].items():
            if name in tensors:
                copy_rows(weight, tensors[name])

    @torch.no_grad()
    def follow(self, follower: str, rule: WeightUpdateRule, step: int) -> None:
        """Move a self-teacher's rows after a step."""
        self._verb = "follow"
        student = self._find_weights()
        for name, weight in self._followers[follower].items():
            if rule.weights == "ema":
                weight.lerp_(student[name], rule.rate)
            elif rule.weights == "periodic" and step % rule.period == 0:
                weight.copy_(student[name])

    def save(self, folder: Path) -> None:
        """Write this rank's tensors of a checkpoint."""
        self._verb = "save"
        save_parts(self._get_trainer(), folder)
        inject_fault(f"rank-{self._rank}.saved")

    def copy_state(self) -> None:
        """Copy this rank's tensors of a checkpoint to the host, for `write_copy`."""
        self._verb = "copy_state"
        self._copy = copy_parts(self._get_trainer())

    def write_copy(self, folder: Path) -> None:
        """Write the copied tensors; only this operation needs no other rank."""
        write, self._copy = self._copy, None
        assert write is not None, "a state is copied before it is written"
        write(folder)
        inject_fault(f"rank-{self._rank}.saved")

    def load_state(self, folder: Path, moments: bool) -> None:
        """Restore this rank's rows of a checkpoint."""
        self._verb = "load_state"
        load_parts(self._get_trainer(), folder, moments=moments)

    def _get_trainer(self) -> LocalTrainer:
        assert self._trainer is not None, "a rank is loaded before it is asked"
        return self._trainer

    def _find_weights(self, follower: str = "") -> Mapping[str, Tensor]:
        """Return this rank's rows of the student, or of a self-teacher."""
        if follower:
            return self._followers[follower]
        # Only the model's weights: other trained weights are not part of a model that answers.
        weights = self._get_trainer().language_model.trainable_parameters()
        return {name: weight.detach() for name, weight in weights.items()}
