"""Define the packed numbers per token that both sides of an objective read and write."""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from practicum.columns import TokenColumns
from practicum.core.randomness import seed_of
from practicum.functional.sequence import token_coefficients
from practicum.objective.spec import VERIFIER, Objective
from practicum.types import AUTHORS, Datum, Judgement, Rollout, Source


@dataclass(frozen=True, slots=True)
class TokenBatch(TokenColumns):
    """The supervised tokens of some rollouts, packed; `rows` tells the sequences apart.

    `authors` are the writers of the tokens as indices into `AUTHORS`, and `draws` the random
    numbers of `mc` signals. The tuples are by row: rewards, prompts, texts, sources. `first` has
    the first row with the same rollout, which differs from the row itself if several teachers each
    have a row for a rollout. `special` is True at special tokens, and None if they are unknown.
    `spans` numbers the spans of tokens of teachers with other tokenizers; None: each token is a
    span. `rewards` has the verifier's rewards and the values of each scorer; the columns of
    `judged` are the per-token numbers of the scorers in `judges`. `turns` numbers the model's turns
    of each row from 0; None: no row is a conversation. `turn_rewards` has the environment's reward
    of each turn, by row.
    """

    tokens: Int[Tensor, " T"]
    rows: Int[Tensor, " T"]
    positions: Int[Tensor, " T"]
    sampling_logprobs: Float[Tensor, " T"]
    policy_logprobs: Float[Tensor, " T"]
    aggregate: Float[Tensor, " T"]
    authors: UInt8[Tensor, " T"]
    draws: Float[Tensor, "T K"]
    rewards: Mapping[str, tuple[float | None, ...]]
    groups: tuple[str, ...]
    texts: tuple[str, ...]
    sources: tuple[Source, ...]
    first: tuple[int, ...]
    special: Bool[Tensor, " T"] | None = None
    spans: Int[Tensor, " T"] | None = None
    judges: tuple[str, ...] = ()
    judged: Float[Tensor, "T J"] | None = None
    turns: Int[Tensor, " T"] | None = None
    turn_rewards: tuple[tuple[float | None, ...], ...] = ()
    row_values: dict[Hashable, Float[Tensor, "R *K"]] = field(default_factory=dict)
    shared: ClassVar[frozenset[str]] = frozenset({"row_values"})

    def to(self, device: torch.device) -> "TokenBatch":
        """Return the batch with its tensors on a device."""
        return replace(self, row_values={}).map_all(lambda tensor: tensor.to(device))

    def spread(self, key: Hashable, compute: Callable[[], Sequence[float]]) -> Float[Tensor, " T"]:
        """Return one number per row at the row's tokens.

        `compute` returns the numbers of all rows. It runs once for all parts of a batch: the number
        of parts grows with the number of tokens, so reading every row in each part would be
        quadratic.
        """
        if key not in self.row_values:
            values = torch.tensor(compute(), dtype=torch.float32)
            self.row_values[key] = values.to(self.rows.device)
        return self.row_values[key][self.rows]

    def spread_turns(
        self, key: Hashable, compute: Callable[[], Sequence[Sequence[float]]]
    ) -> Float[Tensor, " T"]:
        """Return one number per turn at the turn's tokens; `compute` returns all rows' numbers."""
        if key not in self.row_values:
            rows = compute()
            longest = max(map(len, rows), default=0)
            padded = [[*row, *[0.0] * (longest - len(row))] for row in rows]
            self.row_values[key] = torch.tensor(padded, dtype=torch.float32).to(self.rows.device)
        return self.row_values[key][self.rows, self.turn_numbers]

    @property
    def turn_numbers(self) -> Int[Tensor, " T"]:
        """Return the turn of each token; a single answer is turn 0."""
        return torch.zeros_like(self.rows) if self.turns is None else self.turns

    def read_judgements(self, scorer: str) -> Float[Tensor, " T"] | None:
        """Return a scorer's number at each token, 0 where it gave no number; None if it never gives
        per-token numbers.
        """
        if self.judged is None or scorer not in self.judges:
            return None
        return self.judged[:, self.judges.index(scorer)]

    def read_rewards(self, scorer: str) -> Sequence[float | None]:
        """Return the reward of each row by a scorer; None for a row without a reward."""
        return self.rewards.get(scorer, [None] * len(self.groups))

    def apply_by_row(
        self, values: Float[Tensor, "T *K"], function: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, " T"]:
        """Apply a function to the numbers of each row's tokens."""
        lengths = torch.bincount(self.rows, minlength=len(self.groups)).tolist()
        return torch.cat([function(row) for row in values.split(lengths)])

    def group_rows(self) -> "list[list[int]]":
        """Return the rows of each prompt, each rollout once."""
        rows: dict[str, list[int]] = {}
        for row, group in enumerate(self.groups):
            if self.first[row] == row:
                rows.setdefault(group, []).append(row)
        return list(rows.values())


