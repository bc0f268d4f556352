"""Provide the local backend over weightless models, to know a step's cost before it runs."""

import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.backends.local.cached_texts import MAX_BYTES as MAX_TEXT_BYTES
from practicum.backends.local.config import Config
from practicum.backends.local.device_limits import fill_limits, find_limits, size_gpu
from practicum.backends.local.graph import plan_micro_batch
from practicum.backends.local.host_states import DEVICE_BYTES
from practicum.backends.local.loading import LoadedModel
from practicum.backends.local.native.packed_copies import MAX_BYTES
from practicum.backends.local.paper import build_weightless, load_weightless, measure_footprint
from practicum.backends.local.paper_decoding import SamplingOnPaper
from practicum.backends.local.paper_loss import measure_loss
from practicum.backends.local.precision import choose_dtype, name_dtype
from practicum.backends.local.prepared import MIN_DECODE_STEPS, MIN_HEAD_ROWS, count_cached_bytes
from practicum.backends.local.scratch import prepare_scratch_folder
from practicum.backends.local.sizes import measure_dims, measure_trainable
from practicum.costs import GraphPlan
from practicum.functional.head import Head
from practicum.losses.passes import find_longest_length
from practicum.models.config import (
    ModelConfig,
    PretrainConfig,
    ScorerConfig,
    ScratchConfig,
    StudentConfig,
)
from practicum.models.quantization import keeps_dtype
from practicum.models.sources import locate
from practicum.objective import Objective, Signal
from practicum.ports import (
    AdamParams,
    BackendContext,
    Capabilities,
    DecodeBatch,
    LoadedScalar,
    MixedRequest,
    Model,
    ScalarModel,
    SelfTeacher,
    Student,
    WeightUpdateRule,
)
from practicum.ports.paper import (
    PaperBackend,
    PaperModel,
    PaperRecord,
    PaperScalarDims,
)
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

AnyModelConfig = TypeVar("AnyModelConfig", bound=ModelConfig)


