"""The programs of a cluster's processes: a rank of the trainers, and a model that only answers.

Nothing is loaded in a constructor: Ray reports an error there as the death of the process.
"""

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor

from practicum.backends._engines._trainer import WeightKeeper
from practicum.backends._sharded.building import build_sharded_trainer, load_in_shards
from practicum.backends._sharded.fsdp_ranks import FsdpRanks
from practicum.backends._sharded.parts import collect_part, copy_parts, load_parts, save_parts
from practicum.backends._sharded.sharded_scorer import ShardedScorer
from practicum.backends._sharded.sharding import copy_rows
from practicum.backends._sharded.slices import ShardedModel
from practicum.backends.local import MemoryConfig
from practicum.backends.local.backend import note_noise
from practicum.backends.local.device_limits import build_limits
from practicum.backends.local.engine import open_keeper
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.loading import LoadedModel, choose_device, load_by_role
from practicum.backends.local.native import name_decoding
from practicum.backends.local.residency import build_scorer
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.sizes import measure_dims, measure_trainable
from practicum.backends.local.trainer import LocalTrainer
from practicum.backends.ray.references import (
    PackedAnswers,
    PackedHead,
    PackedTensor,
    ReaderDevice,
    WeightsReference,
    pack_signals,
)
from practicum.core.faults import VARIABLE, inject_fault
from practicum.core.notes import show_notes
from practicum.errors import ResourceError
from practicum.models.config import ScorerConfig, StudentConfig
from practicum.objective import Objective, Signal
from practicum.ports import AdamParams, SamplingClient, WeightUpdateRule
from practicum.ports.engines import EngineChoice
from practicum.ports.metering import count_heads
from practicum.types import (
    Datum,
    ForwardResult,
    Metrics,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
)

PACKAGES = ("practicum", "torch", "transformers", "ray")
"""The packages that must have one version on all machines."""


def list_versions() -> dict[str, str]:
    """Return the versions of the packages that all machines must share."""
    return {package: version(package) for package in PACKAGES}


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """The settings of every process, as the driver has them."""

    versions: Mapping[str, str]
    threads: int
    limits: MemoryConfig
    faults: str
    """The points at which tests kill processes; see `practicum.core.faults`."""

    def apply(self, title: str) -> None:
        """Prepare this process; raises ResourceError if its packages are not the driver's."""
        torch.set_num_threads(self.threads)
        os.environ[VARIABLE] = self.faults
        for package, installed in list_versions().items():
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
    """The engine by which a sampler samples; None: by itself."""


def _load(settings: ModelSettings, decoding: str) -> LoadedModel:
    """Load a model, with the device of its weights as that of everything that is read."""
    loaded = load_by_role(settings.config, settings.seed, settings.folder, decoding)
    ReaderDevice.device = loaded.language_model.device
    return loaded


@contextmanager
def _collect_notes() -> Iterator[list[str]]:
    """Collect what the block logs for the user."""
    notes: list[str] = []
    with show_notes(notes.append):
        yield notes


def _describe(loaded: LoadedModel) -> dict[str, Any]:
    """Return the facts about a model that the driver needs."""
    model = loaded.language_model
    return {
        "renderer": loaded.renderer,
        "context_length": loaded.context_length,
        "source": loaded.source,
        "dims": measure_dims(model),
        "decoding": name_decoding(model),
    }


