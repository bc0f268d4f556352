"""The training client: gradients of an objective over a local model, chunk by chunk.

The gradient of the logit side is formed chunk by chunk of tokens as soon as the chunk's log-probabilities exist, so that
the [T, V] matrices of student and teacher are never held at once; then the body's graph is walked once a micro-batch.
Every token's share of the loss is fixed by the whole batch before the first micro-batch, so the split changes nothing
but rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum import functional as F
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.sampler import LocalSampler, _padded
from practicum.backends.local.self_teacher import LocalSelfTeacher
from practicum.errors import CheckpointError, ResourceError
from practicum.functional.chunked import Tiles, chunks
from practicum.objective import (
    Chunk,
    Objective,
    TermValues,
    TokenBatch,
    open_chunk,
    read_signal,
    token_batch,
    token_side,
)
from practicum.ports import AdamParams, SelfRule
from practicum.types import (
    Datum,
    ForwardResult,
    Head,
    Metrics,
    Rollout,
    TeacherSignal,
    TokenOutputs,
)


@dataclass(frozen=True, slots=True)
class TrainerLimits:
    """How much is held at once: padded tokens of a micro-batch, tokens of a chunk of the logit side."""

    micro_batch_tokens: int = 4096
    chunk_tokens: int = 128
    sampling_batch: int = 64


class _Records:
    """What a step reports: sums over tokens, and three numbers at every token of the whole batch."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self.broken: list[int] = []
        self.logprobs, self.teacher_logprobs, self.divergence = torch.full((3, tokens), torch.nan)

    def add(self, name: str, values: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + values.double().sum().item()
        self._counts[name] = self._counts.get(name, 0) + len(values)

    def means(self) -> Metrics:
        """The mean of each measure over the tokens at which it is known."""
        return {name: value / self._counts[name] for name, value in self._sums.items() if self._counts[name]}

    def place(self, index: Tensor, values: TermValues) -> None:
        self.logprobs[index] = values.logprobs
        for name in ("teacher_logprobs", "divergence"):
            column = getattr(values, name)
            if column is not None:
                getattr(self, name)[index] = column

    def outputs(self, data: Sequence[Datum], whole: Sequence[Datum]) -> list[TokenOutputs]:
        """The three numbers by rollout of `whole`, NaN at tokens that were not learned from.

        `data` are those of `whole` with each sum of teachers taken apart; the numbers of its first teacher stand for all.
        """
        columns = torch.stack([self.logprobs, self.teacher_logprobs, self.divergence])
        found: dict[int, TokenOutputs] = {}
        start = 0
        for datum in data:
            mask = datum.rollout.loss_mask
            numbers = torch.full((3, len(mask)), torch.nan)
            count = int(mask.sum())
            numbers[:, mask] = columns[:, start : start + count]
            start += count
            found.setdefault(id(datum.rollout), TokenOutputs(*numbers))
        return [found[id(datum.rollout)] for datum in whole]


class LocalTrainer:
    """Trains a local model; see `practicum.ports.TrainingClient`."""

    def __init__(self, language_model: LanguageModel, limits: TrainerLimits | None = None) -> None:
        self.language_model = language_model
        self.limits = limits or TrainerLimits()
        self._parameters = language_model.trainable()
        self._tiles = Tiles()
        self._optimizer = torch.optim.AdamW(self._parameters.values(), lr=0.0, fused=True)

    def refuses(self, objective: Objective) -> str | None:
        """Every objective can be trained here."""
        return None

    def sampling_client(self) -> LocalSampler:
        """Samples from the live weights."""
        return LocalSampler(self.language_model, None, self.limits.sampling_batch, self.limits.chunk_tokens)

    def self_teacher(self, rule: SelfRule) -> LocalSelfTeacher:
        """The student's own weights as a teacher, starting from what they are now."""
        return LocalSelfTeacher(self.language_model, rule, self.limits.sampling_batch, self.limits.chunk_tokens)

    def forward_backward(self, data: Sequence[Datum], objective: Objective, seed: int) -> ForwardResult:
        """The gradient of the objective over all of `data`; a micro-batch that does not fit in memory is halved.

        Raises ResourceError when not even one sequence fits.
        """
        earlier = {name: parameter.grad for name, parameter in self._parameters.items() if parameter.grad is not None}
        self._optimizer.zero_grad(set_to_none=True)
        device = self.language_model.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            result = self._within_memory(data, objective, seed)
        for name, gradient in earlier.items():
            now = self._parameters[name].grad
            self._parameters[name].grad = gradient if now is None else gradient + now
        return result

    def optim_step(self, params: AdamParams) -> Metrics:
        """One step of AdamW on the clipped gradient; a gradient that is not finite moves nothing and says so."""
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).item() if gradients else 0.0
        finite = norm < float("inf")
        if finite and gradients:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), params.max_grad_norm, torch.tensor(norm))
            for group in self._optimizer.param_groups:
                group.update(
                    lr=params.learning_rate, betas=params.betas, eps=params.epsilon, weight_decay=params.weight_decay
                )
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "skipped": float(not finite), "learning_rate": params.learning_rate}

    def save_state(self) -> dict[str, dict[str, Tensor]]:
        """The trainable weights under `student` and the moments of AdamW under `optimizer`: live views, not copies."""
        moments = {
            f"{name}/{key}": value.detach()
            for name, parameter in self._parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }
        return {"student": {name: value.detach() for name, value in self._parameters.items()}, "optimizer": moments}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore weights and moments in place; CheckpointError where they are those of another model."""
        self._check_state(tensors)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors["student"][name])
        self._optimizer.state.clear()
        for key, value in tensors["optimizer"].items():
            name, moment = key.rsplit("/", 1)
            parameter = self._parameters[name]
            self._optimizer.state[parameter][moment] = value.detach().clone().to(parameter.device)

    def _check_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        own = {name: parameter.shape for name, parameter in self._parameters.items()}
        saved = {name: value.shape for name, value in tensors["student"].items()}
        moments = {key.rsplit("/", 1)[0] for key in tensors["optimizer"]}
        differing = sorted({name for name, _ in own.items() ^ saved.items()} | (moments - own.keys()))
        if differing:
            raise CheckpointError(
                f"the state does not fit the student: {len(differing)} weights differ in name or shape (first: "
                f"{differing[0]}); resume with the model, lora and trainable_layers that the state was saved with"
            )

    def _within_memory(self, data: Sequence[Datum], objective: Objective, seed: int) -> ForwardResult:
        """The gradient of this call alone, begun anew with half as much held at once until it fits."""
        halvings = 0
        while True:
            torch.manual_seed(seed)
            try:
                result = self._forward_backward(data, objective, seed)
                return ForwardResult({**result.metrics, "halvings": float(halvings)}, result.outputs)
            except RuntimeError as error:
                if not _out_of_memory(error):
                    raise
                self._halve(data, error)
                halvings += 1

    def _forward_backward(self, data: Sequence[Datum], objective: Objective, seed: int) -> ForwardResult:
        whole, data = data, _one_teacher_each(data)
        batch = token_batch(data, objective, seed)
        records = _Records(len(batch.tokens))
        micro_batches = _micro_batches(data, self.limits.micro_batch_tokens)
        coefficients = (
            self._whole_coefficients(data, objective, batch, micro_batches) if objective.needs_sequences else None
        )
        self.language_model.model.train()
        for rows, following in pairwise([*micro_batches, []]):
            self._micro_batch(_gather(data, rows, batch), objective, coefficients, records)
            _release(data, rows, following)
        metrics = {"tokens": float(sum(int(datum.rollout.loss_mask.sum()) for datum in whole))}
        if records.broken:
            self._optimizer.zero_grad(set_to_none=True)
            return ForwardResult(metrics | {"nonfinite": float(len(set(records.broken)))}, records.outputs(data, whole))
        return ForwardResult(metrics | records.means(), records.outputs(data, whole))

    def _micro_batch(
        self, micro: "_Micro", objective: Objective, coefficients: list[Tensor] | None, records: _Records
    ) -> None:
        hidden = self._hidden(micro)
        head = self.language_model.head()
        gradients = []
        for part in chunks(len(micro.index), self.limits.chunk_tokens):
            tokens = micro.tokens[part]
            side = self._open(head, hidden[part], micro, part, objective)
            shares = (
                [token_side(term, value, tokens) for term, value in zip(objective.losses, side.values, strict=True)]
                if coefficients is None
                else [whole[micro.index[part]] for whole in coefficients]
            )
            loss = sum((share * value.value).sum() for share, value in zip(shares, side.values, strict=True))
            if not torch.isfinite(torch.as_tensor(loss)):
                broken = ~torch.isfinite(side.values[0].value)
                records.broken += tokens.rows[broken].tolist() or tokens.rows.tolist()
                return
            gradients.append(side.backward(shares))
            _measure(records, side.values, tokens, micro.signal.name)
            self._measure_conflict(records, head, hidden[part], micro, part)
            records.place(micro.index[part], side.values[0])
        if hidden.requires_grad:
            hidden.backward(torch.cat(gradients))

    @torch.no_grad()
    def _whole_coefficients(
        self, data: Sequence[Datum], objective: Objective, batch: TokenBatch, micro_batches: Sequence[list[int]]
    ) -> list[Tensor]:
        """The coefficients of all tokens, for terms in which a token's depends on other tokens: a pass without gradient."""
        self.language_model.model.eval()
        head = self.language_model.head()
        pieces: list[list[TermValues]] = []
        order = []
        for rows, following in pairwise([*micro_batches, []]):
            micro = _gather(data, rows, batch)
            hidden = self._hidden(micro)
            order.append(micro.index)
            for part in chunks(len(micro.index), self.limits.chunk_tokens):
                pieces.append(self._open(head, hidden[part], micro, part, objective).values)
            _release(data, rows, following)
        if not order:
            return [torch.zeros(0) for _ in objective.losses]
        back = torch.cat(order).argsort()
        merged = [
            TermValues.concatenate([piece[index] for piece in pieces])[back] for index in range(len(objective.losses))
        ]
        return [token_side(term, values, batch) for term, values in zip(objective.losses, merged, strict=True)]

    def _open(self, head: Head, hidden: Tensor, micro: "_Micro", part: slice, objective: Objective) -> Chunk:
        said = (micro.signal[part], micro.reference[part])
        return open_chunk(head, hidden, said, micro.tokens[part].to(hidden.device), objective, self._tiles)

    @torch.no_grad()
    def _measure_conflict(self, records: _Records, head: Head, hidden: Tensor, micro: "_Micro", part: slice) -> None:
        """How much several teachers contradict each other at the same tokens."""
        if micro.signal.pool is None:
            return
        members = [full for member in micro.signal.pool.members if (full := read_signal(member, part).full) is not None]
        if len(members) < 2:
            return
        student = head.logprobs(hidden)
        records.add("conflict_cosine", F.conflict_cosine(student, members))
        records.add("disagreement", F.disagreement(members))
        records.add("top1_conflict", F.top1_conflict(members))

    def _hidden(self, micro: "_Micro") -> Float[Tensor, "T D"]:
        """The student's hidden states that predict the micro-batch's supervised tokens, end to end."""
        sequences = [(*rollout.prompt_tokens, *rollout.tokens.tolist()) for rollout in micro.rollouts]
        ids, mask = _padded(sequences, side="right", device=self.language_model.device)
        hidden = self.language_model.body(ids, mask)
        wanted = torch.zeros_like(mask)
        for row, rollout in enumerate(micro.rollouts):
            first = len(rollout.prompt_tokens) - 1
            wanted[row, first : first + len(rollout.tokens)] = rollout.loss_mask.to(mask.device)
        return hidden[wanted]

    def _halve(self, data: Sequence[Datum], error: RuntimeError) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        longest = max(_length(datum) for datum in data)
        if self.limits.micro_batch_tokens <= longest and self.limits.chunk_tokens <= 1:
            raise ResourceError(
                f"one sequence of {longest} tokens does not fit in memory ({_first_line(error)}); shorten "
                "rollout.max_new_tokens, train fewer layers or use lora"
            ) from error
        self.limits = TrainerLimits(
            max(self.limits.micro_batch_tokens // 2, 1),
            max(self.limits.chunk_tokens // 2, 1),
            self.limits.sampling_batch,
        )


@dataclass(frozen=True, slots=True)
class _Micro:
    """Some rollouts of a batch whose teachers answer alike, end to end: `index` is where their tokens are in the batch."""

    rollouts: list[Rollout]
    index: Int[Tensor, " T"]
    tokens: TokenBatch
    signal: TeacherSignal
    reference: TeacherSignal


def _release(data: Sequence[Datum], rows: Sequence[int], following: Sequence[int]) -> None:
    """Let go of the teachers' heads that the next micro-batch does not read; all rows of one share their heads."""
    read, kept = (
        {head.key: head for row in part[:1] for head in (*data[row].signal.heads, *data[row].reference.heads)}
        for part in (rows, following)
    )
    for key in read.keys() - kept.keys():
        read[key].release()


def _one_teacher_each(data: Sequence[Datum]) -> list[Datum]:
    """The data with each sum of teachers taken apart: one datum a teacher, its share as its weight.

    They are then worked through teacher by teacher, so that no two heads are ever held at once.
    """
    apart: list[Datum] = []
    for datum in data:
        pool = datum.signal.pool
        if pool is None or pool.kind != "sum":
            apart.append(datum)
        else:
            shares = zip(pool.members, pool.weights, strict=True)
            apart += [replace(datum, signal=member, weight=datum.weight * weight) for member, weight in shares]
    return apart


def _gather(data: Sequence[Datum], rows: list[int], batch: TokenBatch) -> _Micro:
    """The supervised tokens of some rows, with what their teachers said of them."""
    index = torch.cat([(batch.rows == row).nonzero()[:, 0] for row in rows])
    rollouts = [data[row].rollout for row in rows]
    signal = _end_to_end([data[row].signal for row in rows], rollouts)
    reference = _end_to_end([data[row].reference for row in rows], rollouts)
    return _Micro(rollouts, index, batch[index], signal, reference)


def _end_to_end(signals: Sequence[TeacherSignal], rollouts: Sequence[Rollout]) -> TeacherSignal:
    """Signals of the same kind as one, at the supervised tokens of their rollouts."""

    def column(tensors: Sequence[Tensor | None]) -> Tensor | None:
        pairs = zip(tensors, rollouts, strict=True)
        kept = [tensor[rollout.loss_mask.to(tensor.device)] for tensor, rollout in pairs if tensor is not None]
        return torch.cat(kept) if kept else None

    pools = [signal.pool for signal in signals if signal.pool is not None]
    members = zip(*(pool.members for pool in pools), strict=True)
    pool = replace(pools[0], members=tuple(_end_to_end(member, rollouts) for member in members)) if pools else None
    return TeacherSignal(
        logprobs=column([signal.logprobs for signal in signals]),
        topk_ids=column([signal.topk_ids for signal in signals]),
        topk_logprobs=column([signal.topk_logprobs for signal in signals]),
        hidden=column([signal.hidden for signal in signals]),
        head=signals[0].head,
        name=signals[0].name,
        pool=pool,
    )


def _measure(records: _Records, values: Sequence[TermValues], tokens: TokenBatch, teacher: str) -> None:
    """Add what every step reports: the terms' values, the divergence to the teacher, entropies, sampler mismatch."""
    first = values[0]
    for number, value in enumerate(values):
        name = "loss" if len(values) == 1 else f"loss_{number}"
        measure = value.divergence
        if measure is None and value.teacher_logprobs is not None:
            measure = F.k1(value.logprobs, value.teacher_logprobs)
        if measure is None and value.teacher_logprobs is None:
            measure = -value.logprobs
        if measure is not None and bool(value.answered.all()):
            records.add(name, measure)
    if first.reverse_kl is not None:
        records.add("reverse_kl", first.reverse_kl)
        if teacher:
            records.add(f"reverse_kl/{teacher}", first.reverse_kl)
    records.add("student_entropy", first.student_entropy)
    if first.teacher_entropy is not None:
        records.add("teacher_entropy", first.teacher_entropy)
    mismatch = (first.logprobs - tokens.policy_logprobs).abs()
    records.add("sampler_mismatch", mismatch[~mismatch.isnan()])


def _micro_batches(data: Sequence[Datum], limit: int) -> list[list[int]]:
    """Rows of like length whose teachers answer alike, each list at most `limit` tokens with its padding, or one row."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for row, datum in enumerate(data):
        if datum.rollout.loss_mask.any():
            kinds.setdefault((_kind(datum.signal), _kind(datum.reference)), []).append(row)
    batches: list[list[int]] = []
    for rows in kinds.values():
        current: list[int] = []
        for row in sorted(rows, key=lambda row: _length(data[row])):
            if current and _length(data[row]) * (len(current) + 1) > limit:
                batches.append(current)
                current = []
            current.append(row)
        batches.append(current)
    return batches


def _kind(signal: TeacherSignal) -> tuple[object, ...]:
    """What two signals must share to be put end to end: the teacher, its head, the forms, the number of candidates."""
    head = None if signal.head is None else signal.head.key
    candidates = None if signal.topk_ids is None else signal.topk_ids.shape[-1]
    pool = signal.pool
    members = () if pool is None else (pool.kind, pool.weights, *(_kind(member) for member in pool.members))
    return signal.name, head, candidates, signal.hidden is None, signal.logprobs is None, members


def _length(datum: Datum) -> int:
    return len(datum.rollout.prompt_tokens) + len(datum.rollout.tokens)


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
