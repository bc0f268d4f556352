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
from jaxtyping import Float
from torch import Tensor

from practicum.backends.local.graph import (
    activation_checkpointing,
    measure_activation_bytes,
    plan_micro_batch,
)
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.packing import hidden_states
from practicum.backends.local.prepared import MIN_HEAD_ROWS, prepack_head
from practicum.backends.local.residency import clone_to
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.self_teacher import LocalSelfTeacher
from practicum.core.randomness import seed_of
from practicum.costs import GraphPlan
from practicum.errors import CheckpointError, ResourceError
from practicum.functional.chunked import BufferPool, chunks
from practicum.functional.head import Head
from practicum.models.tensors import HEADER_BYTES
from practicum.objective import (
    LossChunk,
    Objective,
    TermValues,
    TokenBatch,
    build_chunk,
    build_token_batch,
    can_fuse,
    compute_coefficients,
)
from practicum.objective.measures import Records, compare, measure
from practicum.objective.passes import (
    Part,
    Pass,
    count_tokens,
    heads_of,
    longest,
    one_teacher_each,
    rows_of_passes,
    texts_of,
)
from practicum.ports import AdamParams, WeightUpdateRule
from practicum.types import Datum, ForwardResult, Metrics


@dataclass(frozen=True, slots=True)
class TrainerLimits:
    """Bounds on what is held at once: tokens of a micro-batch, tokens of a chunk of the logit side, completions being decoded.

    Without `micro_batch_tokens`, as many as `graph_mib` of memory hold what the student's backward pass needs.
    """

    micro_batch_tokens: int | None = None
    chunk_tokens: int = 128
    sampling_batch: int = 64
    graph_mib: int = 1024


