"""Train a local model: compute the gradients of an objective chunk by chunk.

The loss and its gradient with respect to the hidden states are computed as soon as a chunk's logits
exist, so the [T, V] matrices are never in memory at once. One backward pass through the body
follows for each micro-batch. The full batch determines every token's share of the loss before the
first micro-batch, so splitting the batch only changes rounding.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.backends.local.adamw import check_state, take_step
from practicum.backends.local.device_limits import TrainerLimits, build_limits
from practicum.backends.local.graph import (
    activation_checkpointing,
    measure_activation_bytes,
    plan_micro_batch,
)
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.native import open_kernel
from practicum.backends.local.packing import compute_hidden_states
from practicum.backends.local.prepared import MIN_HEAD_ROWS, prepack_head
from practicum.backends.local.projections import prepare_projections, restore_projections
from practicum.backends.local.ranks import OneRank, Ranks, is_out_of_memory
from practicum.backends.local.residency import clone_to
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.self_teacher import LocalSelfTeacher
from practicum.core.randomness import seed_of
from practicum.costs import GraphPlan
from practicum.errors import ResourceError
from practicum.functional.chunked import BufferPool
from practicum.functional.dual_space import Projections
from practicum.functional.head import Head
from practicum.losses import (
    CompiledObjective,
    LossChunk,
    TermValues,
    TokenBatch,
    build_chunk,
    build_token_batch,
    compile_objective,
)
from practicum.losses.measures import (
    UpdateStatistics,
    compare,
    measure,
    measure_batch,
    measure_dropped,
)
from practicum.losses.passes import (
    Part,
    Pass,
    add_answers,
    build_score_requests,
    collect_head_keys,
    count_tokens,
    find_longest_length,
    group_rows_into_passes,
    split_pools,
    split_views,
)
from practicum.losses.spans import cut_between_groups
from practicum.losses.token_axis import compute_all_coefficients, compute_full_coefficients
from practicum.models.tensors import HEADER_BYTES
from practicum.objective import Objective
from practicum.ports import AdamParams, WeightUpdateRule
from practicum.text.tokenizers import shorten_error
from practicum.types import Datum, ForwardResult, Metrics, ScoreRequest

ONE_TOKEN = ScoreRequest((0,), (0,))
"""The text of a pass that only keeps this rank in step with passes of other ranks."""


@dataclass(slots=True)
class UpdateView:
    """The terms about some tokens of the texts in an update, and the report about these tokens.

    In `split_datums`, each sum of teachers is split. A first pass fills `pieces` with the
    indices, the teacher and the values of some tokens each, from which `coefficients` follow.
    """

    datums: Sequence[Datum]
    split_datums: Sequence[Datum]
    batch: TokenBatch
    objective: CompiledObjective
    records: UpdateStatistics
    needs_first_pass: bool
    pieces: list[tuple[Tensor, str, list[TermValues]]] = field(default_factory=list)
    coefficients: list[Tensor] = field(default_factory=list)


class LocalTrainer:
    """Train a local model; see `practicum.ports.TrainingClient`.

    Training and sampling compute the same function, unless `dropout` is set: then the dropout of
    the model's config is active in training. The token weights `not_special` exclude `special_ids`.
    `ranks` are the processes that each hold a shard of the model and learn from a share of the
    batch; each rank has a trainer, and all trainers receive the same calls. `bytes_a_token` is the
    activation memory per token if it is already known. `parameters` are trained instead of the
    model's own.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        limits: TrainerLimits | None = None,
        special_ids: frozenset[int] | None = None,
        *,
        dropout: bool = False,
        ranks: Ranks | None = None,
        bytes_a_token: int | None = None,
        parameters: dict[str, torch.nn.Parameter] | None = None,
    ) -> None:
        self.language_model = language_model
        self._special_ids = special_ids
        self.limits = limits or build_limits(language_model.device)
        self._dropout = dropout
        self._ranks = OneRank() if ranks is None else ranks
        self._parameters = parameters or language_model.trainable_parameters()
        self._buffers = BufferPool(open_kernel(language_model))
        self._bytes_a_token = bytes_a_token
        self._snapshot_model: LanguageModel | None = None
        self._maps: Projections | None = None
        self._optimizer = torch.optim.AdamW(self._parameters.values(), lr=0.0, fused=True)

    def explain_unsupported(self, objective: Objective) -> str | None:
        """Return None: this backend trains every objective."""
        return None

    def build_sampling_client(self) -> LocalSampler:
        """Return a client that samples from the live weights."""
        # Dropout would change the frozen layers' states, and a rank does not read states of another
        # rank.
        learns = not self._dropout and self._ranks.count == 1
        return replace(self._open_sampler(self.language_model, {}), learns=learns)

    def snapshot(self) -> LocalSampler:
        """Return a client that samples from a copy of the current trainable weights."""
        # The snapshot has its own modules and shares the frozen weights: another thread samples
        # while this trainer trains.
        if self._snapshot_model is None:
            self._snapshot_model = clone_to(self.language_model.device, self.language_model)
        return self._open_sampler(self._snapshot_model, self._copy_weights())

    def build_self_teacher(self, rule: WeightUpdateRule) -> LocalSelfTeacher:
        """Return the student's weights as a teacher, starting from the current ones."""
        rule, limits = rule.hold_within_step(), self.limits
        overlay = {} if rule.weights == "live" else self._copy_weights()
        batch, chunk = limits.sampling_batch, limits.chunk_tokens
        teacher = LocalSelfTeacher(self.language_model, overlay, batch, chunk, rule=rule)
        return teacher.freeze() if rule.weights == "frozen" else teacher

    def _open_sampler(self, model: LanguageModel, overlay: Mapping[str, Tensor]) -> LocalSampler:
        return LocalSampler(model, overlay, self.limits.sampling_batch, self.limits.chunk_tokens)

    def _copy_weights(self) -> dict[str, Tensor]:
        weights = self.language_model.trainable_parameters().items()
        return {name: parameter.detach().clone() for name, parameter in weights}

    def forward_backward(
        self, data: Sequence[Datum], objective: Objective, seed: int
    ) -> ForwardResult:
        """Accumulate the gradient of the objective over all datums, in micro-batches.

        Halves the micro-batch when memory runs out. Raises ResourceError if even a single sequence
        does not fit.
        """
        with self.add_gradients():
            plan = self.plan_micro_batch(find_longest_length(data))
            return self._retry_with_less_memory(data, objective, seed, plan)

    @contextlib.contextmanager
    def add_gradients(self) -> Iterator[None]:
        """Add the block's gradients to the accumulated gradients, and preserve the random state.

        If the block raises an error, the accumulated gradients do not change.
        """
        # Set them aside, so that the block may discard its own gradients and start again.
        accumulated = [(parameter, parameter.grad) for parameter in self._parameters.values()]
        self._optimizer.zero_grad(set_to_none=True)
        device = self.language_model.device
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                yield
        except BaseException:
            self._optimizer.zero_grad(set_to_none=True)
            raise
        finally:
            for parameter, gradient in accumulated:
                if gradient is not None:
                    new = parameter.grad
                    parameter.grad = gradient if new is None else gradient + new

    def optim_step(self, params: AdamParams) -> Metrics:
        """Take one step of AdamW on the clipped gradient.

        Without a finite gradient nothing changes, and the metrics report a skipped step.
        """
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = self._ranks.compute_norm(gradients)
        finite = norm < float("inf")
        if finite and gradients:
            self._ranks.clip(self._parameters.values(), params.max_grad_norm, norm)
            take_step(self._optimizer, params)
        self._optimizer.zero_grad(set_to_none=True)
        return {
            "grad_norm": norm,
            "skipped": float(not finite),
            "empty_updates": float(not gradients),
            "learning_rate": params.learning_rate,
        }

    @property
    def state_bytes(self) -> int:
        """The bytes of the files that `save_state` fills once AdamW has moments."""
        # Four tensors per parameter: the weight, two moments of its size, and a step counter.
        fixed_bytes = 4 + 4 * HEADER_BYTES
        return sum(3 * parameter.nbytes + fixed_bytes for parameter in self._parameters.values())

    def save_state(self) -> dict[str, dict[str, Tensor]]:
        """Return trainable weights (`student`) and moments (`optimizer`) as live views."""
        moments: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            for moment, tensor in self._optimizer.state.get(parameter, {}).items():
                moments[f"{name}/{moment}"] = tensor.detach()
        weights = {name: parameter.detach() for name, parameter in self._parameters.items()}
        return {"student": weights, "optimizer": moments}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore weights and moments in place; raise CheckpointError if they do not fit."""
        restore_projections(self._parameters, self._optimizer, tensors["student"])
        check_state(self._parameters, tensors)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors["student"][name])
        self._optimizer.state.clear()
        for key, tensor in tensors["optimizer"].items():
            name, moment = key.rsplit("/", 1)
            parameter = self._parameters[name]
            self._optimizer.state[parameter][moment] = tensor.detach().clone().to(parameter.device)

    def set_training_mode(self) -> None:
        """Set the mode for passes with a gradient; sampling and scoring set evaluation mode."""
        self.language_model.model.train(self._dropout)

    def plan_micro_batch(self, longest_text: int) -> GraphPlan:
        """Plan the micro-batches of a batch with a longest text of `longest_text` tokens."""
        if self.limits.micro_batch_tokens is not None:
            return GraphPlan(self.limits.micro_batch_tokens, recompute=False)
        if self._bytes_a_token is None:
            self.set_training_mode()
            self._bytes_a_token = measure_activation_bytes(self.language_model)
        budget = self.limits.graph_mib * 2**20
        return plan_micro_batch(self.language_model, self._bytes_a_token, longest_text, budget)

    def _retry_with_less_memory(
        self, datums: Sequence[Datum], objective: Objective, seed: int, plan: GraphPlan
    ) -> ForwardResult:
        """Compute this call's gradient; retry with half the micro-batch until it fits."""
        halvings = 0
        while True:
            try:
                with activation_checkpointing(self.language_model, plan.recompute):
                    result = self._forward_backward(datums, objective, seed, plan.tokens)
                recomputed = {"recomputed": 1.0} if plan.recompute else {}
                metrics = {**result.metrics, **recomputed, "halvings": float(halvings)}
                return replace(result, metrics=metrics)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self._halve(datums, plan.tokens, error)
                plan = self.plan_micro_batch(find_longest_length(datums))
                halvings += 1

    def _forward_backward(
        self, datums: Sequence[Datum], objective: Objective, seed: int, micro_batch_tokens: int
    ) -> ForwardResult:
        # Done once per update: the chunks and passes below only call the functions chosen here.
        views = [self._open_view(*view, seed) for view in split_views(datums, objective)]
        share = self._find_share(datums, micro_batch_tokens)
        passes = self._ranks.deal(self._build_micro_batches(split_pools(datums), views, share))
        with self._ranks.open_update(self.language_model, self._parameters.values()) as head:
            self._maps = prepare_projections(
                self._parameters,
                self._optimizer,
                objective.learning and objective.learning.maps_pace,
                datums,
                head,
                self._ranks.decide,
            )
            # The closed form needs no autograd through the head, so it can use a prepacked copy.
            count = sum(len(view.batch.tokens) for view in views)
            if count >= MIN_HEAD_ROWS and all(view.objective.fuses() for view in views):
                head = prepack_head(head)
            if any(view.needs_first_pass for view in views):
                self._compute_batch_coefficients(passes, head, views)
            self.set_training_mode()
            for micro_batch in passes:
                with self._ranks.open_pass(self.language_model):
                    self._backward_pass(micro_batch, seed, head, views)
        for view in views:
            view.records.merge(self._ranks.gather(view.records))
        if any(view.records.is_broken for view in views) or all(
            view.records.has_no_supervision for view in views
        ):
            # A gradient of zeros would still change the weights, through AdamW's momentum and
            # decay.
            self._optimizer.zero_grad(set_to_none=True)
        result, *later = (v.records.build_result(v.split_datums, v.datums) for v in views)
        return result.add_losses("observed", *later)

    def _open_view(self, datums: Sequence[Datum], objective: Objective, seed: int) -> UpdateView:
        """Prepare the terms about some tokens for an update."""
        split_datums, device = split_pools(datums), self.language_model.device
        batch = build_token_batch(split_datums, objective, seed, self._special_ids).to(device)
        records, needs = UpdateStatistics(len(batch.tokens), device), objective.needs_first_pass
        compiled = compile_objective(objective)
        return UpdateView(datums, split_datums, batch, compiled, records, needs(split_datums))

    def _find_share(self, datums: Sequence[Datum], limit: int) -> int:
        """Return the micro-batch size, in tokens, at which every rank gets a micro-batch."""
        count = self._ranks.count
        return limit if count == 1 else max(min(limit, -(-count_tokens(datums) // count)), 1)

    def _build_micro_batches(
        self, datums: Sequence[Datum], views: Sequence[UpdateView], limit: int
    ) -> list[Pass]:
        """Split the datums into micro-batches of at most `limit` tokens."""
        max_packed_tokens = self.language_model.max_packed_tokens
        rows_by_batch = list(group_rows_into_passes(datums, limit, max_packed_tokens))
        # A teacher's head stays loaded if the next rows also need it, even across passes.
        in_order = [rows for parts in rows_by_batch for rows in parts for _ in views]
        next_rows = [*in_order[1:], []]
        heads_needed_next = (collect_head_keys(datums, rows) for rows in next_rows)
        sides = [(view.split_datums, view.batch) for view in views]
        return [
            Pass(datums, sides, rows, list(islice(heads_needed_next, len(rows) * len(views))))
            for rows in rows_by_batch
        ]

    def _backward_pass(
        self, micro_batch: Pass | None, seed: int, head: Head, views: Sequence[UpdateView]
    ) -> None:
        """Add one micro-batch's gradient, or only stay in step with ranks that have one.

        Views and teachers of the same texts share the student's body.
        """
        if micro_batch is not None:
            # Seed with the first rollout: dropout does not depend on earlier micro-batches.
            first = micro_batch.rollouts[0]
            torch.manual_seed(seed_of(seed, "dropout", first.prompt.id, first.sample))
        hidden = self._compute_hidden(micro_batch)

        def differentiate() -> Float[Tensor, "T D"]:
            gradient = torch.zeros_like(hidden)
            for view, places, part in self._gather_parts(micro_batch, head, hidden, views):
                # The gradient stops at the hidden states here; the body's follows once, below.
                compute = self._differentiate_all
                if view.coefficients:
                    compute = self._differentiate_weighted
                gradient[places] += compute(head, hidden.detach()[places], part, view)
            return gradient

        gradient = self._ranks.attempt(differentiate, hidden)
        if hidden.requires_grad:
            hidden.backward(gradient)

    def _differentiate_all(
        self, head: Head, hidden: Tensor, part: Part, view: UpdateView
    ) -> Float[Tensor, "T D"]:
        """Return the gradient of the hidden states, and record the values of every token."""
        gradient, objective = torch.empty_like(hidden), view.objective
        for piece in self._cut(part, objective):
            chunk = self._open_chunk(head, hidden[piece], part, piece, objective)
            values, tokens, index = chunk.values, part.tokens[piece], part.index[piece]
            coefficients = compute_all_coefficients(objective.tokens, values, tokens)
            _measure_chunk(view, chunk, part, piece)
            measure_dropped(view.records, objective, values, tokens)
            gradient[piece] = chunk.backward(coefficients)
            view.records.record_coefficients(index, part.signal.name, values, coefficients)
            del chunk  # Free its matrices before the next chunk.
        return gradient

    def _differentiate_weighted(
        self, head: Head, hidden: Tensor, part: Part, view: UpdateView
    ) -> Float[Tensor, "T D"]:
        """Return the gradient of tokens with recorded values and known coefficients.

        Tokens with coefficient 0, which a weight excludes, do not go through the heads again.
        """
        gradient, objective = torch.zeros_like(hidden), view.objective
        coefficients = torch.stack([column[part.index] for column in view.coefficients])
        is_weighted = coefficients.ne(0).any(dim=0)
        # The coefficient of a group's first token also moves the later tokens of the group.
        is_weighted |= objective.read_groups(part.signal.extras) is not None
        positions = is_weighted.cpu().nonzero()[:, 0]
        part, states = part[positions], hidden[positions]
        columns = coefficients[:, positions]
        for piece in self._cut(part, objective):
            chunk = self._open_chunk(head, states[piece], part, piece, objective)
            factors = list(columns[:, piece])
            view.records.record_broken(part.index[piece], chunk.values, factors)
            gradient[positions[piece]] = chunk.backward(factors)
            del chunk
        return gradient

    @torch.no_grad()
    def _compute_batch_coefficients(
        self, passes: Sequence[Pass | None], head: Head, views: Sequence[UpdateView]
    ) -> None:
        """Compute the coefficients of the full batch, and record the values of every token.

        This is a forward pass without gradient, for the views that need it.
        """
        self.language_model.model.eval()
        for micro_batch in passes:
            with self._ranks.open_pass(self.language_model):
                hidden = self._compute_hidden(micro_batch)
                self._ranks.attempt(
                    partial(self._record_values, micro_batch, head, hidden, views), hidden
                )
        for view in views:
            self._fill_coefficients(view)

    def _record_values(
        self, micro_batch: Pass | None, head: Head, hidden: Tensor, views: Sequence[UpdateView]
    ) -> Float[Tensor, "T D"]:
        """Record the values of every token of a pass in the views that need them."""
        for view, places, part in self._gather_parts(micro_batch, head, hidden, views):
            states = hidden[places]
            for piece in self._cut(part, view.objective) if view.needs_first_pass else ():
                chunk = self._open_chunk(head, states[piece], part, piece, view.objective)
                _measure_chunk(view, chunk, part, piece)
                view.pieces.append((part.index[piece], part.signal.name, chunk.values))
                del chunk
        return hidden

    def _fill_coefficients(self, view: UpdateView) -> None:
        """Compute the coefficients of a view from its values in all ranks, if it has some."""
        sides, batch, records = view.objective.tokens, view.batch, view.records
        pieces = [piece for part in self._ranks.gather(view.pieces) for piece in part]
        if not pieces:
            return
        indices, _, values = zip(*pieces, strict=True)
        view.coefficients = compute_full_coefficients(sides, values, indices, batch)
        measure_batch(records, view.objective, values, indices, batch)
        for index, teacher, part in view.pieces:
            columns = [column[index] for column in view.coefficients]
            records.record_coefficients(index, teacher, part, columns)

    def _gather_parts(
        self, micro_batch: Pass | None, head: Head, hidden: Tensor, views: Sequence[UpdateView]
    ) -> Iterator[tuple[UpdateView, slice | Tensor, Part]]:
        """Yield the view, the places and the tokens of each part, with columns of whole answers."""
        for number, places, part in () if micro_batch is None else micro_batch.gather_parts():
            view, objective = views[number], views[number].objective
            if objective.reads_answers and len(part.index):
                # An answer is longer than a chunk, so its tokens go through the heads once before.
                states = hidden.detach()[places]
                values = [
                    self._open_chunk(head, states[piece], part, piece, objective).values
                    for piece in self._cut(part, objective)
                ]
                part = add_answers(part, objective.logits, values)
            yield view, places, part

    def _cut(self, part: Part, objective: CompiledObjective) -> Iterator[slice]:
        groups = objective.read_groups(part.signal.extras)
        return cut_between_groups(groups, len(part.index), self.limits.chunk_tokens)

    def _open_chunk(
        self, head: Head, hidden: Tensor, part: Part, piece: slice, objective: CompiledObjective
    ) -> LossChunk:
        signals = part.signal[piece], part.reference[piece]
        tokens = part.tokens[piece]
        return build_chunk(head, hidden, signals, tokens, objective, self._buffers, self._maps)

    def _compute_hidden(self, micro_batch: Pass | None) -> Float[Tensor, "T D"]:
        """Return the hidden states that predict the supervised tokens, concatenated."""
        if micro_batch is None:
            return compute_hidden_states(self.language_model, [ONE_TOKEN])
        is_supervised = torch.cat([rollout.loss_mask for rollout in micro_batch.rollouts])
        texts = build_score_requests(micro_batch.rollouts, reuse=True)
        hidden = compute_hidden_states(self.language_model, texts)
        # Index by number: with a mask on the device, the program would wait until the device has
        # counted it.
        return hidden if bool(is_supervised.all()) else hidden[is_supervised.nonzero()[:, 0]]

    def _halve(self, datums: Sequence[Datum], micro_batch_tokens: int, error: RuntimeError) -> None:
        """Halve the limits after memory ran out; raise ResourceError at their minimum."""
        self._optimizer.zero_grad(set_to_none=True)
        most = find_longest_length(datums)
        if micro_batch_tokens <= most and self.limits.chunk_tokens <= 1:
            raise ResourceError(
                f"one sequence of {most} tokens does not fit in memory ({shorten_error(error)}); "
                "shorten rollout.max_new_tokens, train fewer layers or use lora"
            ) from error
        # The plan may allow more tokens than the batch has; halving that limit would change
        # nothing.
        used_tokens = min(self._find_share(datums, micro_batch_tokens), count_tokens(datums))
        self.limits = replace(
            self.limits,
            micro_batch_tokens=max(used_tokens // 2, 1),
            chunk_tokens=max(self.limits.chunk_tokens // 2, 1),
        )


def _measure_chunk(view: UpdateView, chunk: LossChunk, part: Part, piece: slice) -> None:
    """Record the values of a chunk's tokens before its gradient is computed."""
    compare(view.records, chunk, part, piece)
    measure(view.records, chunk.values, part.tokens[piece], part.signal[piece], view.objective)
    view.records.add("fused", torch.full_like(chunk.values[0].logprobs, chunk.fused))