class LocalPaper(PaperBackend):
    """A weightless backend; `record` collects every request. See `practicum.ports.PaperBackend`."""

    record: PaperRecord

    def __init__(self, config: Config, context: BackendContext, answer_tokens: int) -> None:
        self._config = config
        self._context = context
        self._answer_tokens = answer_tokens

    def load_student(self, config: StudentConfig) -> Student:
        """Load the student without weights, and start the record with its sizes."""
        config, loaded = self._load(config, "student")
        model = loaded.language_model
        learning = measure_trainable(model)
        footprint = measure_footprint(config, loaded.source, learning.layers)
        graph, gpu = footprint.graph, self._context.planned_memory
        device_limits = find_limits(model.device) if gpu is None else size_gpu(gpu)
        limits = fill_limits(device_limits, self._config)
        # Built now: the folder of a from-scratch student is gone after the dry run.
        sizes = build_weightless(config, loaded.source, model.vocab_size, on_meta=True)

        def plan_graph(datums: Sequence[Datum]) -> GraphPlan:
            if limits.micro_batch_tokens is not None:
                return GraphPlan(limits.micro_batch_tokens, recompute=False)
            budget = limits.graph_mib * 2**20
            longest, most = find_longest_length(datums), None if gpu is None else sys.maxsize
            return plan_micro_batch(model, max(graph.each, 1), longest, budget, most)

        def measure_sampling(
            prompts: Sequence[tuple[int, ...]], new_tokens: int, params: SamplingParams
        ) -> Mapping[str, int]:
            # The static step reads neither packed weights nor pictures.
            is_static = config.quantization is None and not self._context.pictures
            is_static &= self._config.decoding != "torch"
            rows, forward = limits.sampling_batch, footprint.forward.each
            call = (sizes, prompts, new_tokens, params, device_limits, rows, forward, is_static)
            return SamplingOnPaper(*call).measure()

        self.record = PaperRecord(
            dims=measure_dims(model),
            trainable_dims=learning,
            dtype=name_dtype(model),
            body=partial(measure_footprint, config, loaded.source, learning.layers),
            cut=plan_graph,
            max_packed_tokens=model.max_packed_tokens,
            measure_sampling=measure_sampling,
            measure_loss=lambda *arguments: measure_loss(self.record, *arguments),
            scored_tokens=device_limits.scored_tokens,
            # Only a processor has another layout for weights.
            min_head_rows=MIN_HEAD_ROWS if gpu is None else sys.maxsize,
            min_prepack_tokens=MIN_DECODE_STEPS if gpu is None else sys.maxsize,
            max_kept_bytes=MAX_BYTES,
            chunk_tokens=limits.chunk_tokens,
            sampling_batch=limits.sampling_batch,
            max_text_bytes=MAX_TEXT_BYTES,
            max_hidden_bytes=sys.maxsize if gpu is None else DEVICE_BYTES,
        )
        return Student(
            trainer=PaperTrainer(self.record, lambda: self._open_client("student")),
            renderer=loaded.renderer,
            context_length=loaded.context_length,
            source=loaded.source,
            dims=self.record.dims,
            trainable_dims=learning,
        )

    def load_scorer(self, config: ScorerConfig, name: str) -> Model:
        """Load a scoring model without weights, and record its sizes."""
        config, loaded = self._load(config, name)
        shape = measure_dims(loaded.language_model)
        footprint = measure_footprint(config, loaded.source)
        is_wide = config.dtype == "float32" and keeps_dtype(config.quantization)
        is_wide &= self._context.planned_memory is None
        layout_bytes = count_cached_bytes(shape.body + shape.head) if is_wide else 0
        self.record.scorers[name] = PaperModel(config, shape, footprint, layout_bytes=layout_bytes)
        return Model(
            self._open_client(name), loaded.renderer, loaded.context_length, loaded.source, shape
        )

    def load_scalar(self, config: StudentConfig, name: str) -> LoadedScalar:
        """Load a model with one output per token without weights, and record its sizes."""
        config, loaded = self._load(config, name)
        model = loaded.language_model
        dims, learning = measure_dims(model), measure_trainable(model)
        footprint = measure_footprint(config, loaded.source, learning.layers)
        self.record.scalars[name] = PaperScalarDims(config, dims, learning, footprint)
        record = self.record
        scalar = PaperScalar(
            record.score_requests.setdefault(name, []), record.scalar_calls.setdefault(name, [])
        )
        return LoadedScalar(scalar, loaded.renderer, loaded.source, dims, learning)

    def share_student(self, student: Student) -> LoadedScalar:
        """Return a weightless output on the student's body, which needs no further memory."""
        assert student.dims is not None and student.trainable_dims is not None
        dims, learning = student.dims, student.trainable_dims
        return LoadedScalar(PaperScalar([], []), student.renderer, student.source, dims, learning)

    def build_sampler(self, student: Student) -> "PaperClient":
        """Return the weightless student."""
        return self._open_client("student")

    def build_self_teacher(
        self, student: Student, rule: WeightUpdateRule, name: str
    ) -> "PaperClient":
        """Return the student as a scorer, and record the weights that it copies (none if live)."""
        record = self.record
        is_live = rule.hold_within_step().weights == "live"
        copied = 0 if is_live else record.trainable_dims.parameters
        record.scorers[name] = PaperModel(None, record.dims, record.body(False), copied)
        return self._open_client(name)

    def save(self, student: Student, folder: Path) -> None:
        """Save nothing: there are no weights."""

    def copy_state(self, student: Student) -> Callable[[Path], None]:
        """Copy nothing: there are no weights."""
        return lambda folder: None

    def load(self, student: Student, folder: Path, *, moments: bool = True) -> None:
        """Restore nothing: there are no weights."""

    def export(self, student: Student, folder: Path, *, adapter: bool = False) -> None:
        """Refuse to export: there are no weights."""
        raise AssertionError("a model on paper has no weights to export")

    def _open_client(self, name: str) -> "PaperClient":
        sampled = self.record.sample_requests.setdefault(name, [])
        scored = self.record.score_requests.setdefault(name, [])
        return PaperClient(self._answer_tokens, sampled, scored)

    def _load(self, config: AnyModelConfig, name: str) -> tuple[AnyModelConfig, LoadedModel]:
        """Return the settings with the dtype of the planned device, and the model."""
        folder = None
        if isinstance(config.model, ScratchConfig):
            untrained = config.model.model_copy(update={"pretrain": PretrainConfig(steps=0)})
            folder = self._context.models_dir / name.replace("/", "-")
            folder = prepare_scratch_folder(folder, untrained, self._context.task())
        device = self._find_device(config)
        dtype = choose_dtype(config, locate(config, folder, needs_weights=False), device)
        config = config.model_copy(update={"dtype": dtype})
        return config, load_weightless(config, folder, pictures=self._context.pictures)

    def _find_device(self, config: ModelConfig) -> str:
        """Return the type of device for which a model is planned; it need not be in this machine."""
        if config.device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
            return self._context.planned_device or device
        return config.device


