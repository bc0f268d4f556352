"""The local backend on paper: models that have sizes and no weights, so that a step can be gone through before it is paid for."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from practicum.backends.local import Config
from practicum.backends.local.graph import plan_micro_batch
from practicum.backends.local.loading import LoadedModel
from practicum.backends.local.paper import footprint_of, load_weightless
from practicum.backends.local.prepared import MIN_DECODE_STEPS, MIN_HEAD_ROWS
from practicum.backends.local.sampler import SCORED_TOKENS
from practicum.backends.local.scratch import scratch_folder
from practicum.backends.local.sizes import measure_dims, measure_trainable
from practicum.costs import GraphPlan
from practicum.functional.head import Head
from practicum.models.config import (
    ModelConfig,
    PretrainConfig,
    ScorerConfig,
    ScratchConfig,
    StudentConfig,
)
from practicum.objective import Objective, Signal
from practicum.objective.passes import longest
from practicum.ports import (
    AdamParams,
    BackendContext,
    Capabilities,
    DecodeBatch,
    Learner,
    MixedRequest,
    Model,
    SelfTeacher,
    WeightUpdateRule,
)
from practicum.ports.paper import PaperModel, PaperRecord
from practicum.types import (
    Datum,
    ForwardResult,
    Metrics,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
    TokenRecord,
)


class LocalPaper:
    """See `practicum.ports.PaperBackend`; what is asked of each model is kept in `record`."""

    record: PaperRecord

    def __init__(self, config: Config, context: BackendContext, answer_tokens: int) -> None:
        self._config = config
        self._context = context
        self._answer_tokens = answer_tokens

    def student(self, config: StudentConfig) -> Learner:
        """Read the student's sizes."""
        loaded = self._load(config, "student")
        model = loaded.language_model
        learning = measure_trainable(model)

        def cut(data: Sequence[Datum]) -> GraphPlan:
            if self._config.micro_batch_tokens is not None:
                return GraphPlan(self._config.micro_batch_tokens, recompute=False)
            return plan_micro_batch(
                model, max(graph.each, 1), longest(data), self._config.graph_mib * 2**20
            )

        graph = footprint_of(config, loaded.source, learning.layers).kept
        self.record = PaperRecord(
            shape=measure_dims(model),
            learning=learning,
            body=lambda recompute: footprint_of(config, loaded.source, learning.layers, recompute),
            cut=cut,
            packs_up_to=model.packs_up_to,
            scored_tokens=SCORED_TOKENS,
            prepares_head_from=MIN_HEAD_ROWS,
            prepares_weights_from=MIN_DECODE_STEPS,
            chunk_tokens=self._config.chunk_tokens,
            sampling_batch=self._config.sampling_batch,
        )
        return Learner(
            trainer=PaperTrainer(self.record, lambda: self._client("student")),
            renderer=loaded.renderer,
            context_length=loaded.context_length,
            source=loaded.source,
            shape=self.record.shape,
            learning=learning,
        )

    def scorer(self, config: ScorerConfig, name: str) -> Model:
        """Read another model's sizes."""
        loaded = self._load(config, name)
        shape = measure_dims(loaded.language_model)
        self.record.scorers[name] = PaperModel(config, shape, footprint_of(config, loaded.source))
        return Model(
            self._client(name), loaded.renderer, loaded.context_length, loaded.source, shape
        )

    def sampler(self, student: Learner) -> "PaperClient":
        """Return the student on paper."""
        return self._client("student")

    def self_teacher(self, student: Learner, rule: WeightUpdateRule, name: str) -> "PaperClient":
        """Return the student's weights as a scorer; all but live ones are held a second time."""
        record = self.record
        copied = 0 if rule.hold_within_step().weights == "live" else record.learning.parameters
        record.scorers[name] = PaperModel(None, record.shape, record.body(False), copied)
        return self._client(name)

    def save(self, student: Learner, folder: Path) -> None:
        """Save nothing."""

    def load(self, student: Learner, folder: Path, *, moments: bool = True) -> None:
        """Restore nothing."""

    def export(self, student: Learner, folder: Path) -> None:
        """Refuse: there are no weights."""
        raise AssertionError("a model on paper has no weights to export")

    def _client(self, name: str) -> "PaperClient":
        record = self.record
        drawn, scored = record.drawn.setdefault(name, []), record.scored.setdefault(name, [])
        return PaperClient(self._answer_tokens, drawn, scored)

    def _load(self, config: ModelConfig, name: str) -> LoadedModel:
        if not isinstance(config.model, ScratchConfig):
            return load_weightless(config)
        untaught = config.model.model_copy(update={"pretrain": PretrainConfig(steps=0)})
        folder = self._context.models / name.replace("/", "-")
        return load_weightless(config, scratch_folder(folder, untaught, self._context.task()))


