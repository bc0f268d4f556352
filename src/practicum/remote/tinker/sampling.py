"""A sampling client of a service as ours: completions drawn, given tokens scored, every answer checked."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.costs import Meter, Phase
from practicum.errors import TeacherError
from practicum.functional import TEACHER_FLOOR
from practicum.objective import Signal
from practicum.ports import Capabilities
from practicum.remote.tinker.connection import Connection, SessionLost
from practicum.statistics.signal import constant
from practicum.text import refuse_stop_texts
from practicum.types import Sample, SampleRequest, SamplingParams, ScoreRequest, TeacherSignal

HIGHEST = 1e-3
"""A log-probability above this, or a mass above 1 + this, is not rounding any more."""

ID_BYTES, LOGPROB_BYTES = 4, 4
"""What a token's id and a log-probability take; the wire's own wrapping is not counted."""

REOPENED_AT_MOST = 3


class ServiceSampler:
    """Draws and scores at a service; see `practicum.ports.SamplingClient`.

    `begin` asks the connection's service for the package's own client. Where it names weights that outlive a session it is
    asked again when the service was started anew (`lasting`). `meter` counts the bytes of tokens and log-probabilities.
    """

    def __init__(
        self,
        connection: Connection,
        begin: Callable[[Any], Any],
        vocabulary: int,
        *,
        largest_k: int | None = None,
        lasting: bool = True,
        meter: Meter | None = None,
    ) -> None:
        self._connection = connection
        self._begin = begin
        self._vocabulary = vocabulary
        self.capabilities = service_capabilities(largest_k)
        """The sampled token, its own candidates, and those that it is given."""
        self._lasting = lasting
        self._meter = meter
        self._session = -1
        self._client: Any = None

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """One completion a request, each from the stream of its seed."""
        from tinker import types

        refuse_stop_texts(params, f"the service at {self._connection.address}")

        def asked(client: Any, request: SampleRequest) -> Any:
            settings = types.SamplingParams(
                max_tokens=params.max_new_tokens,
                seed=request.seed,
                stop=sorted(params.stop_ids),
                temperature=params.temperature,
                top_k=params.top_k or -1,
                top_p=params.top_p,
            )
            return client.sample(
                types.ModelInput.from_ints(list(request.prompt_tokens)), 1, settings
            )

        answers = self._ask(requests, asked, "completions")
        samples = [self._sample(answer, params, number) for number, answer in enumerate(answers)]
        tokens = sum(len(request.prompt_tokens) for request in requests) + sum(
            len(one.tokens) for one in samples
        )
        self._count(
            "sample", ID_BYTES * tokens + LOGPROB_BYTES * sum(len(one.tokens) for one in samples)
        )
        return samples

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """The log-probabilities of each request's tokens, and of candidates: its own likeliest, or those that the request names."""
        from tinker import types

        k = min(signal.candidates, self._vocabulary) if signal.chooser == "teacher" else 0
        given = signal.chooser == "student"
        some = [(number, request) for number, request in enumerate(requests) if request.tokens]

        def asked(client: Any, request: ScoreRequest) -> Any:
            named = _named(request, types) if given else None
            return client.sample(
                types.ModelInput.from_ints([*request.prompt_tokens, *request.tokens]),
                1,
                types.SamplingParams(max_tokens=1, temperature=1.0),
                include_prompt_logprobs=True,
                prompt_logprobs_last_n=len(request.tokens),
                topk_prompt_logprobs=k,
                target_prompt_logprobs=named,
            )

        answers = self._ask([request for _, request in some], asked, "scores")
        signals = [TeacherSignal(logprobs=torch.zeros(0))] * len(requests)
        for (number, request), answer in zip(some, answers, strict=True):
            where = f"{self._connection.address}: the scores of completion {number + 1} of {len(requests)}"
            signals[number] = self._signal(request, answer, k, where)
        rows = sum(len(request.tokens) for _, request in some)
        width = max(
            (
                0 if request.candidates is None else request.candidates.shape[1]
                for _, request in some
            ),
            default=0,
        )
        ids = sum(len(request.prompt_tokens) for _, request in some) + rows * (
            1 + (width if given else k)
        )
        self._count("score", ID_BYTES * ids + LOGPROB_BYTES * rows * (1 + (width if given else k)))
        return signals

    def _ask(
        self, requests: Sequence[Any], asked: Callable[[Any, Any], Any], what: str
    ) -> list[Any]:
        """The answers to all requests; begun anew where the service was started again and the weights outlive that."""
        for attempt in range(REOPENED_AT_MOST + 1):
            try:
                client = self._current()
                return self._connection.wait([asked(client, request) for request in requests], what)
            except SessionLost:
                if not self._lasting or attempt == REOPENED_AT_MOST:
                    raise
                self._connection.reopen()
        raise AssertionError("the last attempt returns or raises")

    def open(self) -> None:
        """Let the service say now which weights are sampled from, and not at the first request."""
        self._current()

    def _current(self) -> Any:
        """The package's client in the newest session."""
        if self._session != self._connection.reopened:
            self._client = self._connection.answer(
                lambda: self._begin(self._connection.service), "a sampling client"
            )
            self._session = self._connection.reopened
        return self._client

    def _count(self, phase: Phase, wire_bytes: int) -> None:
        if self._meter is not None:
            self._meter.sent(phase, wire_bytes)

    def _sample(self, answer: Any, params: SamplingParams, number: int) -> Sample:
        """A completion; what the model itself gave its tokens is known where nothing bent the distribution."""
        where = f"{self._connection.address}: completion {number + 1}"
        if len(answer.sequences) != 1:
            raise TeacherError(
                f"{where}: {len(answer.sequences)} answers to a request for one; look at the service"
            )
        (sequence,) = answer.sequences
        if not all(0 <= token < self._vocabulary for token in sequence.tokens):
            raise TeacherError(
                f"{where} holds what is no token of the {self._vocabulary} of the vocabulary; look at the service"
            )
        tokens = torch.tensor(list(sequence.tokens), dtype=torch.long)
        if not 1 <= len(tokens) <= params.max_new_tokens:
            raise TeacherError(
                f"{where} has {len(tokens)} tokens, and 1 to {params.max_new_tokens} were asked for"
            )
        given = [] if sequence.logprobs is None else list(sequence.logprobs)
        logprobs = _checked(torch.tensor(given, dtype=torch.float32), tokens.shape, where)
        plain = params.temperature in (0.0, 1.0) and params.top_p == 1.0 and params.top_k == 0
        return Sample(
            tokens=tokens,
            sampling_logprobs=logprobs if params.temperature > 0 else torch.zeros_like(logprobs),
            policy_logprobs=logprobs if plain else torch.full_like(logprobs, torch.nan),
            stop_reason="stop" if int(tokens[-1]) in params.stop_ids else "length",
        )

    def _signal(self, request: ScoreRequest, answer: Any, k: int, where: str) -> TeacherSignal:
        count, whole = len(request.tokens), len(request.prompt_tokens) + len(request.tokens)
        if answer.prompt_logprobs_np is None or len(answer.prompt_logprobs_np) != whole:
            raise TeacherError(f"{where} are not those of its {whole} tokens; look at the service")
        last = torch.tensor(answer.prompt_logprobs_np[-count:])
        logprobs = _checked(last, torch.Size([count]), where)
        same = constant(logprobs)
        if same is not None and same > TEACHER_FLOOR:
            raise TeacherError(
                f"{where}: all are {same:.4g}, and a model's opinions differ; look at the service"
            )
        if k:
            table = answer.topk_prompt_logprobs_np
            if table is None or table.token_ids.shape != (whole, k):
                raise TeacherError(
                    f"{where} lack the {k} likeliest tokens that were asked for; look at the service"
                )
            ids = torch.tensor(table.token_ids[-count:]).long()
            values = torch.tensor(table.logprobs[-count:])
        elif request.candidates is not None and answer.target_prompt_logprobs is not None:
            ids = request.candidates.long()
            values = answer.target_prompt_logprobs.to_torch()
            if values.shape != (whole - 1, ids.shape[1]):
                raise TeacherError(
                    f"{where} do not have the shape of the candidates; look at the service"
                )
            values = values[-count:]
        else:
            return TeacherSignal(logprobs=logprobs)
        self._check_ids(ids, where)
        values = _checked(values, ids.shape, where)
        mass = values.exp().sum(dim=-1).max().item()
        if mass > 1 + HIGHEST:
            raise TeacherError(
                f"{where}: the candidates weigh {mass:.4g} together; look at the service"
            )
        if _twice(ids):
            raise TeacherError(f"{where}: a candidate stands twice; look at the service")
        return TeacherSignal(logprobs=logprobs, topk_ids=ids, topk_logprobs=values)

    def _check_ids(self, ids: Int[Tensor, "..."], where: str) -> None:
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocabulary:
            raise TeacherError(
                f"{where}: token {int(ids.max())} is not in the vocabulary of {self._vocabulary}; the service's model is of "
                "another family"
            )


