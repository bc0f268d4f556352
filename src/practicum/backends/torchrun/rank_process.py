"""Define the work of each process, which holds a student shard and full models that answer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from practicum.backends._sharded.rank_verbs import (
    ModelSettings,
    ProcessSettings,
    ShardedRank,
    collect_notes,
    describe_model,
)
from practicum.backends._sharded.recording import load_recorded
from practicum.backends._sharded.sharding import gather_tensor
from practicum.backends.local.device_limits import build_limits
from practicum.backends.local.host_states import HostStates
from practicum.backends.local.loading import load_by_role
from practicum.backends.local.native import name_decoding
from practicum.backends.local.residency import build_scorer
from practicum.backends.local.sampler import LocalSampler
from practicum.core.notes import hide_notes
from practicum.models.config import ScorerConfig
from practicum.objective import Full, Signal
from practicum.ports import SamplingClient
from practicum.types import (
    HeadLike,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)

STUDENT = "student"
"""The role of the student among the models that answer."""

SHORT_TEXT = ScoreRequest((0,), (0,))
"""A text that is scored only to get the head that comes with its states."""


class RankProcess(ShardedRank):
    """A rank that also holds full models: the student with latest or earlier weights, and teachers.

    These models answer independently of other ranks, and every rank has the same models.
    """

    def __init__(self, rank: int, nodes: int, settings: ProcessSettings) -> None:
        super().__init__(rank, nodes, settings)
        self._clients: dict[str, SamplingClient] = {}
        self._heads: dict[str, HeadLike] = {}

    def load(self, model: ModelSettings) -> dict[str, Any]:
        """Load this rank's shard of the student, and the full student to sample from."""
        facts = super().load(model)
        limits = self._settings.limits
        # Loading the shards has already shown its notes.
        with hide_notes():
            loaded = load_by_role(model.config, model.seed, model.folder, limits.decoding)
        if facts["record"] is not None:
            facts["record"].check(thorough=False)
        language_model = loaded.language_model
        batch = build_limits(language_model.device, limits)
        self._clients[STUDENT] = LocalSampler(
            language_model, {}, batch.sampling_batch, batch.chunk_tokens
        )
        return facts | {"decoding": name_decoding(language_model)}

    def load_scorer(self, model: ModelSettings) -> dict[str, Any]:
        """Load a full frozen model."""
        config, limits = model.config, self._settings.limits
        assert isinstance(config, ScorerConfig), "a frozen model is a scorer"
        with collect_notes() as notes:
            loaded, record = load_recorded(
                lambda: load_by_role(config, model.seed, model.folder, limits.decoding),
                model.record,
            )
        facts = describe_model(loaded) | {"record": record, "notes": notes}
        language_model = loaded.language_model
        facts |= {"no_sampling_reason": language_model.no_sampling_reason}
        batch = build_limits(language_model.device, limits)
        del language_model
        self._clients[model.name] = build_scorer(
            loaded, config, batch.sampling_batch, batch.chunk_tokens, record
        )
        return facts

    @torch.no_grad()
    def take_weights(self, name: str, follower: str, dropped: Sequence[str]) -> None:
        """Gather the student's weights, or a self-teacher's, for the model `name` that answers.

        The models in `dropped` are no longer used. All ranks call this.
        """
        self._verb = "take_weights"
        for model in dropped:
            self._clients.pop(model, None)
            self._heads.pop(model, None)
        student = self._get_student()
        parameters = student.language_model.trainable_parameters()
        overlay = {}
        for key, rows in self._find_weights(follower).items():
            full = gather_tensor(rows)
            if name == STUDENT:
                parameters[key].copy_(full)
            else:
                overlay[key] = full.to(parameters[key].device, copy=True)
        if name != STUDENT:
            self._clients[name] = replace(student, overlay=overlay)
        self._heads.pop(name, None)

    def get_weights(self, name: str) -> dict[str, Tensor]:
        """Return the weights that `take_weights` gathered for a model."""
        client = self._clients[name]
        assert isinstance(client, LocalSampler), "only the student's weights are gathered"
        return dict(client.overlay)

    def sample(
        self, name: str, requests: Sequence[SampleRequest], params: SamplingParams
    ) -> list[Sample]:
        """Sample this rank's completions."""
        return self._clients[name].sample(requests, params)

    def score(
        self, name: str, requests: Sequence[ScoreRequest], signal: Signal
    ) -> list[TeacherSignal]:
        """Score this rank's texts; the head is not returned because every rank has the same."""
        signals = self._clients[name].score(requests, signal) if requests else []
        return [replace(_move_to_host(signal), head=None) for signal in signals]

    def find_head(self, name: str) -> HeadLike:
        """Return the head that reads the states of a model."""
        if name not in self._heads:
            (signal,) = self._clients[name].score([SHORT_TEXT], Full())
            assert signal.head is not None, "whole distributions come with their head"
            self._heads[name] = signal.head
        return self._heads[name]

    def _get_student(self) -> LocalSampler:
        student = self._clients[STUDENT]
        assert isinstance(student, LocalSampler), "the student is loaded as a sampler"
        return student


def _move_to_host(signal: TeacherSignal) -> TeacherSignal:
    """Return a signal with states on the host, which any rank can read on its own device."""
    states = signal.hidden
    if not isinstance(states, Tensor) or states.device.type == "cpu":
        return signal
    finite = bool(torch.isfinite(states).all())
    # A device without an index is the current device of the reading process.
    return replace(
        signal, hidden=HostStates(states.cpu(), torch.device(states.device.type), finite)
    )
