"""Train at a service: compute the objective here and send its gradient as token weights.

There are two passes, as in the package's own `forward_backward_custom`. The first pass requests the
log-probabilities of the tokens that the objective needs. The objective and its gradient with
respect to the log-probabilities are computed here, with the code for local students. The second
pass is a `cross_entropy` with minus this gradient as weights; by the chain rule, its gradient with
respect to the student's weights is the objective's gradient.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.backends.tinker.probing import explain_ignored_targets
from practicum.backends.tinker.wire import ColumnRequest, Columns, build_columns, restrict_signal
from practicum.costs import Meter
from practicum.errors import CheckpointError, TeacherError
from practicum.losses import (
    CompiledObjective,
    TermValues,
    TokenBatch,
    build_token_batch,
    compile_objective,
    compute_values,
)
from practicum.losses.measures import UpdateStatistics, measure, measure_batch
from practicum.losses.passes import Part, Pass, group_rows_into_passes, split_pools, split_views
from practicum.losses.token_axis import compute_all_coefficients, compute_full_coefficients
from practicum.objective import Objective, Signal, Term
from practicum.ports import AdamParams, Capabilities, SamplingClient, SelfTeacher
from practicum.remote.tinker import Connection, ServiceSampler, SessionLost
from practicum.remote.tinker.sampling import MAX_LOGPROB, build_capabilities
from practicum.training.candidates import compute_candidates
from practicum.types import (
    Datum,
    ForwardResult,
    Metrics,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)

log = logging.getLogger(__name__)

UNLIMITED_TOKENS = 1 << 40
NUMBER_BYTES = 4
CHECKPOINT_SCHEME = "tinker://"

METRICS = {"skyrl.ai/grad_norm": "grad_norm", "grad_norm": "grad_norm", "skipped": "skipped"}
"""The step metrics that services report, by their names at the service."""

ENTROPIES = frozenset({"student_entropy", "teacher_entropy"})
"""The values that need full distributions, which a service does not return."""


class ServiceTrainer:
    """Train adapters at a service; see `practicum.ports.TrainingClient`.

    `create` asks the service for a training client of new adapters over `base`. After a failed
    training request the weights are unknown, so they can no longer be saved.
    """

    vocabulary: int = 1 << 31
    """The number of tokens; set once the tokenizer is loaded."""

    special_ids: frozenset[int] | None = None
    """The ids of special tokens; set once the tokenizer is loaded."""

    def __init__(
        self,
        connection: Connection,
        base: str,
        create: Callable[[Any], Any],
        meter: Meter | None = None,
    ) -> None:
        self._connection = connection
        self._base = base
        self._meter = meter
        self._steps = 0
        self._sampler: ServiceSampler | None = None
        self._accumulated = self._broken = False
        self._client: Any = connection.request(
            lambda: create(connection.service), f"a student over {base}"
        )

    def get_tokenizer(self) -> str:
        """Return the folder or hub name of the base model's tokenizer that the service reports."""
        description = self._connection.call(self._client.get_info, "what the student is")
        return self._connection.quote(description.model_data.tokenizer_id or self._base)

    def get_context_length(self) -> int | None:
        """Return the base model's context length in tokens, or None if unknown."""
        return self._connection.read_context_lengths().get(self._base)

    def explain_unsupported(self, objective: Objective) -> str | None:
        """Explain why a service cannot train the objective; return None if it can."""
        problem = next(filter(None, map(explain_unsupported_term, objective.losses)), None)
        candidates = [term.signal.candidates for term in objective.losses]
        if problem is not None or not any(candidates):
            return problem
        answer = explain_ignored_targets(self._connection, self._client, self.vocabulary)
        if answer is None:
            return None
        return (
            f"objective: the service at {self._connection.address} {answer}, so it cannot train "
            "candidates; set signal: sampled, or use another service"
        )

    def build_sampling_client(self) -> ServiceSampler:
        """Return a client of the current weights, which are published once per step."""
        if self._sampler is None:
            client = self._client
            self._sampler = ServiceSampler(
                self._connection,
                lambda service: client.save_weights_and_get_sampling_client(),
                self.vocabulary,
                lasting=False,
                meter=self._meter,
            )
        return self._sampler

    def snapshot(self) -> ServiceSampler:
        """Return a client of the current weights, which the service keeps during later training."""
        client = self.build_sampling_client()
        # Publish now: a client that is opened at its first request would get later weights.
        client.open()
        return client

    def open_base_client(self) -> ServiceSampler:
        """Return a client of the base model that the student started from."""
        return ServiceSampler(
            self._connection,
            lambda service: service.create_sampling_client(base_model=self._base),
            self.vocabulary,
            meter=self._meter,
        )

    def forward_backward(
        self, data: Sequence[Datum], objective: Objective, seed: int
    ) -> ForwardResult:
        """Accumulate the objective's gradient over all datums, in two passes for each view."""
        views = split_views(data, objective)
        result, *later = [self._train_view(*view, seed) for view in views]
        return result.add_losses("observed", *later)

    def _train_view(
        self, pooled: Sequence[Datum], objective: Objective, seed: int
    ) -> ForwardResult:
        datums = self._restrict_datums(split_pools(pooled), objective)
        batch = build_token_batch(datums, objective, seed, self.special_ids)
        records = UpdateStatistics(len(batch.tokens), batch.tokens.device)
        rollouts = [datum.rollout for datum in datums]
        parts = [build_columns(part, rollouts) for part in _gather_parts(datums, batch)]
        if not parts:
            return records.build_result(datums, pooled)
        logprobs = [answer.requires_grad_() for answer in self._request_logprobs(parts)]
        compiled = compile_objective(objective)
        values = [
            _compute_values(student, columns, compiled)
            for student, columns in zip(logprobs, parts, strict=True)
        ]
        coefficients = _compute_coefficients(compiled, parts, values, batch, records)
        loss = torch.zeros(())
        for columns, term_values, factors in zip(parts, values, coefficients, strict=True):
            part = columns.part
            pairs = zip(factors, term_values, strict=True)
            losses = torch.stack([factor * term.loss_value for factor, term in pairs])
            loss = loss + losses.sum()
            detached = [term.detach() for term in term_values]
            records.record_broken(part.index, detached, factors)
            measure(records, detached, part.tokens, part.signal, compiled)
            records.record_tokens(part.index, detached[0], factors)
            records.add_loss_share(part.signal.name, detached, factors)
        # Zero weights would still make the service's optimizer change the weights: send nothing.
        if not records.is_broken and not records.has_no_supervision:
            gradients = torch.autograd.grad(
                loss, logprobs, allow_unused=True, materialize_grads=True
            )
            self._send_gradients(parts, gradients)
        return records.build_result(datums, pooled)

    def optim_step(self, params: AdamParams) -> Metrics:
        """Take one step of AdamW at the service; without a gradient there is no step."""
        from tinker import types

        rate = {"learning_rate": params.learning_rate}
        if not self._accumulated:
            return {"grad_norm": 0.0, "skipped": 0.0, "empty_updates": 1.0, **rate}
        beta1, beta2 = params.betas
        adam = types.AdamParams(
            learning_rate=params.learning_rate,
            beta1=beta1,
            beta2=beta2,
            eps=params.epsilon,
            weight_decay=params.weight_decay,
            grad_clip_norm=params.max_grad_norm if params.max_grad_norm < float("inf") else 0.0,
        )
        result = self._request_training(lambda: self._client.optim_step(adam), "an optimizer step")
        self._sampler, self._accumulated = None, False
        self._steps += 1
        metrics = {"skipped": 0.0, "empty_updates": 0.0}
        for reported, name in METRICS.items():
            if reported in (result.metrics or {}):
                metrics[name] = float(result.metrics[reported])
        return {**metrics, **rate}

    def save_state(self) -> dict[str, dict[str, Tensor]]:
        """Save a checkpoint at the service and return its address as the name of a tensor.

        The tensor holds the number of optimizer steps. Raises TeacherError if the weights are
        unknown.
        """
        if self._broken:
            raise TeacherError(
                f"{self._connection.address}: a training request failed, so the student's weights "
                "may not be the weights of a finished step"
            )
        name = f"step-{self._steps}"
        saved = self._request_training(
            lambda: self._client.save_state(name, overwrite=True), "saving"
        )
        path = self._connection.quote(str(saved.path))
        if path != saved.path or not path.startswith(CHECKPOINT_SCHEME):
            raise TeacherError(
                f"{self._connection.address}: saving: {path!r} is not a checkpoint address; check "
                "the service"
            )
        log.info(f"saved {path}")
        return {"student": {path: torch.tensor(self._steps)}, "optimizer": {}}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore a checkpoint at the service; raise CheckpointError if it does not exist."""
        addresses = [name for name in tensors["student"] if name.startswith(CHECKPOINT_SCHEME)]
        if len(addresses) != 1:
            raise CheckpointError(
                "the checkpoint holds the student's weights and not the address of a service; "
                "resume it with the backend that it was trained with"
            )
        service = self._connection.service
        try:
            self._client = self._connection.request(
                lambda: service.create_training_client_from_state_with_optimizer(addresses[0]),
                self._connection.quote(addresses[0]),
            )
        except SessionLost as error:
            raise CheckpointError(
                f"{error}; start the service with the folder (--out) that holds it"
            ) from error
        self._steps = int(tensors["student"][addresses[0]])
        self._sampler, self._accumulated = None, False

    def _restrict_datums(self, datums: Sequence[Datum], objective: Objective) -> list[Datum]:
        """Reduce full teacher and reference distributions to the objective's tokens."""
        signals = (objective.signal, objective.reference_signal)
        by_student = [signal for signal in signals if signal and signal.chooser == "student"]
        max_k = max((signal.candidates for signal in by_student), default=0)
        candidates: dict[int, Tensor] = {}
        # Remote teachers received the student's candidates; full distributions are reduced to them
        # here.
        rollouts = {id(datum.rollout): datum.rollout for datum in datums if _has_full(datum)}
        if max_k and rollouts:
            ids = compute_candidates(self.build_sampling_client(), list(rollouts.values()), max_k)
            candidates = dict(zip(rollouts, ids, strict=True))

        def restrict(datum: Datum, answer: TeacherSignal, signal: Signal | None) -> TeacherSignal:
            k = signal.candidates if signal else 0
            ids = None
            if signal and signal.chooser == "student" and id(datum.rollout) in candidates:
                ids = candidates[id(datum.rollout)][:, :k]
            return restrict_signal(answer, datum.rollout.tokens, ids, k)

        return [
            replace(
                datum,
                signal=restrict(datum, datum.signal, signals[0]),
                reference=restrict(datum, datum.reference, signals[1]),
            )
            for datum in datums
        ]

    def _request_logprobs(self, parts: Sequence[Columns]) -> list[Float[Tensor, "t C"]]:
        """Return the student's log-probabilities of each part's columns."""
        texts = [text for columns in parts for text in columns.texts]
        requests = [text.build_datum(torch.zeros(text.ids.shape)) for text in texts]
        output = self._request_training(
            lambda: self._client.forward(requests, "cross_entropy"),
            "the student's log-probabilities",
        )
        answers = [record["logprobs"].to_torch() for record in output.loss_fn_outputs]
        if len(answers) != len(texts):
            raise TeacherError(
                f"{self._connection.address}: {len(answers)} of {len(texts)} texts were answered; "
                "look at the service"
            )
        logprobs = map(self._check_answer, texts, answers)
        by_part = [torch.cat([next(logprobs) for _ in columns.texts]) for columns in parts]
        self._count_bytes(texts, NUMBER_BYTES)
        return by_part

    def _check_answer(self, text: ColumnRequest, answer: Tensor) -> Float[Tensor, "T C"]:
        """Return the log-probabilities at supervised positions; raise TeacherError if invalid."""
        width = text.ids.shape[1]
        shape = (len(text.tokens), width) if width > 1 else (len(text.tokens),)
        if answer.shape != shape:
            raise TeacherError(
                f"{self._connection.address}: log-probabilities of the shape {list(answer.shape)} "
                f"were returned, not {list(shape)}; check the service"
            )
        logprobs = answer.float().reshape(len(text.tokens), width)[text.indices]
        if (logprobs > MAX_LOGPROB).any():
            raise TeacherError(
                f"{self._connection.address}: the student's log-probabilities reach "
                f"{logprobs.max().item():.3g}, above 0; check the service"
            )
        return logprobs

    def _send_gradients(self, parts: Sequence[Columns], gradients: Sequence[Tensor]) -> None:
        """Accumulate the gradient at the service: its weights are minus the gradient."""
        requests = []
        for columns, gradient in zip(parts, gradients, strict=True):
            pieces = gradient.split([len(text.ids) for text in columns.texts])
            requests += [
                text.build_datum(-piece) for text, piece in zip(columns.texts, pieces, strict=True)
            ]
        self._request_training(
            lambda: self._client.forward_backward(requests, "cross_entropy"), "the gradient"
        )
        self._accumulated = True
        self._count_bytes([text for columns in parts for text in columns.texts], 0)

    def _request_training(self, request: Callable[[], Any], what: str) -> Any:
        """Return the answer to a training request; after a failure the weights count as unknown."""
        try:
            return self._connection.request(request, what)
        except TeacherError as error:
            self._broken = True
            if isinstance(error, SessionLost):
                raise TeacherError(
                    f"{error}; the service was restarted or dropped the student; resume from "
                    "the newest checkpoint"
                ) from error
            raise

    def _count_bytes(self, texts: Sequence[ColumnRequest], answer_bytes: int) -> None:
        """Count the bytes that were sent, and `answer_bytes` for each returned log-probability."""
        if self._meter is not None:
            sent = NUMBER_BYTES * sum(text.numbers for text in texts)
            answer_count = sum(len(text.tokens) * text.ids.shape[1] for text in texts)
            self._meter.count_bytes("update", sent + answer_bytes * answer_count)