def service_capabilities(largest_k: int | None) -> Capabilities:
    """What a service can answer: no whole distributions, and of the student's candidates those that it is given."""
    return Capabilities(
        signals=frozenset({"sampled", "topk"}),
        supports=frozenset({"student", "teacher"}),
        largest_k=largest_k,
        needs_candidates=True,
        follows_student=False,
    )


def _named(request: ScoreRequest, types: Any) -> Any:
    """The candidates as the wire has them: one row for each token after the first, -1 where nothing is asked."""
    assert request.candidates is not None, (
        "the student's candidates are put into the rollouts before they are scored"
    )
    before = len(request.prompt_tokens) - 1
    rows = torch.nn.functional.pad(request.candidates.long(), (0, 0, before, 0), value=-1)
    return types.TensorData.from_torch_sparse(rows, pad_value=-1)


def _twice(ids: Int[Tensor, "T K"]) -> bool:
    ordered = ids.sort(dim=-1).values
    return bool((ordered[:, 1:] == ordered[:, :-1]).any())


def _checked(logprobs: Float[Tensor, "..."], shape: torch.Size, where: str) -> Float[Tensor, "..."]:
    """Log-probabilities that can be right, minus infinity lifted to a finite floor; TeacherError where they cannot."""
    if logprobs.shape != shape:
        raise TeacherError(
            f"{where}: {list(logprobs.shape)} log-probabilities, and {list(shape)} were asked for"
        )
    if torch.isnan(logprobs).any() or (logprobs > HIGHEST).any():
        raise TeacherError(
            f"{where} hold NaN or numbers above 0, which are no log-probabilities; look at the service"
        )
    return logprobs.float().clamp(min=TEACHER_FLOOR, max=0.0)
