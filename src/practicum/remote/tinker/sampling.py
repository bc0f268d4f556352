"""Sample and score at a service through its sampling client, and check every answer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.costs import Meter, Phase
from practicum.errors import TeacherError
from practicum.functional import TEACHER_FLOOR
from practicum.objective import Signal
from practicum.ports import (
    Capabilities,
    SamplingClient,
)
from practicum.remote.tinker.connection import Connection, SessionLost
from practicum.statistics.signal import constant
from practicum.text import refuse_banned_ids, refuse_stop_texts
from practicum.types import Sample, SampleRequest, SamplingParams, ScoreRequest, TeacherSignal

MAX_LOGPROB = 1e-3
"""A log-probability above this, or a mass above 1 + this, is more than rounding."""

ID_BYTES, LOGPROB_BYTES = 4, 4
"""The bytes of a token's id and of a log-probability, without the framing of the protocol."""

MAX_REOPENINGS = 3


class ServiceSampler(SamplingClient):
    """Sample and score at a service; see `practicum.ports.SamplingClient`.

    `begin` asks the connection's service for the package's own client. If it names weights that
    outlive a session (`lasting`), it is called again after a restart of the service. `meter`
    counts the bytes of tokens and log-probabilities.
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
        self._capabilities = build_capabilities(largest_k)
        self._lasting = lasting
        self._meter = meter
        self._session = -1
        self._client: Any = None

    @property
    def capabilities(self) -> Capabilities:
        """The sampled token, the service's own candidates, and a request's candidates."""
        return self._capabilities

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Return one completion per request, each from the random stream of its seed."""
        from tinker import types

        refuse_stop_texts(params, f"the service at {self._connection.address}")
        refuse_banned_ids(params, f"the service at {self._connection.address}")

        def send(client: Any, request: SampleRequest) -> Any:
            settings = types.SamplingParams(
                max_tokens=params.max_new_tokens,
                seed=request.seed & self._connection.largest_seed,
                stop=sorted(params.stop_ids),
                temperature=params.temperature,
                top_k=params.top_k or -1,
                top_p=params.top_p,
            )
            prompt = types.ModelInput.from_ints(list(request.prompt_tokens))
            return client.sample(prompt, 1, settings)

        answers = self._ask(requests, send, "completions")
        samples = [self._read_sample(answer, params, n) for n, answer in enumerate(answers)]
        prompt_tokens = sum(len(request.prompt_tokens) for request in requests)
        new_tokens = sum(len(sample.tokens) for sample in samples)
        self._count("sample", ID_BYTES * (prompt_tokens + new_tokens) + LOGPROB_BYTES * new_tokens)
        return samples

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Return the log-probabilities of each request's tokens, and of candidates.

        The candidates are the service's most likely tokens, or the tokens that the request names.
        """
        from tinker import types

        k = min(signal.candidates, self._vocabulary) if signal.chooser == "teacher" else 0
        # A text without tokens has no scores; the service is not asked for it.
        scored = {number: request for number, request in enumerate(requests) if request.tokens}

        targets_sent = signal.chooser == "student"

        def send(client: Any, request: ScoreRequest) -> Any:
            targets = _build_targets(request, types) if targets_sent else None
            return client.sample(
                types.ModelInput.from_ints([*request.prompt_tokens, *request.tokens]),
                1,
                types.SamplingParams(max_tokens=1, temperature=1.0),
                include_prompt_logprobs=True,
                prompt_logprobs_last_n=len(request.tokens),
                topk_prompt_logprobs=k,
                target_prompt_logprobs=targets,
            )

        answers = self._ask(list(scored.values()), send, "scores")
        signals = [TeacherSignal(logprobs=torch.zeros(0))] * len(requests)
        for (number, request), answer in zip(scored.items(), answers, strict=True):
            where = f"{self._connection.address}: the scores of completion {number + 1} of {len(requests)}"
            # A service that does not know the field answers as if it had not been sent.
            if targets_sent and answer.target_prompt_logprobs is None:
                raise TeacherError(
                    f"{where} lack the candidates that the request named, as this service ignores "
                    "them; set support=teacher, or signal: sampled"
                )
            signals[number] = self._read_signal(request, answer, k, where)
        if targets_sent:
            tables = (request.candidates for request in scored.values())
            k = max((table.shape[1] for table in tables if table is not None), default=0)
        rows = sum(len(request.tokens) for request in scored.values())
        ids = sum(len(request.prompt_tokens) for request in scored.values()) + rows * (1 + k)
        self._count("score", ID_BYTES * ids + LOGPROB_BYTES * rows * (1 + k))
        return signals

    def _ask(
        self, requests: Sequence[Any], send: Callable[[Any, Any], Any], what: str
    ) -> list[Any]:
        """Return the answers to all requests.

        After a restart of the service repeat them, if the weights outlive that.
        """
        for attempt in range(MAX_REOPENINGS + 1):
            try:
                client = self._get_client()
                return self._connection.wait([send(client, request) for request in requests], what)
            except SessionLost:
                if not self._lasting or attempt == MAX_REOPENINGS:
                    raise
                self._connection.reopen()
        raise AssertionError("the last attempt returns or raises")

    def open(self) -> None:
        """Let the service select the weights now and not at the first request."""
        self._get_client()

    def _get_client(self) -> Any:
        """Return the package's client in the newest session."""
        # A client of the package belongs to one session and fails after a restart of the service.
        if self._session != self._connection.reopened:
            self._client = self._connection.request(
                lambda: self._begin(self._connection.service), "a sampling client"
            )
            self._session = self._connection.reopened
        return self._client

    def _count(self, phase: Phase, wire_bytes: int) -> None:
        if self._meter is not None:
            self._meter.count_bytes(phase, wire_bytes)

    def _read_sample(self, answer: Any, params: SamplingParams, number: int) -> Sample:
        """Return a completion after checking it.

        Its `policy_logprobs` are known only if no setting changed the model's distribution.
        """
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
        raw = [] if sequence.logprobs is None else list(sequence.logprobs)
        logprobs = _check_logprobs(torch.tensor(raw, dtype=torch.float32), tokens.shape, where)
        plain = params.temperature in (0.0, 1.0) and params.top_p == 1.0 and params.top_k == 0
        return Sample(
            tokens=tokens,
            sampling_logprobs=logprobs if params.temperature > 0 else torch.zeros_like(logprobs),
            policy_logprobs=logprobs if plain else torch.full_like(logprobs, torch.nan),
            stop_reason="stop" if int(tokens[-1]) in params.stop_ids else "length",
        )

    def _read_signal(self, request: ScoreRequest, answer: Any, k: int, where: str) -> TeacherSignal:
        count, length = len(request.tokens), len(request.prompt_tokens) + len(request.tokens)
        if answer.prompt_logprobs_np is None or len(answer.prompt_logprobs_np) != length:
            raise TeacherError(f"{where} do not match its {length} tokens; look at the service")
        last = torch.tensor(answer.prompt_logprobs_np[-count:])
        logprobs = _check_logprobs(last, torch.Size([count]), where)
        # Equal values at every token are a sign of a service that fills in a constant.
        same = constant(logprobs)
        has_one_token = len({*request.prompt_tokens, *request.tokens}) == 1
        if same is not None and same > TEACHER_FLOOR and not has_one_token:
            raise TeacherError(
                f"{where}: all are {same:.4g}, and a model's opinions differ; look at the service"
            )
        if k:
            table = answer.topk_prompt_logprobs_np
            if table is None or table.token_ids.shape != (length, k):
                raise TeacherError(
                    f"{where} lack the requested top {k} tokens; look at the service"
                )
            ids = torch.tensor(table.token_ids[-count:]).long()
            values = torch.tensor(table.logprobs[-count:])
        elif request.candidates is not None and answer.target_prompt_logprobs is not None:
            ids = request.candidates.long()
            values = answer.target_prompt_logprobs.to_torch()
            if values.shape != (length - 1, ids.shape[1]):
                raise TeacherError(
                    f"{where} do not have the shape of the candidates; look at the service"
                )
            values = values[-count:]
        else:
            return TeacherSignal(logprobs=logprobs)
        self._check_ids(ids, where)
        values = _check_logprobs(values, ids.shape, where)
        mass = values.exp().sum(dim=-1).max().item()
        if mass > 1 + MAX_LOGPROB:
            raise TeacherError(
                f"{where}: the candidates weigh {mass:.4g} together; look at the service"
            )
        if _has_twins(ids):
            raise TeacherError(f"{where}: a candidate is listed twice; look at the service")
        return TeacherSignal(logprobs=logprobs, topk_ids=ids, topk_logprobs=values)

    def _check_ids(self, ids: Int[Tensor, "..."], where: str) -> None:
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocabulary:
            raise TeacherError(
                f"{where}: token {int(ids.max())} is not in the vocabulary of {self._vocabulary}; "
                "the service's model is of another family"
            )