class PaperClient(SelfTeacher):
    """Record requests and answer them without a model."""

    def __init__(
        self, answer_tokens: int, sampled: list[SampleRequest], scored: list[ScoreRequest]
    ) -> None:
        self._answer_tokens = answer_tokens
        self._sampled = sampled
        self._scored = scored

    @property
    def capabilities(self) -> Capabilities:
        """Every signal, as a local model gives it."""
        return Capabilities(signals=frozenset({"sampled", "topk", "full"}), raw_logits=True)

    def remember_texts(self) -> "PaperClient":
        """Return a client that is counted as keeping the texts that it has read."""
        return copy(self)

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Return completions of the assumed length."""
        self._sampled.extend(requests)
        count = min(params.max_new_tokens, self._answer_tokens)
        ids = torch.zeros(count, dtype=torch.long)
        return [Sample(ids, torch.zeros(count), torch.zeros(count), "length") for _ in requests]

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Return log-probabilities or hidden states of the right length and of width 1."""
        self._scored.extend(requests)
        lengths = [len(request.tokens) for request in requests]
        if signal.name == "sampled":
            return [TeacherSignal(logprobs=torch.zeros(length)) for length in lengths]
        head = Head(torch.zeros(1, 1), 1)
        return [TeacherSignal(hidden=torch.zeros(length, 1), head=head) for length in lengths]

    def sample_mixed(
        self,
        requests: Sequence[MixedRequest],
        teacher: object,
        rule: object,
        params: SamplingParams,
    ) -> list[Sample]:
        """Return completions of the assumed length."""
        own_requests = [SampleRequest(request.prompt_tokens, request.seed) for request in requests]
        return self.sample(own_requests, params)

    def open_decode_batch(
        self, prompts: Sequence[tuple[int, ...]], max_rows: int, max_new_tokens: int
    ) -> DecodeBatch:
        """Raise AssertionError: `sample_mixed` counts both models."""
        raise AssertionError("paper is not read token by token")


class PaperScalar(ScalarModel):
    """Record texts and predict 0 for every token; see `practicum.ports.ScalarModel`."""

    def __init__(
        self,
        requests: list[ScoreRequest],
        calls: list[tuple[str, Sequence[ScoreRequest]]],
    ) -> None:
        self._requests = requests
        self._calls = calls

    def predict(self, texts: Sequence[ScoreRequest]) -> list[Float[Tensor, " _"]]:
        """Return zeros."""
        self._requests.extend(texts)
        self._calls.append(("predict", texts))
        return [torch.zeros(len(text.tokens)) for text in texts]

    def fit(
        self,
        texts: Sequence[ScoreRequest],
        slopes: Sequence[Float[Tensor, " _"]],
        params: AdamParams,
    ) -> Metrics:
        """Record the texts, and change nothing."""
        self._calls.append(("fit", texts))
        return {}


class PaperTrainer:
    """Record the training data and train nothing; see `practicum.ports.TrainingClient`."""

    def __init__(self, record: PaperRecord, snapshot: Callable[[], PaperClient]) -> None:
        self._record = record
        self._snapshot = snapshot

    def forward_backward(
        self, data: Sequence[Datum], objective: Objective, seed: int
    ) -> ForwardResult:
        """Record the data, and apply the teachers' heads as often as a real trainer."""
        self._record.datums.extend(data)
        passes = 1 + objective.needs_first_pass(data)
        for datum in data:
            for head in (*datum.signal.heads, *datum.reference.heads):
                for _ in range(passes):
                    head.logprobs(torch.zeros(int(datum.rollout.loss_mask.sum()), 1))
        supervised = [int(datum.rollout.loss_mask.sum()) for datum in data]
        metrics = {"tokens": float(sum(supervised))}
        if self._record.cut(data).recompute:
            metrics["recomputed"] = 1.0
        zeros = torch.zeros(sum(len(datum.rollout.tokens) for datum in data))
        columns = {column.name: zeros for column in fields(TokenRecord)}
        return ForwardResult(metrics, TokenRecord(**columns), supervised)

    def optim_step(self, params: AdamParams) -> Metrics:
        """Change nothing."""
        return {}

    def snapshot(self) -> PaperClient:
        """Return the weightless student."""
        return self._snapshot()

    def explain_unsupported(self, objective: Objective) -> str | None:
        """Return None: every objective can be planned."""
        return None
