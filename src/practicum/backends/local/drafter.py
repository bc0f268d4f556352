"""Train a drafter: unroll it over its own states, with the target's distributions as the teacher.

Every depth uses the chunks and terms of the student's trainer, over the draft vocabulary. A token's
share of the loss falls by `decay` from depth to depth (SpecForge, specforge/training/strategies).
A token has no loss, and is counted, if the target's most likely token is not in the vocabulary.
"""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from practicum.backends.local.device_limits import TrainerLimits
from practicum.backends.local.drafting import DraftingSampler
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.packing import pad_sequences
from practicum.backends.local.ranks import OneRank
from practicum.backends.local.residency import clone_to
from practicum.backends.local.target_states import DraftTeacher, TargetStates
from practicum.backends.local.trainer import LocalTrainer, UpdateView
from practicum.costs import GraphPlan
from practicum.errors import CheckpointError, ModelError
from practicum.functional.head import Head, TableHead
from practicum.losses import TermValues, build_chunk
from practicum.losses.measures import measure
from practicum.losses.passes import Part, Pass
from practicum.losses.token_axis import compute_all_coefficients
from practicum.models.config import DrafterConfig
from practicum.objective import Full, Objective
from practicum.ports import WeightUpdateRule
from practicum.ports.drafters import DraftModel, KeysAndValues, embed
from practicum.rollouts.drafts import is_replay, read_depths
from practicum.types import Rollout, TeacherSignal

MICRO_BATCH_TOKENS = 2048
"""The tokens of a micro-batch, unless the recipe sets them: each has a state for every depth."""

MAX_DIFFERENCE = {True: 1e-3, False: 0.2}
"""The largest difference of a probability between teacher and target, by whether both are exact."""


@dataclass(frozen=True, slots=True)
class _DrafterRank(OneRank):
    """The only process; the head of an update is the drafter's."""

    drafter: DraftModel | None = None

    @contextmanager
    def open_update(
        self, language_model: LanguageModel, learning: Collection[torch.nn.Parameter]
    ) -> Iterator[Head]:
        """Yield the drafter's head."""
        assert self.drafter is not None
        yield self.drafter.head


@dataclass(frozen=True, slots=True)
class _Unrolled:
    """The supervised tokens of a pass: the drafter's states, and the target's last states.

    `hidden` has one matrix per depth, `learns` is True where the depth has a state of the token,
    and `gradients` has the gradient of each matrix in `hidden`.
    """

    hidden: list[Float[Tensor, "T D"]]
    learns: list[Bool[Tensor, " T"]]
    gradients: list[Float[Tensor, "T D"]]
    target: Float[Tensor, "T D"]


