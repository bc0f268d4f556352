"""What the two sides of an objective read and write: numbers of each token, end to end, without a vocabulary axis."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from practicum.core.randomness import seed_of
from practicum.functional.sequence import token_coefficients
from practicum.objective.spec import Objective
from practicum.types import AUTHORS, Datum, Rollout, Source


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Every supervised token of some rollouts, end to end; sequences that follow one another are told apart by `rows`.

    `authors` are the writers of the tokens as places in `AUTHORS`, and `draws` the random numbers of `mc` signals. The tuples are
    by row: rewards, prompts, texts, sources, and in `first` the first row with the same rollout, which is another one where several
    teachers each have a row for it. `special` is true at special tokens, and None where nobody said which they are.
    """

    tokens: Int[Tensor, " T"]
    rows: Int[Tensor, " T"]
    positions: Int[Tensor, " T"]
    sampling_logprobs: Float[Tensor, " T"]
    policy_logprobs: Float[Tensor, " T"]
    aggregate: Float[Tensor, " T"]
    authors: UInt8[Tensor, " T"]
    draws: Float[Tensor, "T K"]
    rewards: tuple[float | None, ...]
    groups: tuple[str, ...]
    texts: tuple[str, ...]
    sources: tuple[Source, ...]
    first: tuple[int, ...]
    special: Bool[Tensor, " T"] | None = None

    def __getitem__(self, part: slice | Int[Tensor, " t"]) -> "TokenBatch":
        """The same batch at some of its tokens."""
        tensors = {
            field.name: value[part]
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **tensors)

    def to(self, device: torch.device) -> "TokenBatch":
        """The tokens and the random numbers on another device; what the token side reads stays where it is."""
        return replace(self, tokens=self.tokens.to(device), draws=self.draws.to(device))

    def by_group(self) -> "list[list[int]]":
        """The rows of each prompt, each rollout once."""
        rows: dict[str, list[int]] = {}
        for row, group in enumerate(self.groups):
            if self.first[row] == row:
                rows.setdefault(group, []).append(row)
        return list(rows.values())


@dataclass(frozen=True, slots=True)
class TeacherDistribution:
    """What a teacher said about T tokens: its whole distribution, its candidates, the sampled token alone, or nothing."""

    full: Float[Tensor, "T V"] | None = None
    topk_ids: Int[Tensor, "T K"] | None = None
    topk_logprobs: Float[Tensor, "T K"] | None = None
    logprobs: Float[Tensor, " T"] | None = None

    @property
    def silent(self) -> bool:
        """Whether the teacher said nothing about these tokens."""
        return all(tensor is None for tensor in _tensors(self))

    def to(self, device: torch.device) -> "TeacherDistribution":
        """The same on another device."""
        return TeacherDistribution(*_each(self, lambda tensor: tensor.to(device)))


@dataclass(frozen=True, slots=True)
class TermValues:
    """The logit side of one term: the differentiable `value` a token, and what the token side needs, detached.

    `answered` is where the term has what it asks for. `reverse_kl` to the teacher is measured whatever the term's own
    divergence: the common yardstick of all objectives.
    """

    value: Float[Tensor, " T"]
    answered: Bool[Tensor, " T"]
    logprobs: Float[Tensor, " T"]
    teacher_logprobs: Float[Tensor, " T"] | None
    divergence: Float[Tensor, " T"] | None
    student_entropy: Float[Tensor, " T"]
    teacher_entropy: Float[Tensor, " T"] | None
    reverse_kl: Float[Tensor, " T"] | None
    teacher_rank: Int[Tensor, " T"] | None = None

    def __getitem__(self, index: Int[Tensor, " t"]) -> "TermValues":
        """The same at some of its tokens."""
        return TermValues(*_each(self, lambda tensor: tensor[index]))

    def detached(self) -> "TermValues":
        """The same on the CPU and without a graph, for the token side."""
        return TermValues(*_each(self, lambda tensor: tensor.detach().cpu()))

    @staticmethod
    def concatenate(parts: "Sequence[TermValues]") -> "TermValues":
        """Chunks put end to end; a statistic that one of them lacks is NaN there."""
        lengths = [len(part.value) for part in parts]
        columns = zip(*(_tensors(part) for part in parts), strict=True)
        return TermValues(*(_joined(column, lengths) for column in columns))