class PaperClient(SelfTeacher):
    """Draws and scores without a model; see `practicum.ports.SamplingClient`."""

    def __init__(
        self, answer_tokens: int, drawn: list[SampleRequest], scored: list[ScoreRequest]
    ) -> None:
        self._answer_tokens = answer_tokens
        self._drawn = drawn
        self._scored = scored

    @property
    def capabilities(self) -> Capabilities:
        """Everything, as a local model."""
        return Capabilities(signals=frozenset({"sampled", "topk", "full"}))

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Answers of the length that is assumed."""
        self._drawn.extend(requests)
        count = min(params.max_new_tokens, self._answer_tokens)
        ids = torch.zeros(count, dtype=torch.long)
        return [Sample(ids, torch.zeros(count), torch.zeros(count), "length") for _ in requests]

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Log-probabilities or hidden states of the right length, and of no width."""
        self._scored.extend(requests)
        if signal.type == "sampled":
            return [
                TeacherSignal(logprobs=torch.zeros(len(request.tokens))) for request in requests
            ]
        head = Head(torch.zeros(1, 1), 1)
        return [
            TeacherSignal(hidden=torch.zeros(len(request.tokens), 1), head=head)
            for request in requests
        ]

    def sample_mixed(
        self,
        requests: Sequence[MixedRequest],
        teacher: object,
        share: float,
        params: SamplingParams,
    ) -> list[Sample]:
        """As `sample`."""
        return self.sample(
            [SampleRequest(request.prompt_tokens, request.seed) for request in requests], params
        )

    def read(self, prompts: Sequence[tuple[int, ...]], rows: int, new_tokens: int) -> DecodeBatch:
        """Nothing is read on paper: both sides of a mixture are counted where it is drawn."""
        raise AssertionError("paper is not read token by token")


class PaperTrainer:
    """Learns nothing; see `practicum.ports.TrainingClient`."""

    def __init__(self, record: PaperRecord, snapshot: Callable[[], PaperClient]) -> None:
        self._record = record
        self._snapshot = snapshot

    def forward_backward(
        self, data: Sequence[Datum], objective: Objective, seed: int
    ) -> ForwardResult:
        """Keep the data, and apply the teachers' heads as often as a trainer does."""
        self._record.data.extend(data)
        for datum in data:
            for head in (*datum.signal.heads, *datum.reference.heads):
                for _ in range(1 + objective.needs_sequences):
                    head.logprobs(torch.zeros(int(datum.rollout.loss_mask.sum()), 1))
        silent = torch.zeros(sum(len(datum.rollout.tokens) for datum in data))
        again = {"recomputed": 1.0} if self._record.cut(data).recompute else {}
        supervised = [int(datum.rollout.loss_mask.sum()) for datum in data]
        metrics = {"tokens": float(sum(supervised)), **again}
        return ForwardResult(metrics, TokenRecord(*[silent] * 7), supervised)

    def optim_step(self, params: AdamParams) -> Metrics:
        """Nothing moves."""
        return {}

    def snapshot(self) -> PaperClient:
        """The student on paper."""
        return self._snapshot()

    def refuses(self, objective: Objective) -> str | None:
        """Paper takes every objective."""
        return None
