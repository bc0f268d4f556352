"""Define the processes of a cluster: a rank of the trainers, and a model that only answers.

Constructors load nothing: Ray reports an error in a constructor as the death of the process.
"""

import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from practicum.backends._sharded.parts import collect_part
from practicum.backends._sharded.rank_verbs import PACKAGES as TORCH_PACKAGES
from practicum.backends._sharded.rank_verbs import (
    ModelSettings,
    ProcessSettings,
    ShardedRank,
    collect_notes,
    describe_model,
)
from practicum.backends._sharded.recording import load_recorded
from practicum.backends._sharded.sharded_scorer import ShardedScorer
from practicum.backends._sharded.slices import ShardedModel
from practicum.backends.local.device_limits import build_limits
from practicum.backends.local.engine import open_keeper
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.loading import LoadedModel, choose_device, load_by_role
from practicum.backends.local.native import name_ways
from practicum.backends.local.residency import build_scorer
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.scalar_head import LocalScalarModel
from practicum.backends.local.sizes import measure_trainable
from practicum.backends.ray.pulse import Sign
from practicum.backends.ray.references import (
    PackedAnswers,
    PackedHead,
    PackedState,
    PackedTensor,
    ReaderDevice,
    WeightsReference,
    pack_signals,
    pack_state,
)
from practicum.core.faults import inject_fault
from practicum.engine_service.engine_trainer import WeightKeeper
from practicum.models.config import StudentConfig
from practicum.models.digests import ModelRecord
from practicum.objective import Signal
from practicum.ports import AdamParams, SamplingClient
from practicum.types import Metrics, Sample, SampleRequest, SamplingParams, ScoreRequest

PACKAGES = (*TORCH_PACKAGES, "ray")
"""The packages that must have the same version on all machines."""


def _load(settings: ModelSettings, decoding: str) -> LoadedModel:
    """Load a model, and read all fetched tensors on the device of its weights."""
    loaded = load_by_role(settings.config, settings.seed, settings.folder, decoding)
    ReaderDevice.device = loaded.language_model.device
    return loaded


class TrainerRank(ShardedRank):
    """A process of the cluster with shards of the student, of teachers, or of both."""

    def __init__(
        self, title: str, rank: int, count: int, nodes: int, settings: ProcessSettings
    ) -> None:
        super().__init__(rank, nodes, settings)
        self._title = title
        self._count = count
        self._scorers: dict[str, ShardedScorer] = {}

    def find_address(self) -> str:
        """Return an address of this machine at which the ranks can meet."""
        with socket.socket() as unused:
            unused.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{unused.getsockname()[1]}"

    @ray.method(concurrency_group="watch")
    def give_sign(self) -> Sign:
        """Return a sign of life with the work in progress; a separate thread answers this call."""
        place = "" if self._ranks is None else self._ranks.place
        return Sign.give(f"{place} of {self._verb}" if place else self._verb)

    def meet(self, address: str, patience: float) -> None:
        """Connect to all other ranks."""
        self._verb = "meet"
        self._settings.apply(f"{self._title} {self._rank}")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            init_method=address,
            rank=self._rank,
            world_size=self._count,
            timeout=timedelta(seconds=patience),
        )

    def load_scorer(self, model: ModelSettings) -> dict[str, Any]:
        """Load this rank's shard of a teacher."""
        self._verb = f"load_scorer of {model.name}"
        with collect_notes() as notes:
            (loaded, sharded), record = load_recorded(lambda: self._load_shard(model), model.record)
        limits = build_limits(sharded.language_model.device, self._settings.limits)
        self._scorers[model.name] = ShardedScorer(sharded, limits.chunk_tokens)
        reason = f"{loaded.source}: a teacher in shards only scores; it is too slow to sample from"
        facts = {"no_sampling_reason": reason, "record": record, "notes": notes}
        return describe_model(loaded) | facts

    def _load_shard(self, model: ModelSettings) -> tuple[LoadedModel, ShardedModel]:
        ReaderDevice.device = choose_device(model.config)
        return super()._load_shard(model)

    def score(
        self, name: str, requests: Sequence[ScoreRequest], signal: Signal
    ) -> tuple[PackedAnswers, PackedTensor | None]:
        """Score this rank's texts with a teacher."""
        self._verb = f"score of {name}"
        answers = pack_signals(self._scorers[name].score(requests, signal))
        inject_fault(f"{name}-{self._rank}.score")
        return answers

    def pack_head(self, name: str) -> tuple[int, PackedHead | None]:
        """Return the size of a teacher's vocabulary, and its head only in the first rank."""
        self._verb = f"pack_head of {name}"
        head = self._scorers[name].gather_head()
        return head.vocab_size, PackedHead.from_head(head) if self._rank == 0 else None

    def publish(self, follower: str) -> tuple[dict[str, int], PackedState]:
        """Gather the trainable weights, or a self-teacher's; return this rank's part.

        The bytes of its tensors come first.
        """
        self._verb = "publish"
        return pack_state(collect_part(self._find_weights(follower)))

    @ray.method(concurrency_group="write")
    def write_concurrently(self, folder: Path) -> None:
        """Write the copied tensors; a separate thread does this during the next steps."""
        self.write_copy(folder)