class DrafterTrainer(LocalTrainer):
    """Train only a drafter; the language model is its frozen target."""

    def __init__(
        self,
        language_model: LanguageModel,
        drafter: DraftModel,
        config: DrafterConfig,
        limits: TrainerLimits,
        special_ids: frozenset[int] | None = None,
    ) -> None:
        parameters = {f"drafter.{name}": weight for name, weight in drafter.named_parameters()}
        rank = _DrafterRank(drafter=drafter)
        super().__init__(language_model, limits, special_ids, ranks=rank, parameters=parameters)
        self.drafter = drafter
        self.config = config
        folder = None if config.cache is None else Path(config.cache).expanduser()
        self.states = TargetStates(language_model, drafter.layers, folder)
        self._compared: set[tuple[int, ...]] = set()

    def explain_unsupported(self, objective: Objective) -> str | None:
        """Explain why a drafter cannot learn from the objective; return None if it can."""
        plain = all(
            isinstance(term.signal.question, Full)
            and term.correction.name == "none"
            and not term.on_sampled_token
            and not term.observes
            for term in objective.losses
        )
        if plain and not objective.needs_sequences and objective.reference_signal is None:
            return None
        return (
            "objective: a drafter learns from the target's whole distribution at single tokens; "
            "set objective: {signal: full, divergence: forward_kl} without a reference, an "
            "estimator or a correction"
        )

    def build_sampling_client(self) -> DraftingSampler:
        """Return a client that writes the target's text with the live drafter."""
        return self._open_drafting(self.language_model, self.drafter)

    def build_self_teacher(self, rule: WeightUpdateRule) -> DraftTeacher:
        """Return the target, which no rule changes."""
        sizes = self.limits.sampling_batch, self.limits.chunk_tokens
        teacher = DraftTeacher(self.language_model, {}, *sizes, rule=rule, states=self.states)
        return teacher.freeze()

    def snapshot(self) -> DraftingSampler:
        """Return the same client with a copy of the drafter."""
        if self._snapshot_model is None:
            self._snapshot_model = clone_to(self.language_model.device, self.language_model)
        return self._open_drafting(self._snapshot_model, copy.deepcopy(self.drafter))

    def _open_drafting(self, model: LanguageModel, drafter: DraftModel) -> DraftingSampler:
        limits = self.limits
        return DraftingSampler(
            model,
            batch_size=limits.sampling_batch,
            chunk_tokens=limits.chunk_tokens,
            drafter=drafter,
            config=self.config,
        )

    def save_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the drafter's weights, its vocabulary, and the moments."""
        state, vocabulary = super().save_state(), self.drafter.vocabulary
        buffers = {"t2d": vocabulary.t2d, "d2t": vocabulary.d2t}
        return {**state, "student": {**state["student"], **buffers}}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore weights and moments; CheckpointError if they have another vocabulary."""
        saved, vocabulary = dict(tensors["student"]), self.drafter.vocabulary
        t2d, _ = saved.pop("t2d", torch.zeros(0)), saved.pop("d2t", None)
        if not torch.equal(t2d.bool(), vocabulary.t2d):
            raise CheckpointError(
                "the state is of a drafter with another vocabulary; resume with the task and "
                "student.drafter.vocabulary that it was saved with"
            )
        super().load_state({**tensors, "student": saved})

    def plan_micro_batch(self, longest_text: int) -> GraphPlan:
        """Plan micro-batches of a fixed number of tokens."""
        tokens = self.limits.micro_batch_tokens or MICRO_BATCH_TOKENS
        return GraphPlan(max(tokens, longest_text), recompute=False)

    def _backward_pass(
        self, micro_batch: Pass | None, seed: int, head: Head, views: Sequence[UpdateView]
    ) -> None:
        """Add the gradient of one micro-batch at all depths."""
        assert micro_batch is not None, "a drafter is trained in one process"
        (view,) = views
        unrolled = self._unroll(micro_batch.rollouts)
        for _, _, part in micro_batch.gather_parts():
            for piece in self._cut(part, view.objective):
                self._add_piece(head, part, piece, view, unrolled)
        torch.autograd.backward(unrolled.hidden, unrolled.gradients)

    def _add_piece(
        self,
        head: Head,
        part: Part,
        piece: slice,
        view: UpdateView,
        unrolled: _Unrolled,
    ) -> None:
        """Add the gradient of some tokens at all depths, and record their values."""
        objective, records = view.objective, view.records
        signal, target = self._read_target(part.signal[piece], unrolled.target[piece])
        ids = self.drafter.vocabulary.ids.to(target.device)
        is_drafted = torch.isin(target.argmax(dim=-1), ids)
        records.add("drafter/masked", 1.0 - is_drafted.float())
        tokens = replace(
            part.tokens[piece],
            tokens=torch.searchsorted(ids, part.tokens.tokens[piece]).clamp(max=len(ids) - 1),
            policy_logprobs=torch.full_like(part.tokens.policy_logprobs[piece], torch.nan),
        )
        # Not renormalised: the target's tokens outside the vocabulary are never accepted.
        possible = target[:, ids].exp()
        recorded, totals = list[TermValues](), list[Tensor]()
        for depth, hidden in enumerate(unrolled.hidden):
            has_state = unrolled.learns[depth][piece]
            factor = self.config.decay**depth * (is_drafted & has_state)
            batch = replace(tokens, aggregate=tokens.aggregate * factor)
            pair = signal, part.reference[piece]
            chunk = build_chunk(head, hidden[piece], pair, batch, objective, self._buffers)
            coefficients = compute_all_coefficients(objective.tokens, chunk.values, batch)
            distributions = chunk.get_distributions(torch.arange(len(has_state)))
            assert distributions is not None, "the target's whole distribution is here"
            accepted = torch.minimum(distributions[0].exp(), possible).sum(dim=-1)
            records.add(f"drafter/acceptance_{depth}", accepted, has_state)
            if depth == 0:
                measure(records, chunk.values, batch, signal, objective)
                # The target wrote the text, so its sampler's numbers cannot be compared with the drafter's.
                unknown = torch.full_like(accepted, torch.nan)
                recorded = [replace(values, logprobs=unknown) for values in chunk.values]
            pairs = zip(totals or [0.0] * len(coefficients), coefficients, strict=True)
            totals = [total + coefficient for total, coefficient in pairs]
            unrolled.gradients[depth][piece] += chunk.backward(coefficients)
            del chunk  # Free its matrices before the next chunk.
        records.record_coefficients(part.index[piece], signal.name, recorded, totals)

    @torch.no_grad()
    def _read_target(
        self, signal: TeacherSignal, hidden: Float[Tensor, "t D"]
    ) -> tuple[TeacherSignal, Float[Tensor, "t V"]]:
        """Return the signal over the draft vocabulary, and the target's log-probabilities.

        `hidden` are the target's own last states. Raises ModelError if the teacher is no or another
        model.
        """
        states, head = signal.states, signal.head
        shape = None if states is None or signal.outside is not None else states.shape
        if states is None or head is None or shape != hidden.shape:
            raise ModelError(
                "teacher: it gives no hidden states of the drafter's target; set teacher: {type: "
                "self, weights: frozen}"
            )
        # The loss reads the same states, however the teacher computed its own.
        target = head.logprobs(hidden.to(states.device)).to(hidden.device)
        if head.key not in self._compared:
            model = self.language_model
            limit, expected = MAX_DIFFERENCE[model.is_exact], model.head().logprobs(hidden).exp()
            for logprobs in (target, model.head().logprobs(states.to(hidden))):
                is_same = logprobs.shape == expected.shape
                if not is_same or (logprobs.exp() - expected).abs().max() > limit:
                    raise ModelError(
                        "teacher: its distributions are not those of the drafter's target, so the "
                        "drafts would be rejected; set teacher: {type: self, weights: frozen}"
                    )
            self._compared.add(head.key)
        ids = self.drafter.vocabulary.ids.to(target.device)
        table = torch.log_softmax(target[:, ids], dim=-1)
        rows = torch.arange(len(table), device=table.device, dtype=torch.float32)[:, None]
        return TeacherSignal(hidden=rows, head=TableHead(table), name=signal.name), target

    def _unroll(self, rollouts: Sequence[Rollout]) -> _Unrolled:
        """Return the states of all depths for the supervised tokens, rollout by rollout."""
        texts = [(*rollout.prompt_tokens, *rollout.tokens.tolist()) for rollout in rollouts]
        model = self.language_model
        ids, _ = pad_sequences(texts, side="right", device=model.device)
        streams = [self.states.read(text) for text in texts]
        features = pad_sequence([states[:, :-1].flatten(1).float() for states in streams], True)
        # Places in the padded rows: a token at p is predicted at depth k by the row p - 2 - k.
        firsts = [len(rollout.prompt_tokens) for rollout in rollouts]
        pairs = list(zip(firsts, rollouts, strict=True))
        places = [first + row.loss_mask.nonzero()[:, 0] for first, row in pairs]
        spots = torch.cat(places)
        rows = torch.cat(
            [torch.full((int(row.loss_mask.sum()),), n) for n, (_, row) in enumerate(pairs)]
        )
        by_depth = [
            torch.full((len(row.tokens),), self.config.states == "drafted" or is_replay(row))
            for row in rollouts
        ]
        drafted, has_one_depth = (
            torch.cat(
                [column[row.loss_mask] for column, row in zip(columns, rollouts, strict=True)]
            )
            for columns in (map(read_depths, rollouts), by_depth)
        )
        hidden, learns = [], []
        for depth, states in enumerate(
            unroll(self.drafter, model.model, features, ids, self.config.depth)
        ):
            sources = spots - 2 - depth
            has_state = sources >= 0
            has_state &= ~has_one_depth | (drafted == depth)
            hidden.append(self.drafter.finish(states[rows, sources.clamp(min=0)]))
            learns.append(has_state.to(model.device))
        gradients = [torch.zeros_like(states) for states in hidden]
        last = [states[place - 1] for states, place in zip(streams, places, strict=True)]
        return _Unrolled(hidden, learns, gradients, self.states.finish(torch.cat(last)))


def unroll(
    drafter: DraftModel,
    target: Any,
    features: Float[Tensor, "B L F"],
    ids: Int[Tensor, "B L"],
    depths: int,
) -> Iterator[Float[Tensor, "B L D"]]:
    """Yield the states of all rows of padded texts, depth by depth.

    Depth 0 reads the target's states. Later depths read the drafter's own states and the text's
    tokens (test-time training): a row attends to the rows up to it at depth 0, and to
    itself at the depths between. Rows without a next token have states that mean nothing.
    """
    length = ids.shape[1]
    causal = torch.ones(1, length, length, dtype=torch.bool, device=ids.device).tril()
    places = torch.arange(length, device=ids.device)[None].expand_as(ids)
    state, path, memory = drafter.fuse(features), list[KeysAndValues](), None
    for depth in range(depths):
        shifted = torch.nn.functional.pad(ids[:, 1 + depth :], (0, min(1 + depth, length)))
        queries, pair = drafter.read(embed(target, shifted), state, places + depth)
        if memory is None:
            memory = pair
        else:
            path.append(pair)
        state = drafter.attend(state, queries, memory, causal, path)
        yield state