class TrainerRank:
    """A process with shards of the student, of teachers, or of both.

    Every verb is called in all ranks in one order.
    """

    def __init__(
        self, title: str, rank: int, count: int, nodes: int, settings: ProcessSettings
    ) -> None:
        self._title = title
        self._rank = rank
        self._count = count
        self._nodes = nodes
        self._settings = settings
        self._verb = ""
        self._trainer: LocalTrainer | None = None
        self._ranks: FsdpRanks | None = None
        self._followers: dict[str, dict[str, Tensor]] = {}
        self._scorers: dict[str, ShardedScorer] = {}
        self._copy: Callable[[Path], None] | None = None

    def find_address(self) -> str:
        """Return an address of this machine at which the ranks can meet."""
        with socket.socket() as unused:
            unused.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{unused.getsockname()[1]}"

    def identify(self) -> tuple[int, str]:
        """Return the number of this process, and the name of its machine."""
        return os.getpid(), socket.gethostname()

    @ray.method(concurrency_group="watch")
    def describe_progress(self) -> str:
        """Return the work in progress; another thread answers this."""
        place = "" if self._ranks is None else self._ranks.place
        return f"{place} of {self._verb}" if place else self._verb

    def meet(self, address: str, patience: float) -> None:
        """Meet the other ranks."""
        self._verb = "meet"
        self._settings.apply(f"{self._title} {self._rank}")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            init_method=address,
            rank=self._rank,
            world_size=self._count,
            timeout=timedelta(seconds=patience),
        )

    def load(self, model: ModelSettings) -> dict[str, Any]:
        """Load this rank's shard of the student."""
        self._verb = "load"
        config = model.config
        assert isinstance(config, StudentConfig), "trainers train a student"
        with _collect_notes() as notes:
            loaded, sharded = self._load_shard(model)
            with sharded.open():
                note_noise(config, loaded)
        language_model = sharded.language_model
        self._trainer, self._ranks = build_sharded_trainer(
            sharded,
            build_limits(language_model.device, self._settings.limits),
            loaded.renderer.special_ids,
            dropout=config.dropout,
        )
        return _describe(loaded) | {
            "trainable_dims": measure_trainable(language_model),
            "state_bytes": self._trainer.state_bytes,
            "notes": notes,
        }

    def load_scorer(self, model: ModelSettings) -> dict[str, Any]:
        """Load this rank's shard of a teacher."""
        self._verb = f"load_scorer of {model.name}"
        with _collect_notes() as notes:
            loaded, sharded = self._load_shard(model)
        limits = build_limits(sharded.language_model.device, self._settings.limits)
        self._scorers[model.name] = ShardedScorer(sharded, limits.chunk_tokens)
        reason = f"{loaded.source}: a teacher in shards only scores; it is too slow to sample from"
        return _describe(loaded) | {"no_sampling_reason": reason, "notes": notes}

    def _load_shard(self, model: ModelSettings) -> tuple[LoadedModel, ShardedModel]:
        ReaderDevice.device = choose_device(model.config)
        return load_in_shards(model.config, model.folder, model.seed, self._nodes)

    def score(
        self, name: str, requests: Sequence[ScoreRequest], signal: Signal
    ) -> tuple[PackedAnswers, PackedTensor | None]:
        """Score this rank's texts with a teacher."""
        self._verb = f"score of {name}"
        answers = pack_signals(self._scorers[name].score(requests, signal))
        inject_fault(f"{name}-{self._rank}.score")
        return answers

    def pack_head(self, name: str) -> tuple[int, PackedHead | None]:
        """Return the size of a teacher's vocabulary, and its head in the first rank alone."""
        self._verb = f"pack_head of {name}"
        head = self._scorers[name].gather_head()
        return head.vocab_size, PackedHead.from_head(head) if self._rank == 0 else None

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

    def publish(self, follower: str) -> tuple[int, dict[str, PackedTensor]]:
        """Gather the trainable weights, or a self-teacher's; return this rank's part of them.

        Its size in bytes comes first.
        """
        self._verb = "publish"
        weights = self._followers[follower] if follower else self._get_weights()
        part = {
            name: PackedTensor.from_tensor(weight) for name, weight in collect_part(weights).items()
        }
        return sum(packed.array.nbytes for packed in part.values()), part

    def begin_following(self, follower: str) -> None:
        """Copy this rank's rows of the student for a self-teacher."""
        self._verb = "begin_following"
        weights = self._get_weights()
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
        student = self._get_weights()
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

    @ray.method(concurrency_group="write")
    def write_copy(self, folder: Path) -> None:
        """Write the copied tensors; another thread does this, beside the next steps."""
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

    def _get_weights(self) -> dict[str, Tensor]:
        return self._get_trainer().save_state()["student"]


