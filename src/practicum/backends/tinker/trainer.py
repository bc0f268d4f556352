"""The training client of a service: our objective over log-probabilities that it tells, its gradient sent back as weights.

Two passes, as in the package's own `forward_backward_custom`. The first asks for the log-probabilities of the tokens that the
objective needs. The objective and its gradient in them are computed here, by the code that a local student uses. The second is a
`cross_entropy` whose weights are minus that gradient; by the chain rule its gradient in the student's weights is the objective's.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.backends.tinker.wire import ColumnRequest, Columns, columns_of, told
from practicum.costs import Meter
from practicum.errors import CheckpointError, TeacherError
from practicum.objective import (
    Objective,
    Signal,
    Term,
    TermValues,
    TokenBatch,
    build_token_batch,
    compute_coefficients,
    compute_term_values,
)
from practicum.objective.measures import Records, measure
from practicum.objective.passes import Pass, one_teacher_each, rows_of_passes
from practicum.ports import AdamParams, Capabilities, SamplingClient, SelfTeacher
from practicum.remote.tinker import Connection, ServiceSampler, SessionLost
from practicum.remote.tinker.sampling import HIGHEST, service_capabilities
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

EVERYTHING = 1 << 40
NUMBER_BYTES = 4
SCHEME = "tinker://"


class ServiceTrainer:
    """Trains adapters at a service; see `practicum.ports.TrainingClient`.

    `begin` asks the connection's service for a training client of new adapters over `base`. Once a training request failed it is
    not known what the weights are, so they are not saved any more.
    """

    vocabulary: int = 1 << 31
    """How many tokens there are, once the tokenizer is known."""

    special_ids: frozenset[int] | None = None
    """Which of them are special, likewise."""

    def __init__(
        self,
        connection: Connection,
        base: str,
        begin: Callable[[Any], Any],
        refused: Callable[[Term], str | None],
        meter: Meter | None = None,
    ) -> None:
        self._connection = connection
        self._base = base
        self._refused = refused
        self._meter = meter
        self._steps = 0
        self._sampler: ServiceSampler | None = None
        self._accumulated = self._broken = False
        self._client: Any = connection.answer(
            lambda: begin(connection.service), f"a student over {base}"
        )

    def tokenizer(self) -> str:
        """The folder or hub name of the base model's tokenizer, as the service names it."""
        info = self._connection.call(self._client.get_info, "what the student is")
        return self._connection.shown(info.model_data.tokenizer_id or self._base)

    def context_length(self) -> int | None:
        """The longest text that the base model reads, where the service says so."""
        return self._connection.contexts().get(self._base)

    def refuses(self, objective: Objective) -> str | None:
        """Why a term of it cannot be trained at a service."""
        return next(
            (problem for term in objective.losses if (problem := self._refused(term))), None
        )

    def sampling_client(self) -> ServiceSampler:
        """Samples from the weights as they are now; they are published once a step."""
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
        """Samples from the weights of now, which the service keeps while it trains on."""
        client = self.sampling_client()
        client.open()
        return client

    def base_client(self) -> ServiceSampler:
        """Samples from the base model, whose weights are those that the student began with."""

        def begin(service: Any) -> Any:
            return service.create_sampling_client(base_model=self._base)

        return ServiceSampler(self._connection, begin, self.vocabulary, meter=self._meter)

    def forward_backward(
        self, data: Sequence[Datum], objective: Objective, seed: int
    ) -> ForwardResult:
        """The gradient of the objective over all of `data`, in two passes at the service."""
        whole, data = data, one_teacher_each(data)
        data = self._restrict_datums(data, objective)
        batch = build_token_batch(data, objective, seed, self.special_ids)
        records = Records(len(batch.tokens))
        parts = [
            columns_of(part, [datum.rollout for datum in data]) for part in _parts(data, batch)
        ]
        if not parts:
            return records.result(data, whole)
        asked = self._ask(parts)
        students = [logprobs.requires_grad_() for logprobs in asked]
        values = [
            _seen(compute_term_values(student, one.teacher, one.tokens, objective, one.reference))
            for student, one in zip(students, parts, strict=True)
        ]
        shares = _shares(objective, parts, values, batch)
        loss = torch.zeros(())
        for one, own, counted in zip(parts, values, shares, strict=True):
            terms = [share * value.value for share, value in zip(counted, own, strict=True)]
            broken = ~torch.isfinite(torch.stack(terms).sum(dim=0).detach())
            records.broken += one.part.tokens.rows[broken].tolist()
            loss = loss + torch.stack(terms).sum()
            detached = [value.detached() for value in own]
            measure(records, detached, one.part.tokens, one.part.signal.name)
            records.place(one.part.index, detached[0], counted)
            records.share(one.part.signal.name, detached, counted)
        if not records.broken and not records.nothing_supervised:
            self._send(
                parts,
                torch.autograd.grad(loss, students, allow_unused=True, materialize_grads=True),
            )
        return records.result(data, whole)

    def optim_step(self, params: AdamParams) -> Metrics:
        """One step of AdamW at the service; without a gradient there is none."""
        from tinker import types

        if not self._accumulated:
            return {
                "grad_norm": 0.0,
                "skipped": 0.0,
                "empty_updates": 1.0,
                "learning_rate": params.learning_rate,
            }
        beta1, beta2 = params.betas
        adam = types.AdamParams(
            learning_rate=params.learning_rate,
            beta1=beta1,
            beta2=beta2,
            eps=params.epsilon,
            weight_decay=params.weight_decay,
            grad_clip_norm=params.max_grad_norm if params.max_grad_norm < float("inf") else 0.0,
        )
        done = self._asked(lambda: self._client.optim_step(adam), "an optimizer step")
        self._sampler, self._accumulated = None, False
        self._steps += 1
        said = {
            name: float(value)
            for name, value in (done.metrics or {}).items()
            if name in ("grad_norm", "skipped")
        }
        return {"skipped": 0.0, "empty_updates": 0.0, **said, "learning_rate": params.learning_rate}

    def save_state(self) -> dict[str, dict[str, Tensor]]:
        """The address of a checkpoint at the service, of weights and moments, as the name of a tensor: its optimizer steps."""
        if self._broken:
            raise TeacherError(
                f"{self._connection.address}: a training request failed, so the student's weights are not known to be those of a "
                "finished step"
            )
        name = f"step-{self._steps}"
        saved = self._asked(lambda: self._client.save_state(name, overwrite=True), "saving")
        path = self._connection.shown(str(saved.path))
        if path != saved.path or not path.startswith(SCHEME):
            raise TeacherError(
                f"{self._connection.address}: saving: {path!r} is no address of a checkpoint; look at the service"
            )
        log.info(f"saved {path}")
        return {"student": {path: torch.tensor(self._steps)}, "optimizer": {}}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from a checkpoint at the service; CheckpointError where the state is of a student somewhere else."""
        addresses = [name for name in tensors["student"] if name.startswith(SCHEME)]
        if len(addresses) != 1:
            raise CheckpointError(
                "the checkpoint holds the student's weights and not the address of a service; resume it with the backend that "
                "it was trained with"
            )
        service = self._connection.service
        try:
            self._client = self._connection.answer(
                lambda: service.create_training_client_from_state_with_optimizer(addresses[0]),
                self._connection.shown(addresses[0]),
            )
        except SessionLost as error:
            raise CheckpointError(
                f"{error}; start the service with the folder (--out) that holds it"
            ) from error
        self._steps = int(tensors["student"][addresses[0]])
        self._sampler, self._accumulated = None, False

    def _restrict_datums(self, data: Sequence[Datum], objective: Objective) -> list[Datum]:
        """The data with every teacher's distribution, where it is at hand, cut to what the objective asks about."""
        signals = (objective.signal, objective.reference_signal)
        here = [
            datum
            for datum in data
            if datum.signal.hidden is not None or datum.reference.hidden is not None
        ]
        here += [datum for datum in data if datum.signal.pool is not None]
        wide = max(
            (signal.candidates for signal in signals if signal and signal.chooser == "student"),
            default=0,
        )
        own: dict[int, Tensor] = {}
        if wide and here:
            rollouts = list({id(datum.rollout): datum.rollout for datum in here}.values())
            found = compute_candidates(self.sampling_client(), rollouts, wide)
            own = {id(rollout): ids for rollout, ids in zip(rollouts, found, strict=True)}

        def cut(datum: Datum, signal: TeacherSignal, asked: Signal | None) -> TeacherSignal:
            k = asked.candidates if asked else 0
            candidates = (
                own.get(id(datum.rollout)) if asked and asked.chooser == "student" else None
            )
            return told(
                signal, datum.rollout.tokens, None if candidates is None else candidates[:, :k], k
            )

        return [
            Datum(
                datum.rollout,
                cut(datum, datum.signal, signals[0]),
                cut(datum, datum.reference, signals[1]),
                datum.weight,
            )
            for datum in data
        ]

    def _ask(self, parts: Sequence[Columns]) -> list[Float[Tensor, "t C"]]:
        """The student's log-probabilities of each part's columns."""
        texts = [text for one in parts for text in one.texts]
        data = [text.datum(torch.zeros(text.ids.shape)) for text in texts]
        output = self._asked(
            lambda: self._client.forward(data, "cross_entropy"), "the student's log-probabilities"
        )
        answers = [record["logprobs"].to_torch() for record in output.loss_fn_outputs]
        if len(answers) != len(texts):
            raise TeacherError(
                f"{self._connection.address}: {len(answers)} of {len(texts)} texts were answered; look at the service"
            )
        found = iter(
            [self._checked(text, answer) for text, answer in zip(texts, answers, strict=True)]
        )
        self._count(texts, NUMBER_BYTES)
        return [torch.cat([next(found) for _ in one.texts]) for one in parts]

    def _checked(self, text: ColumnRequest, answer: Tensor) -> Float[Tensor, "T C"]:
        width = text.ids.shape[1]
        shape = (len(text.tokens), width) if width > 1 else (len(text.tokens),)
        if answer.shape != shape:
            raise TeacherError(
                f"{self._connection.address}: log-probabilities of the shape {list(answer.shape)} came back, not "
                f"{list(shape)}; look at the service"
            )
        found = answer.float().reshape(len(text.tokens), width)[text.places]
        if (found > HIGHEST).any():
            raise TeacherError(
                f"{self._connection.address}: the student's log-probabilities reach {found.max().item():.3g}, above 0; look at the "
                "service"
            )
        return found

    def _send(self, parts: Sequence[Columns], gradients: Sequence[Tensor]) -> None:
        """Add the gradient at the service: weights are minus the gradient in the log-probabilities."""
        data = []
        for one, gradient in zip(parts, gradients, strict=True):
            pieces = gradient.split([len(text.ids) for text in one.texts])
            data += [text.datum(-piece) for text, piece in zip(one.texts, pieces, strict=True)]
        self._asked(lambda: self._client.forward_backward(data, "cross_entropy"), "the gradient")
        self._accumulated = True
        self._count([text for one in parts for text in one.texts], 0)

    def _asked(self, request: Callable[[], Any], what: str) -> Any:
        """The answer to a training request; one that fails leaves weights that nobody knows."""
        try:
            return self._connection.answer(request, what)
        except TeacherError as error:
            self._broken = True
            if isinstance(error, SessionLost):
                raise TeacherError(
                    f"{error}; the service was started again, or let the student go: go on from the newest checkpoint"
                ) from error
            raise

    def _count(self, texts: Sequence[ColumnRequest], answered: int) -> None:
        """Count the numbers of the texts and, for each log-probability that came back, so many bytes."""
        if self._meter is not None:
            sent = NUMBER_BYTES * sum(text.numbers for text in texts)
            self._meter.sent(
                "update",
                sent + answered * sum(len(text.tokens) * text.ids.shape[1] for text in texts),
            )