def _tensors(values: "TeacherDistribution | TermValues") -> list[Any]:
    return [getattr(values, field.name) for field in fields(values)]


def _each(
    values: "TeacherDistribution | TermValues", function: Callable[[Tensor], Tensor]
) -> list[Any]:
    return [None if tensor is None else function(tensor) for tensor in _tensors(values)]


def _joined(column: Sequence[Any], lengths: Sequence[int]) -> Any:
    if all(tensor is None for tensor in column):
        return None
    return torch.cat(
        [
            torch.full((length,), torch.nan) if tensor is None else tensor
            for tensor, length in zip(column, lengths, strict=True)
        ]
    )


def build_token_batch(
    data: Sequence[Datum],
    objective: Objective,
    seed: int = 0,
    special: Collection[int] | None = None,
) -> TokenBatch:
    """Return the supervised tokens of all rollouts, each with the coefficient that the aggregate gives its sequence.

    A rollout that several data share, one a teacher, is one sequence of the aggregate. `special` are the ids of the student's
    special tokens, where they are known.
    """
    masks = [datum.rollout.loss_mask for datum in data]
    lengths = [int(mask.sum()) for mask in masks]
    counts = torch.tensor(lengths, dtype=torch.long)
    draws = max(term.signal.drawn for term in objective.losses)
    tokens = torch.cat(
        [datum.rollout.tokens[mask] for datum, mask in zip(data, masks, strict=True)]
    )
    return TokenBatch(
        tokens=tokens,
        rows=torch.repeat_interleave(torch.arange(len(data)), counts),
        positions=torch.cat([mask.nonzero()[:, 0] for mask in masks]),
        sampling_logprobs=torch.cat(
            [datum.rollout.sampling_logprobs[mask] for datum, mask in zip(data, masks, strict=True)]
        ),
        policy_logprobs=torch.cat(
            [datum.rollout.policy_logprobs[mask] for datum, mask in zip(data, masks, strict=True)]
        ),
        aggregate=torch.repeat_interleave(
            torch.tensor(_coefficients(data, lengths, objective)), counts
        ),
        authors=torch.cat([_authors(datum.rollout) for datum in data]),
        draws=torch.cat([_draws(datum.rollout, draws, seed) for datum in data]),
        rewards=tuple(datum.rollout.reward for datum in data),
        groups=tuple(datum.rollout.prompt.id for datum in data),
        texts=tuple(datum.rollout.text for datum in data),
        sources=tuple(datum.rollout.source for datum in data),
        first=_first_rows(data),
        special=None
        if special is None
        else torch.isin(tokens, torch.tensor(sorted(special), dtype=torch.long)),
    )


def _authors(rollout: Rollout) -> UInt8[Tensor, " t"]:
    """Return the writers of the rollout's supervised tokens."""
    if rollout.authors is not None:
        return rollout.authors[rollout.loss_mask]
    return torch.full(
        (int(rollout.loss_mask.sum()),), AUTHORS.index(rollout.source), dtype=torch.uint8
    )


def _first_rows(data: Sequence[Datum]) -> tuple[int, ...]:
    """For each datum the first one with the very same rollout."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(datum.rollout), row) for row, datum in enumerate(data))


def _coefficients(
    data: Sequence[Datum], lengths: Sequence[int], objective: Objective
) -> list[float]:
    """The coefficient of each token of each datum."""
    first = _first_rows(data)
    once = {row: lengths[row] for row in first}
    shares = token_coefficients(list(once.values()), objective.aggregate, objective.aggregate_norm)
    share_of = dict(zip(once, shares, strict=True))
    return [share_of[row] * datum.weight for row, datum in zip(first, data, strict=True)]


def _draws(rollout: Rollout, k: int, seed: int) -> Float[Tensor, "T K"]:
    """The rollout's own random numbers, at its supervised tokens."""
    if not k:
        return torch.zeros(int(rollout.loss_mask.sum()), 0)
    generator = torch.Generator().manual_seed(
        seed_of(seed, "mc", rollout.prompt.id, rollout.sample)
    )
    return torch.rand(len(rollout.tokens), k, generator=generator)[rollout.loss_mask]