class ScalarProcess:
    """A process with a trained model that has one output per token.

    Its weights exist only here, so it cannot be restarted separately.
    """

    def __init__(self, settings: ProcessSettings, model: ModelSettings) -> None:
        self._settings = settings
        self._model = model
        self._scalar: LocalScalarModel | None = None
        self._verb = ""

    @ray.method(concurrency_group="watch")
    def give_sign(self) -> Sign:
        """Return a sign of life with the work in progress; a separate thread answers this call."""
        return Sign.give(self._verb)

    def load(self, record: ModelRecord | None) -> dict[str, Any]:
        """Load the model from the recorded files and return the facts about it."""
        self._verb = "load"
        self._settings.apply(self._model.name)
        if record is not None:
            record.check(thorough=True)
        with collect_notes() as notes:
            loaded = _load(self._model, self._settings.limits.decoding)
        model = loaded.language_model
        self._scalar = LocalScalarModel(model, build_limits(model.device, self._settings.limits))
        facts = describe_model(loaded)
        return {
            "renderer": facts["renderer"],
            "source": facts["source"],
            "dims": facts["dims"],
            "dtype": facts["dtype"],
            "trainable_dims": measure_trainable(model),
            "record": record and record.confirm(),
            "notes": notes,
        }

    def predict(self, texts: Sequence[ScoreRequest]) -> list[Float[Tensor, " _"]]:
        """Return the output at the state before each of a text's tokens."""
        self._verb = "predict"
        # Copy each text's numbers: pickling a slice would send all of them.
        return [numbers.clone() for numbers in self._get_scalar().predict(texts)]

    def fit(
        self,
        texts: Sequence[ScoreRequest],
        slopes: Sequence[Float[Tensor, " _"]],
        params: AdamParams,
    ) -> Metrics:
        """Take one AdamW step along the negative slopes."""
        self._verb = "fit"
        metrics = self._get_scalar().fit(texts, slopes, params)
        inject_fault(f"{self._model.name}.fit")
        return metrics

    def pack_state(self) -> tuple[dict[str, int], PackedState]:
        """Return the bytes of the tensors of the state, and the tensors."""
        self._verb = "pack_state"
        return pack_state(self._get_scalar().save_state())

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore weights and moments."""
        self._verb = "load_state"
        self._get_scalar().load_state(tensors)

    def _get_scalar(self) -> LocalScalarModel:
        assert self._scalar is not None, "a model is loaded before it is asked"
        return self._scalar


class ModelProcess:
    """A process with a full model that samples and scores, with its own weights or published ones.

    It holds nothing that a new process could not load again, so Ray may start it again at any time.
    Each request carries the record of the files; a new process compares the files that it loads
    with it.
    """

    def __init__(self, settings: ProcessSettings, model: ModelSettings) -> None:
        self._settings = settings
        self._model = model
        self._language_model: LanguageModel | None = None
        self._client: SamplingClient | None = None
        self._facts: dict[str, Any] = {}
        self._record: ModelRecord | None = None
        self._verb = ""
        self._head: PackedHead | None = None
        self._version: int | None = None
        self._keeper: WeightKeeper | None = None

    @ray.method(concurrency_group="watch")
    def give_sign(self) -> Sign:
        """Return a sign of life with the work in progress; a separate thread answers this call."""
        return Sign.give(self._verb)

    def describe(self, record: ModelRecord | None = None) -> dict[str, Any]:
        """Load the model for the first time and return the facts about it."""
        self._verb = "load"
        if self._client is None:
            self._load(record, thorough=True)
        return self._facts

    def sample(
        self,
        requests: Sequence[SampleRequest],
        params: SamplingParams,
        weights: WeightsReference | None,
        record: ModelRecord | None = None,
    ) -> tuple[list[Sample], float | None]:
        """Sample one completion per request, and return how well the engine's weights agree.

        The agreement is the canary's largest difference in nats, or None without an engine.
        """
        self._verb = "sample"
        client = self._open(weights, record)
        if self._keeper is None:
            samples, difference = client.sample(requests, params), None
        else:
            # Without a version, the weights are the weights that were loaded.
            version = self._version or 0
            samples = self._keeper.sample(client, version, requests, params)
            difference = self._keeper.difference
        inject_fault(f"{self._model.name}.sample")
        return samples, difference

    def score(
        self,
        requests: Sequence[ScoreRequest],
        signal: Signal,
        weights: WeightsReference | None,
        record: ModelRecord | None = None,
    ) -> tuple[PackedAnswers, PackedTensor | None]:
        """Score the requests; return signals without states, and the states of all of them."""
        self._verb = "score"
        answers = pack_signals(self._open(weights, record).score(requests, signal))
        inject_fault(f"{self._model.name}.score")
        return answers

    def pack_head(
        self, weights: WeightsReference | None, record: ModelRecord | None = None
    ) -> tuple[PackedHead, int]:
        """Return the head that reads the states of `score`, and the size of its vocabulary."""
        self._open(weights, record)
        head = self._head
        if head is None:
            assert self._language_model is not None, "a scorer's head is packed when it is loaded"
            head = PackedHead.from_head(self._language_model.head())
        return head, head.settings["vocab_size"]

    def _open(self, weights: WeightsReference | None, record: ModelRecord | None) -> SamplingClient:
        """Return a client of the model with the weights, which are fetched if they are new."""
        if self._client is None:
            self._load(record, thorough=False)
        assert self._client is not None
        if record is not None and self._record is not None:
            record.require_equal([self._record])
        if weights is not None and weights.number != self._version:
            assert self._language_model is not None
            parameters = self._language_model.trainable_parameters()
            with torch.no_grad():
                for name, packed in weights.fetch().items():
                    parameters[name].copy_(packed.to_tensor())
            self._version = weights.number
        return self._client

    def _load(self, record: ModelRecord | None, *, thorough: bool) -> None:
        """Load the model from the recorded files; `thorough` compares the digest of each file."""
        self._settings.apply(self._model.name)
        if record is not None:
            record.check(thorough=thorough)
        with collect_notes() as notes:
            loaded = _load(self._model, self._settings.limits.decoding)
        self._record = record = record and record.confirm()
        model, config = loaded.language_model, self._model.config
        limits = build_limits(model.device, self._settings.limits)
        self._facts = describe_model(loaded) | {
            "no_sampling_reason": model.no_sampling_reason,
            "record": record,
            "notes": notes,
        }
        if isinstance(config, StudentConfig):
            self._language_model = model
            sampler = LocalSampler(model, {}, limits.sampling_batch, limits.chunk_tokens)
            self._client = sampler
            self._open_engine(loaded, sampler)
            return
        # Pack while the weights are in memory: their residency may unload them.
        self._head = PackedHead.from_head(model.head())
        del model
        self._client = build_scorer(
            loaded, config, limits.sampling_batch, limits.chunk_tokens, record
        )

    def _open_engine(self, loaded: LoadedModel, sampler: LocalSampler) -> None:
        """Start the engine of the recipe, which gets its weights from this process's student."""
        if self._model.engine is None:
            return
        with collect_notes() as notes:
            self._keeper = open_keeper(loaded, self._model.engine, sampler)
        self._facts["notes"] += notes
        if self._keeper is not None:
            decoding = name_ways(self._keeper.engine.name, self._facts["decoding"])
            self._facts["decoding"] = decoding