class StudentClient(SelfTeacher):
    """Samples and scores with the student's weights, as whoever is asked for a client at each call has them.

    See `practicum.ports.SelfTeacher`; it has no state of its own.
    """

    def __init__(self, current: Callable[[], SamplingClient]) -> None:
        self._current = current

    @property
    def capabilities(self) -> Capabilities:
        """Those of the service, of weights that follow the student's."""
        return replace(service_capabilities(None), follows_student=True)

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample from the weights."""
        return self._current().sample(requests, params)

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Score with the weights."""
        return self._current().score(requests, signal)


def _parts(data: Sequence[Datum], batch: TokenBatch):  # type: ignore[no-untyped-def]
    """The batch by teachers that answer alike; how it is cut into passes is the service's affair."""
    for rows in rows_of_passes(data, EVERYTHING, EVERYTHING):
        yield from Pass(data, batch, rows, [frozenset() for _ in rows]).parts()


def _seen(values: Sequence[TermValues]) -> list[TermValues]:
    """The values with what columns cannot tell put right: an entropy is estimated by the sampled token's surprise."""
    return [replace(value, student_entropy=-value.logprobs) for value in values]


def _shares(
    objective: Objective,
    parts: Sequence[Columns],
    values: Sequence[Sequence[TermValues]],
    batch: TokenBatch,
) -> list[list[Tensor]]:
    """The coefficient of each token, by part and term; of the whole batch at once where a token's depends on other tokens."""
    detached = [[value.detached() for value in own] for own in values]
    if not objective.needs_sequences:
        return [
            [
                compute_coefficients(term, value, one.part.tokens)
                for term, value in zip(objective.losses, own, strict=True)
            ]
            for one, own in zip(parts, detached, strict=True)
        ]
    back = torch.cat([one.part.index for one in parts]).argsort()
    merged = [
        TermValues.concatenate([own[n] for own in detached])[back]
        for n in range(len(objective.losses))
    ]
    whole = [
        compute_coefficients(term, value, batch)
        for term, value in zip(objective.losses, merged, strict=True)
    ]
    return [[share[one.part.index] for share in whole] for one in parts]