class StudentClient(SelfTeacher):
    """Sample and score with the client that `current` returns at each call.

    A `practicum.ports.SelfTeacher` without a state to save.
    """

    def __init__(self, current: Callable[[], SamplingClient]) -> None:
        self._current = current

    @property
    def capabilities(self) -> Capabilities:
        """The service's signals; the weights follow the student's."""
        return replace(build_capabilities(None), follows_student=True)

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample from the current weights."""
        return self._current().sample(requests, params)

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Score with the current weights."""
        return self._current().score(requests, signal)


def explain_unsupported_term(term: Term) -> str | None:
    """Explain why a service cannot train a term, with a replacement; return None if it can.

    A service only returns log-probabilities of named tokens, so full distributions and all values
    computed from them are not available.
    """
    if term.signal.question is not None and term.signal.question.whole:
        return (
            f"objective: signal {term.signal.name!r} needs the student's whole distribution, which "
            "backend 'tinker' does not see; use topk(20), topk(20, support=teacher), sampled, "
            "score or text"
        )
    if term.signal.alone:
        return (
            f"objective: signal {term.signal.name!r} is of the student's whole distribution, which "
            "backend 'tinker' does not see; leave the term out"
        )
    k, support = term.signal.candidates, term.signal.chooser
    if k and support not in ("student", "teacher"):
        return (
            f"objective: backend 'tinker' has no support {support!r}; use topk({k}, "
            f"support=student) or topk({k}, support=teacher)"
        )
    if not term.weighs_by.isdisjoint(ENTROPIES):
        return (
            f"objective: weights {term.weights.name!r} are made of entropies, which backend "
            "'tinker' does not see; use divergence_top, trust, or weights of log-probabilities"
        )
    return None


