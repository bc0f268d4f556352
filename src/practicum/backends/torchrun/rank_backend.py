"""Implement the backend in the first process: every verb is a request to all processes."""

import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from practicum.backends._sharded.following import ShardedSelfTeacher
from practicum.backends._sharded.rank_verbs import ModelSettings, ProcessSettings
from practicum.backends.local.backend import prepare_folder, record_files
from practicum.backends.torchrun.config import Config
from practicum.backends.torchrun.lockstep import LockstepGroup, Membership
from practicum.backends.torchrun.rank_process import STUDENT
from practicum.errors import CapabilityError, ModelError
from practicum.models.config import ScorerConfig, StudentConfig
from practicum.objective import EVERY_SIGNAL, Objective, Signal
from practicum.ports import (
    AdamParams,
    Backend,
    BackendContext,
    Capabilities,
    Model,
    SamplingClient,
    Student,
    WeightUpdateRule,
)
from practicum.types import (
    Datum,
    ForwardResult,
    HeadLike,
    Metrics,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class RankHead:
    """A model of all ranks by name, and the head that each rank finds under the name.

    `serial` differs if the weights differ. See `practicum.types.HeadLike`.
    """

    number: int
    name: str
    serial: int

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the vocabulary."""
        return self._open().vocab_size

    @property
    def key(self) -> tuple[int, ...]:
        """The serial number of the weights."""
        return (self.serial,)

    def logprobs(self, hidden: Float[Tensor, "*s D"]) -> Float[Tensor, "*s v"]:
        """Return the log-probabilities of all tokens."""
        return self._open().logprobs(hidden)

    def logits(
        self, hidden: Float[Tensor, "*s D"], room: Callable[[], Tensor] | None = None
    ) -> Float[Tensor, "*s v"]:
        """Return the logits."""
        return self._open().logits(hidden, room)

    def release(self) -> None:
        """Free the weights until they are needed again, if this rank can load them again."""
        self._open().release()

    def _open(self) -> HeadLike:
        group = Membership.group
        assert group is not None, "heads are read in the processes of a run"
        return group.processes[self.number].find_head(self.name)


_serials = itertools.count(1)
"""Serial numbers of weights, each unique in a run."""


@dataclass(frozen=True, slots=True)
class RankVerbs:
    """The verbs of one backend's process in every rank."""

    group: LockstepGroup
    number: int

    def ask(self, verb: str, *arguments: Any) -> list[Any]:
        """Run the same call in all ranks, in step."""
        return self.group.ask(self.number, verb, *arguments)

    def ask_each(self, verb: str, shares: Sequence[Sequence[Any]]) -> list[Any]:
        """Let each rank perform its share independently."""
        return self.group.ask_each(self.number, verb, shares)

    def name_model(self, name: str) -> RankHead:
        """Return a model of all ranks with its current weights."""
        return RankHead(self.number, name, next(_serials))

    def load(self, verb: str, model: ModelSettings) -> dict[str, Any]:
        """Load a model in all ranks; log their notes, and return the facts about it."""
        answers = self.ask(verb, model)
        notes = [note for facts in answers for note in facts["notes"]]
        for note in dict.fromkeys(notes):
            log.info(note)
        return {name: fact for name, fact in answers[0].items() if name != "notes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStudent(Student):
    """A student with its shards in the ranks."""

    trainer: "RankTrainer"


class RankBackend(Backend):
    """See `practicum.ports.Backend`."""

    def __init__(self, config: Config, context: BackendContext, group: LockstepGroup) -> None:
        self._context = context
        number = group.open_process(config.nodes, ProcessSettings.read(config))
        context.at_end.callback(group.close_process, number)
        self._verbs = RankVerbs(group, number)

    def load_student(self, config: StudentConfig) -> RankStudent:
        """Let all ranks load the student: a shard, and a full copy to sample from."""
        folder = prepare_folder(config, STUDENT, self._context)
        record = record_files(config, folder, self._context)
        model = ModelSettings(config, folder, STUDENT, self._context.seed, record=record)
        facts = self._verbs.load("load", model)
        return RankStudent(trainer=RankTrainer(self._verbs), **facts)

    def load_scorer(self, config: ScorerConfig, name: str) -> Model:
        """Let all ranks load a frozen model; they share its requests."""
        folder = prepare_folder(config, name, self._context)
        record = record_files(config, folder, self._context)
        facts = self._verbs.load("load_scorer", ModelSettings(config, folder, name, record=record))
        answering = self._verbs.name_model(name)
        client = RankClient(self._verbs, lambda: answering, facts["no_sampling_reason"])
        return Model(client=client, **facts)

    def build_sampler(self, student: Student) -> "RankClient":
        """Return a client that samples from the current weights at each call."""
        return _require_ranks(student).trainer.build_sampling_client()

    def build_self_teacher(
        self, student: Student, rule: WeightUpdateRule, name: str
    ) -> "RankSelfTeacher":
        """Return a scorer with weights that follow the student's by `rule`, in shards."""
        return RankSelfTeacher(_require_ranks(student).trainer, rule, name)

    def save(self, student: Student, folder: Path) -> None:
        """Let every rank write its part of weights and moments."""
        self._verbs.ask("save", folder.absolute())

    def copy_state(self, student: Student) -> Callable[[Path], None]:
        """Let every rank copy its part to its host; return a function that makes them write it."""
        self._verbs.ask("copy_state")
        return lambda folder: self._write_copy(folder.absolute())

    def _write_copy(self, folder: Path) -> None:
        self._verbs.ask_each("write_copy", [(folder,)])

    def load(self, student: Student, folder: Path, *, moments: bool = True) -> None:
        """Let every rank read its rows of a checkpoint from any number of ranks."""
        self._verbs.ask("load_state", folder.absolute(), moments)
        _require_ranks(student).trainer.note_change()

    def export(self, student: Student, folder: Path, *, adapter: bool = False) -> None:
        """Raise an error: one process exports a checkpoint."""
        raise CapabilityError(
            "the student is sharded over several processes; write a checkpoint, then run practicum "
            "export RUN"
        )


class RankTrainer:
    """See `practicum.ports.TrainingClient`."""

    def __init__(self, verbs: RankVerbs) -> None:
        self._verbs = verbs
        # The full student is loaded with the same weights as the shards.
        self._current: RankHead | None = verbs.name_model(STUDENT)
        self._dropped: list[str] = []

    def forward_backward(
        self, data: Sequence[Datum], objective: Objective, seed: int
    ) -> ForwardResult:
        """Send every rank the batch, and return the report of all of them."""
        answers = self._verbs.ask("forward_backward", list(data), objective, seed)
        reads: Counter[str] = Counter()
        for _, counts in answers:
            reads.update(counts)
        return replace(answers[0][0], head_reads=dict(reads))

    def optim_step(self, params: AdamParams) -> Metrics:
        """Take a step in all ranks."""
        metrics = self._verbs.ask("optim_step", params)[0]
        self.note_change()
        return metrics

    def note_change(self) -> None:
        """Note that the weights have changed and must be gathered again before use."""
        self._current = None

    def gather(self) -> RankHead:
        """Return the student with its current weights; they are gathered once for each change."""
        if self._current is None:
            self._current = self.take_weights(STUDENT)
        return self._current

    def take_weights(self, name: str, follower: str = "") -> RankHead:
        """Gather the weights of the student or of a self-teacher for a model that answers."""
        dropped, self._dropped = self._dropped, []
        self._verbs.ask("take_weights", name, follower, dropped)
        return self._verbs.name_model(name)

    def snapshot(self) -> "RankClient":
        """Return a client that samples from the current weights, also after later steps."""
        name = f"snapshot {next(_serials)}"
        model = self.take_weights(name)
        # Every rank holds a copy as long as a client in this process can use it.
        weakref.finalize(model, self._dropped.append, name)
        return RankClient(self._verbs, lambda: model)

    def build_sampling_client(self) -> "RankClient":
        """Return a client that samples from the current weights at each call."""
        return RankClient(self._verbs, self.gather)

    def build_follower(self, get_model: Callable[[], RankHead]) -> "RankClient":
        """Return a client of a model with other weights of the student."""
        return RankClient(self._verbs, get_model)

    def ask(self, verb: str, *arguments: Any) -> list[Any]:
        """Run the same call in all ranks, in step."""
        return self._verbs.ask(verb, *arguments)

    def read_weights(self, model: RankHead) -> dict[str, Tensor]:
        """Return the gathered weights of a model from this rank."""
        return self._verbs.ask_each("get_weights", [(model.name,)])[0]

    def explain_unsupported(self, objective: Objective) -> str | None:
        """Return None: this backend trains every objective."""
        return None


class RankClient(SamplingClient):
    """A `practicum.ports.SamplingClient` for a model in every rank; the ranks share its requests.

    Every completion has its own random stream, so it does not matter which rank samples it.
    """

    def __init__(
        self, verbs: RankVerbs, get_model: Callable[[], RankHead], no_sampling_reason: str = ""
    ) -> None:
        self._verbs = verbs
        self._get_model = get_model
        self._no_sampling_reason = no_sampling_reason

    @property
    def capabilities(self) -> Capabilities:
        """Every signal: the full distribution is known."""
        return EVERY_SIGNAL

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample one completion per request, in order."""
        if self._no_sampling_reason:
            raise ModelError(self._no_sampling_reason)
        return self._share("sample", self._get_model(), requests, params) if requests else []

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Score each request's tokens."""
        if not requests:
            return []
        model = self._get_model()
        signals = self._share("score", model, requests, signal)
        return [
            answer if answer.hidden is None else replace(answer, head=model) for answer in signals
        ]

    def _share(self, verb: str, model: RankHead, requests: Sequence[Any], *settings: Any) -> Any:
        """Let each rank answer neighbouring requests, which share prompts; return all answers."""
        count = self._verbs.group.count
        size = -(-len(requests) // count)
        shares = [
            (model.name, list(requests[rank * size : (rank + 1) * size]), *settings)
            for rank in range(count)
        ]
        return [answer for part in self._verbs.ask_each(verb, shares) for answer in part]


class RankSelfTeacher(ShardedSelfTeacher[RankHead]):
    """The student as its own teacher; every rank has a full copy of the teacher's weights."""

    def __init__(self, trainer: RankTrainer, rule: WeightUpdateRule, name: str) -> None:
        self._trainer = trainer
        super().__init__(rule, name, trainer.ask, trainer.build_follower)

    def gather_student(self) -> RankHead:
        """Gather the student's weights once a step."""
        return self._trainer.gather()

    def keep_student(self) -> RankHead:
        """Gather the student's weights under the teacher's name."""
        return self._trainer.take_weights(self._name)

    def gather_follower(self) -> RankHead:
        """Gather the weights that follow the student's."""
        return self._trainer.take_weights(self._name, self._name)

    def read(self, weights: RankHead) -> dict[str, Tensor]:
        """Return this rank's copy of the tensors."""
        return self._trainer.read_weights(weights)

    def pack(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors themselves, which a collective transfers."""
        return tensors


def note_single() -> None:
    """Log that the models are in this process because it leads no ranks."""
    log.info("backend 'torchrun': outside of practicum run, the models are only in this process")


def _require_ranks(student: Student) -> RankStudent:
    assert isinstance(student, RankStudent), "a backend is given the students that it made"
    return student