class ModelProcess:
    """A process with a full model that samples and scores, with its own weights or published ones.

    It holds nothing that a new process could not load again, so Ray may start it anew at any time.
    """

    def __init__(self, settings: ProcessSettings, model: ModelSettings) -> None:
        self._settings = settings
        self._model = model
        self._language_model: LanguageModel | None = None
        self._client: SamplingClient | None = None
        self._facts: dict[str, Any] = {}
        self._head: PackedHead | None = None
        self._version: int | None = None
        self._keeper: WeightKeeper | None = None

    def describe(self) -> dict[str, Any]:
        """Load the model and return the facts about it."""
        self._open(None)
        return self._facts

    def identify(self) -> tuple[int, str]:
        """Return the number of this process, and the name of its machine."""
        return os.getpid(), socket.gethostname()

    def sample(
        self,
        requests: Sequence[SampleRequest],
        params: SamplingParams,
        weights: WeightsReference | None,
    ) -> tuple[list[Sample], float | None]:
        """Sample one completion a request, and return how well the engine's weights agree.

        This is the canary's largest difference in nats, None without an engine.
        """
        client = self._open(weights)
        if self._keeper is None:
            samples, difference = client.sample(requests, params), None
        else:
            # Without weights of their own number, they are those that were loaded.
            version = self._version or 0
            samples = self._keeper.sample(client, version, requests, params)
            difference = self._keeper.difference
        inject_fault(f"{self._model.name}.sample")
        return samples, difference

    def score(
        self, requests: Sequence[ScoreRequest], signal: Signal, weights: WeightsReference | None
    ) -> tuple[PackedAnswers, PackedTensor | None]:
        """Score the requests; return signals without states, and the states of all of them."""
        answers = pack_signals(self._open(weights).score(requests, signal))
        inject_fault(f"{self._model.name}.score")
        return answers

    def pack_head(self, weights: WeightsReference | None) -> tuple[PackedHead, int]:
        """Return the head that reads the states of `score`, and the size of its vocabulary."""
        self._open(weights)
        head = self._head
        if head is None:
            assert self._language_model is not None, "a scorer's head is packed when it is loaded"
            head = PackedHead.from_head(self._language_model.head())
        return head, head.settings["vocab_size"]

    def _open(self, weights: WeightsReference | None) -> SamplingClient:
        """Return a client of the model with the weights, which are fetched if they are new."""
        if self._client is None:
            self._load()
        assert self._client is not None
        if weights is not None and weights.number != self._version:
            assert self._language_model is not None
            parameters = self._language_model.trainable_parameters()
            with torch.no_grad():
                for name, packed in weights.fetch().items():
                    parameters[name].copy_(packed.to_tensor())
            self._version = weights.number
        return self._client

    def _load(self) -> None:
        self._settings.apply(self._model.name)
        with _collect_notes() as notes:
            loaded = _load(self._model, self._settings.limits.decoding)
        model, config = loaded.language_model, self._model.config
        limits = build_limits(model.device, self._settings.limits)
        reason = model.no_sampling_reason
        self._facts = _describe(loaded) | {"no_sampling_reason": reason, "notes": notes}
        if isinstance(config, StudentConfig):
            self._language_model = model
            sampler = LocalSampler(model, {}, limits.sampling_batch, limits.chunk_tokens)
            self._client = sampler
            self._open_engine(loaded, sampler)
            return
        # Packed while the weights are in memory: their residency may take them out.
        self._head = PackedHead.from_head(model.head())
        del model
        self._client = build_scorer(loaded, config, limits.sampling_batch, limits.chunk_tokens)

    def _open_engine(self, loaded: LoadedModel, sampler: LocalSampler) -> None:
        """Start the engine of the recipe, which gets its weights from this process's student."""
        if self._model.engine is None:
            return
        with _collect_notes() as notes:
            self._keeper = open_keeper(loaded, self._model.engine, sampler)
        self._facts["notes"] += notes
        if self._keeper is not None:
            self._facts["decoding"] = self._keeper.engine.name