def _has_full(datum: Datum) -> bool:
    """Return True if the teacher or the reference gave a full distribution."""
    signals = datum.signal, datum.reference
    return datum.signal.pool is not None or any(signal.hidden is not None for signal in signals)


def _gather_parts(datums: Sequence[Datum], batch: TokenBatch) -> Iterator[Part]:
    """Yield the batch grouped by teachers with the same kind of answer.

    The service splits it into micro-batches.
    """
    for rows in group_rows_into_passes(datums, UNLIMITED_TOKENS, UNLIMITED_TOKENS):
        one_pass = Pass(datums, [(datums, batch)], rows, [frozenset() for _ in rows])
        yield from (part for _, _, part in one_pass.gather_parts())


def _compute_values(
    logprobs: Float[Tensor, "t C"], columns: Columns, objective: CompiledObjective
) -> list[TermValues]:
    """Compute each term's values, with the sampled token's surprise in place of the entropy.

    Columns cannot give the entropy, which is the mean of the surprise over sampled tokens.
    """
    teacher, reference = columns.teacher, columns.reference
    values = compute_values(objective.logits, logprobs, teacher, columns.tokens, reference)
    return [replace(term, student_entropy=-term.logprobs) for term in values]


def _compute_coefficients(
    objective: CompiledObjective,
    parts: Sequence[Columns],
    values: Sequence[Sequence[TermValues]],
    batch: TokenBatch,
    records: UpdateStatistics,
) -> list[list[Tensor]]:
    """Return the loss coefficients of each part's tokens, one tensor per term.

    They are computed from the full batch if a token's coefficient depends on other tokens; in that
    case the metrics of pair terms are recorded too.
    """
    detached = [[term.detach() for term in part_values] for part_values in values]
    if not objective.needs_sequences and batch.spans is None:
        return [
            compute_all_coefficients(objective.tokens, part_values, columns.part.tokens)
            for columns, part_values in zip(parts, detached, strict=True)
        ]
    indices = [columns.part.index for columns in parts]
    coefficients = compute_full_coefficients(objective.tokens, detached, indices, batch)
    measure_batch(records, objective, detached, indices, batch)
    return [[column[index] for column in coefficients] for index in indices]