def build_capabilities(largest_k: int | None) -> Capabilities:
    """Return what a service can score: sampled tokens and candidates, no full distributions."""
    return Capabilities(
        signals=frozenset({"sampled", "topk"}),
        supports=frozenset({"student", "teacher"}),
        largest_k=largest_k,
        needs_candidates=True,
        follows_student=False,
    )


def _build_targets(request: ScoreRequest, types: Any) -> Any:
    """Return the candidates for the wire: a row for each token after the first, -1 if empty."""
    assert request.candidates is not None, (
        "the student's candidates are put into the rollouts before they are scored"
    )
    # Row i of the wire scores token i + 1, so the completion starts one row earlier.
    before = len(request.prompt_tokens) - 1
    rows = torch.nn.functional.pad(request.candidates.long(), (0, 0, before, 0), value=-1)
    return types.TensorData.from_torch_sparse(rows, pad_value=-1)


def _has_twins(ids: Int[Tensor, "T K"]) -> bool:
    ordered = ids.sort(dim=-1).values
    return bool((ordered[:, 1:] == ordered[:, :-1]).any())


def _check_logprobs(
    logprobs: Float[Tensor, "..."], shape: torch.Size, where: str
) -> Float[Tensor, "..."]:
    """Return log-probabilities, minus infinity raised to a finite floor.

    Raise TeacherError if they cannot be right.
    """
    if logprobs.shape != shape:
        raise TeacherError(
            f"{where}: {list(logprobs.shape)} log-probabilities, and {list(shape)} were asked for"
        )
    if torch.isnan(logprobs).any() or (logprobs > MAX_LOGPROB).any():
        raise TeacherError(
            f"{where} hold NaN or numbers above 0, which are no log-probabilities; look at the service"
        )
    return logprobs.float().clamp(min=TEACHER_FLOOR, max=0.0)