class LocalTrainer:
    """Trains a local model; see `practicum.ports.TrainingClient`.

    The model that learns is the very function that samples, unless `dropout`: then what its config asks for in training is in
    force while it learns. `special_ids` are the tokens that weights `not_special` leave out.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        limits: TrainerLimits | None = None,
        special_ids: frozenset[int] | None = None,
        *,
        dropout: bool = False,
    ) -> None:
        self.language_model = language_model
        self._special_ids = special_ids
        self.limits = limits or TrainerLimits()
        self._dropout = dropout
        self._parameters = language_model.trainable_parameters()
        self._tiles = BufferPool()
        self._graph_bytes: int | None = None
        self._twin: LanguageModel | None = None
        self._optimizer = torch.optim.AdamW(self._parameters.values(), lr=0.0, fused=True)

    def refuses(self, objective: Objective) -> str | None:
        """Every objective can be trained here."""
        return None

    def sampling_client(self) -> LocalSampler:
        """Samples from the live weights."""
        return LocalSampler(
            self.language_model, {}, self.limits.sampling_batch, self.limits.chunk_tokens
        )

    def snapshot(self) -> LocalSampler:
        """Samples from a copy of the trainable weights, through modules of its own that share all others."""
        if self._twin is None:
            self._twin = clone_to(self.language_model.device, self.language_model)
        now = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        return LocalSampler(self._twin, now, self.limits.sampling_batch, self.limits.chunk_tokens)

    def self_teacher(self, rule: WeightUpdateRule) -> LocalSelfTeacher:
        """The student's own weights as a teacher, starting from what they are now."""
        return LocalSelfTeacher.of(
            self.language_model, rule, self.limits.sampling_batch, self.limits.chunk_tokens
        )

    def forward_backward(
        self, data: Sequence[Datum], objective: Objective, seed: int
    ) -> ForwardResult:
        """The gradient of the objective over all of `data`; a micro-batch that does not fit in memory is halved.

        Raises ResourceError when not even one sequence fits.
        """
        accumulated = {
            name: parameter.grad
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        }
        self._optimizer.zero_grad(set_to_none=True)
        device = self.language_model.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            plan = self.graph_plan(longest(data))
            result = self._retry_with_less_memory(data, objective, seed, plan)
        for name, gradient in accumulated.items():
            now = self._parameters[name].grad
            self._parameters[name].grad = gradient if now is None else gradient + now
        return result

    def optim_step(self, params: AdamParams) -> Metrics:
        """Take one step of AdamW on the clipped gradient; without a finite gradient nothing moves, and the metrics say so."""
        gradients = [
            parameter.grad for parameter in self._parameters.values() if parameter.grad is not None
        ]
        norm = torch.nn.utils.get_total_norm(gradients).item() if gradients else 0.0
        finite = norm < float("inf")
        if finite and gradients:
            torch.nn.utils.clip_grads_with_norm_(
                self._parameters.values(), params.max_grad_norm, torch.tensor(norm)
            )
            for group in self._optimizer.param_groups:
                group.update(
                    lr=params.learning_rate,
                    betas=params.betas,
                    eps=params.epsilon,
                    weight_decay=params.weight_decay,
                )
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {
            "grad_norm": norm,
            "skipped": float(not finite),
            "empty_updates": float(not gradients),
            "learning_rate": params.learning_rate,
        }

    @property
    def state_bytes(self) -> int:
        """The size of the files of what `save_state` gives once there are moments: two like the weight, and a step's number."""
        step = 4
        return sum(
            3 * parameter.nbytes + step + 4 * HEADER_BYTES
            for parameter in self._parameters.values()
        )

    def save_state(self) -> dict[str, dict[str, Tensor]]:
        """The trainable weights under `student` and the moments of AdamW under `optimizer`: live views, not copies."""
        moments = {
            f"{name}/{key}": value.detach()
            for name, parameter in self._parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }
        return {
            "student": {name: value.detach() for name, value in self._parameters.items()},
            "optimizer": moments,
        }

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
        differing = sorted(
            {name for name, _ in own.items() ^ saved.items()} | (moments - own.keys())
        )
        if differing:
            raise CheckpointError(
                f"the state does not fit the student: {len(differing)} weights differ in name or shape (first: "
                f"{differing[0]}); resume with the model, lora and trainable_layers that the state was saved with"
            )

    def start_learning(self) -> None:
        """Set the model's mode for passes that learn; sampling and scoring set theirs."""
        self.language_model.model.train(self._dropout)

    def graph_plan(self, longest: int) -> GraphPlan:
        """How many tokens go through the student together, if the longest text has so many."""
        if self.limits.micro_batch_tokens is not None:
            return GraphPlan(self.limits.micro_batch_tokens, recompute=False)
        if self._graph_bytes is None:
            self.start_learning()
            self._graph_bytes = measure_activation_bytes(self.language_model)
        return plan_micro_batch(
            self.language_model, self._graph_bytes, longest, self.limits.graph_mib * 2**20
        )

    def _retry_with_less_memory(
        self, data: Sequence[Datum], objective: Objective, seed: int, plan: GraphPlan
    ) -> ForwardResult:
        """The gradient of this call alone, begun anew with half as much held at once until it fits."""
        halvings = 0
        while True:
            try:
                with activation_checkpointing(self.language_model, plan.recompute):
                    result = self._forward_backward(data, objective, seed, plan.tokens)
                again = {"recomputed": 1.0} if plan.recompute else {}
                return replace(
                    result, metrics={**result.metrics, **again, "halvings": float(halvings)}
                )
            except RuntimeError as error:
                if not _out_of_memory(error):
                    raise
                self._halve(data, plan.tokens, error)
                plan = self.graph_plan(longest(data))
                halvings += 1

    def _forward_backward(
        self, data: Sequence[Datum], objective: Objective, seed: int, micro_batch_tokens: int
    ) -> ForwardResult:
        whole, data = data, one_teacher_each(data)
        batch = build_token_batch(data, objective, seed, self._special_ids)
        records = Records(len(batch.tokens))
        passes = self._passes(data, batch, micro_batch_tokens)
        head = self.language_model.head()
        if len(batch.tokens) >= MIN_HEAD_ROWS and can_fuse(objective):
            head = prepack_head(head)
        coefficients = (
            self._compute_batch_coefficients(passes, head, objective, batch)
            if objective.needs_sequences
            else None
        )
        self.start_learning()
        for one in passes:
            # Masks of dropout belong to the pass, whatever was dealt before it and to whom.
            first = one.rollouts[0]
            torch.manual_seed(seed_of(seed, "dropout", first.prompt.id, first.sample))
            self._backward_micro_batch(one, head, objective, coefficients, records)
        if records.broken or records.nothing_supervised:
            # A gradient of zeros would still move the weights, by AdamW's momentum and by weight decay.
            self._optimizer.zero_grad(set_to_none=True)
        return records.result(data, whole)

    def _passes(self, data: Sequence[Datum], batch: TokenBatch, limit: int) -> list[Pass]:
        """The data cut into passes through the student, of at most `limit` tokens each."""
        passes = list(rows_of_passes(data, limit, self.language_model.packs_up_to))
        parts = [rows for of_pass in passes for rows in of_pass]
        read_next = {
            id(rows): heads_of(data, following) for rows, following in pairwise([*parts, []])
        }
        return [
            Pass(data, batch, rows, [read_next[id(of_teacher)] for of_teacher in rows])
            for rows in passes
        ]

    def _backward_micro_batch(
        self,
        one: Pass,
        head: Head,
        objective: Objective,
        coefficients: list[Tensor] | None,
        records: Records,
    ) -> None:
        """Add the gradient of one pass; several teachers of the same tokens share the student's body."""
        hidden = self._hidden(one)
        gradient = torch.zeros_like(hidden)
        for part in one.parts():
            for piece in chunks(len(part.index), self.limits.chunk_tokens):
                tokens = part.tokens[piece]
                side = self._open(head, hidden[piece], part, piece, objective)
                shares = (
                    [
                        compute_coefficients(term, value, tokens)
                        for term, value in zip(objective.losses, side.values, strict=True)
                    ]
                    if coefficients is None
                    else [whole[part.index[piece]] for whole in coefficients]
                )
                loss = sum(
                    (share * value.value).sum()
                    for share, value in zip(shares, side.values, strict=True)
                )
                if not torch.isfinite(torch.as_tensor(loss)):
                    broken = ~torch.isfinite(side.values[0].value)
                    records.broken += tokens.rows[broken].tolist() or tokens.rows.tolist()
                    return
                compare(records, side, part, piece)
                gradient[piece] += side.backward(shares)
                measure(records, side.values, tokens, part.signal.name)
                records.add("fused", torch.full_like(side.values[0].logprobs, side.fused))
                records.place(part.index[piece], side.values[0], shares)
                records.share(part.signal.name, side.values, shares)
        if hidden.requires_grad:
            hidden.backward(gradient)

    @torch.no_grad()
    def _compute_batch_coefficients(
        self, passes: Sequence[Pass], head: Head, objective: Objective, batch: TokenBatch
    ) -> list[Tensor]:
        """The coefficients of all tokens, for terms in which a token's depends on other tokens: a pass without gradient."""
        self.language_model.model.eval()
        pieces: list[list[TermValues]] = []
        token_indices = []
        for one in passes:
            hidden = self._hidden(one)
            for part in one.parts():
                token_indices.append(part.index)
                for piece in chunks(len(part.index), self.limits.chunk_tokens):
                    pieces.append(self._open(head, hidden[piece], part, piece, objective).values)
        if not token_indices:
            return [torch.zeros(0) for _ in objective.losses]
        back = torch.cat(token_indices).argsort()
        merged = [
            TermValues.concatenate([piece[index] for piece in pieces])[back]
            for index in range(len(objective.losses))
        ]
        return [
            compute_coefficients(term, values, batch)
            for term, values in zip(objective.losses, merged, strict=True)
        ]

    def _open(
        self, head: Head, hidden: Tensor, part: Part, piece: slice, objective: Objective
    ) -> LossChunk:
        said = (part.signal[piece], part.reference[piece])
        return build_chunk(
            head, hidden, said, part.tokens[piece].to(hidden.device), objective, self._tiles
        )

    def _hidden(self, one: Pass) -> Float[Tensor, "T D"]:
        """The student's hidden states that predict the supervised tokens of a pass, end to end."""
        texts = texts_of(one.rollouts)
        learned = torch.cat([rollout.loss_mask for rollout in one.rollouts])
        hidden = hidden_states(self.language_model, texts)
        return hidden if bool(learned.all()) else hidden[learned.to(hidden.device)]

    def _halve(self, data: Sequence[Datum], micro_batch_tokens: int, error: RuntimeError) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        most = longest(data)
        if micro_batch_tokens <= most and self.limits.chunk_tokens <= 1:
            raise ResourceError(
                f"one sequence of {most} tokens does not fit in memory ({_first_line(error)}); shorten "
                "rollout.max_new_tokens, train fewer layers or use lora"
            ) from error
        whole = min(micro_batch_tokens, count_tokens(data))
        self.limits = replace(
            self.limits,
            micro_batch_tokens=max(whole // 2, 1),
            chunk_tokens=max(self.limits.chunk_tokens // 2, 1),
        )


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