@dataclass(frozen=True, slots=True)
class TermValues(TokenColumns):
    """The logit side of one term: a differentiable `value` per token, and detached statistics.

    `is_scored` is True at tokens for which the term has its signal. `reverse_kl` to the teacher is
    measured for every divergence: it is the common measure of all objectives. `reference_logprobs` are
    set for a term with weights that read them. `teacher_logits` of
    the sampled tokens and `teacher_values` of the states are set for terms with returns of raw
    logits.
    """

    loss_value: Float[Tensor, " T"]
    is_scored: Bool[Tensor, " T"]
    logprobs: Float[Tensor, " T"]
    teacher_logprobs: Float[Tensor, " T"] | None
    divergence: Float[Tensor, " T"] | None
    student_entropy: Float[Tensor, " T"]
    teacher_entropy: Float[Tensor, " T"] | None
    reverse_kl: Float[Tensor, " T"] | None
    sampled_rank: Int[Tensor, " T"] | None = None
    greedy_rank: Int[Tensor, " T"] | None = None
    drafted_rank: Int[Tensor, " T"] | None = None
    teacher_logits: Float[Tensor, " T"] | None = None
    teacher_values: Float[Tensor, " T"] | None = None
    reference_logprobs: Float[Tensor, " T"] | None = None


def build_token_batch(
    datums: Sequence[Datum],
    objective: Objective,
    seed: int = 0,
    special: Collection[int] | None = None,
) -> TokenBatch:
    """Return the supervised tokens of all rollouts, with the aggregate's coefficients.

    A rollout in several data, one per teacher, is one sequence of the aggregate. `special` are the
    ids of the student's special tokens, if they are known.
    """
    rollouts = [datum.rollout for datum in datums]
    masks = [rollout.loss_mask for rollout in rollouts]
    lengths = [int(mask.sum()) for mask in masks]
    counts = torch.tensor(lengths, dtype=torch.long)
    # Signals read the first random numbers, and weights by drafts the last one.
    num_draws = max(term.signal.drawn for term in objective.losses)
    num_draws += any("drafted_rank" in term.weighs_by for term in objective.losses)
    coefficients = torch.tensor(_compute_coefficients(datums, lengths, objective))

    def pack(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat([tensor[mask] for tensor, mask in zip(tensors, masks, strict=True)])

    tokens = pack(rollout.tokens for rollout in rollouts)
    judges = _list_token_judges(rollouts)
    special_ids = None if special is None else torch.tensor(sorted(special), dtype=torch.long)
    return TokenBatch(
        tokens=tokens,
        rows=torch.repeat_interleave(torch.arange(len(datums)), counts),
        positions=torch.cat([mask.nonzero()[:, 0] for mask in masks]),
        sampling_logprobs=pack(rollout.sampling_logprobs for rollout in rollouts),
        policy_logprobs=pack(rollout.policy_logprobs for rollout in rollouts),
        aggregate=torch.repeat_interleave(coefficients, counts),
        authors=torch.cat([_gather_authors(rollout) for rollout in rollouts]),
        draws=torch.cat([_draw_uniforms(rollout, num_draws, seed) for rollout in rollouts]),
        rewards=_collect_rewards(rollouts),
        groups=tuple(rollout.prompt.id for rollout in rollouts),
        texts=tuple(rollout.text for rollout in rollouts),
        sources=tuple(rollout.source for rollout in rollouts),
        first=_find_first_rows(datums),
        special=None if special_ids is None else torch.isin(tokens, special_ids),
        spans=_number_spans(datums),
        judges=judges,
        judged=pack(_stack_judgements(rollout, judges) for rollout in rollouts) if judges else None,
        turns=pack(map(number_turns, rollouts)) if any(row.turns for row in rollouts) else None,
        turn_rewards=tuple(_list_turn_rewards(rollout) for rollout in rollouts),
    )


def _number_spans(datums: Sequence[Datum]) -> Int[Tensor, " T"] | None:
    """Return the number of the span of each supervised token; None if each is a span."""
    starts = [datum.shared_starts for datum in datums]
    if all(mask is None for mask in starts):
        return None
    numbered, last = [], 0
    for mask, datum in zip(starts, datums, strict=True):
        is_start = torch.ones_like(datum.rollout.loss_mask) if mask is None else mask.clone()
        # Rows never share a span, even if the first token of a row is not marked as a start.
        is_start[:1] = True
        numbered.append((last + is_start.cumsum(0))[datum.rollout.loss_mask])
        last += int(is_start.sum())
    return torch.cat(numbered)


def _collect_rewards(rollouts: Sequence[Rollout]) -> dict[str, tuple[float | None, ...]]:
    """Return the verifier's rewards and the values of each scorer, one per rollout."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.judgements)
    nothing = Judgement(None)
    return {
        VERIFIER: tuple(rollout.reward for rollout in rollouts),
        **{
            name: tuple(rollout.judgements.get(name, nothing).value for rollout in rollouts)
            for name in names
        },
    }


def _list_token_judges(rollouts: Sequence[Rollout]) -> tuple[str, ...]:
    """Return the scorers that gave numbers to tokens."""
    return tuple(
        dict.fromkeys(
            name
            for rollout in rollouts
            for name, judgement in rollout.judgements.items()
            if judgement.tokens is not None
        )
    )


def _stack_judgements(rollout: Rollout, judges: Sequence[str]) -> Float[Tensor, "T J"]:
    """Return a rollout's per-token numbers, one column per scorer; 0 where a scorer gave none."""
    columns = torch.zeros(len(rollout.tokens), len(judges))
    for number, name in enumerate(judges):
        judgement = rollout.judgements.get(name)
        if judgement is not None and judgement.tokens is not None:
            columns[:, number] = judgement.tokens
    return columns


def number_turns(rollout: Rollout) -> Int[Tensor, " T"]:
    """Return the number of the model's turn at each token, from 0; a reply counts to its turn."""
    numbers: list[int] = []
    last = -1
    for turn in rollout.turns:
        last += turn.role == "assistant"
        numbers += [max(last, 0)] * turn.tokens
    if not rollout.turns:
        numbers = [0] * len(rollout.tokens)
    return torch.tensor(numbers, dtype=torch.long)


def _list_turn_rewards(rollout: Rollout) -> tuple[float | None, ...]:
    """Return the reward of each of the model's turns; a single answer is one turn without a reward."""
    if not rollout.turns:
        return (None,)
    return tuple(turn.reward for turn in rollout.turns if turn.role == "assistant")


def _gather_authors(rollout: Rollout) -> UInt8[Tensor, " t"]:
    """Return the writers of the rollout's supervised tokens."""
    if rollout.authors is not None:
        return rollout.authors[rollout.loss_mask]
    return torch.full(
        (int(rollout.loss_mask.sum()),), AUTHORS.index(rollout.source), dtype=torch.uint8
    )


def _find_first_rows(datums: Sequence[Datum]) -> tuple[int, ...]:
    """Return for each datum the row of the first datum with the same rollout."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(datum.rollout), row) for row, datum in enumerate(datums))


def _compute_coefficients(
    datums: Sequence[Datum], lengths: Sequence[int], objective: Objective
) -> list[float]:
    """Return the coefficient of each token of each datum."""
    first = _find_first_rows(datums)
    # A rollout with several teachers has one row per teacher and is one sequence of the aggregate.
    length_of = {row: lengths[row] for row in first}
    # A rollout without a signal that every term needs does not count: it would only lower the mean
    # over the remaining rollouts.
    needs = {(term.needs_teacher, term.needs_reference) for term in objective.losses}
    taught = {
        row
        for row, datum in zip(first, datums, strict=True)
        if any(
            not (teacher and datum.signal.is_empty) and not (reference and datum.reference.is_empty)
            for teacher, reference in needs
        )
    }
    if taught:
        length_of = {row: length if row in taught else 0 for row, length in length_of.items()}
    shares = token_coefficients(
        list(length_of.values()), objective.aggregate, objective.aggregate_norm
    )
    share_of = dict(zip(length_of, shares, strict=True))
    return [share_of[row] * datum.weight for row, datum in zip(first, datums, strict=True)]


def _draw_uniforms(rollout: Rollout, k: int, seed: int) -> Float[Tensor, "T K"]:
    """Return the random numbers of the rollout at its supervised tokens."""
    if not k:
        return torch.zeros(int(rollout.loss_mask.sum()), 0)
    # One stream per rollout: the draws do not depend on the batch or its micro-batches.
    generator = torch.Generator().manual_seed(
        seed_of(seed, "mc", rollout.prompt.id, rollout.sample)
    )
    return torch.rand(len(rollout.tokens), k, generator=generator)[rollout.loss_mask]
