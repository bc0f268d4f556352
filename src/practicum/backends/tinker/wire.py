"""Request the log-probabilities that an objective needs, as columns of a small vocabulary.

A service returns the log-probabilities of named tokens. At each supervised position, the columns
are the sampled token, the teacher's candidates and the reference's candidates. The objective reads
the columns like a vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.functional.chunked import chunks
from practicum.losses import TokenBatch, read_tokens
from practicum.losses.passes import Part
from practicum.objective import TeacherDistribution
from practicum.types import Rollout, TeacherSignal


@dataclass(frozen=True, slots=True)
class ColumnRequest:
    """One rollout's request: C token ids at each of its T supervised positions.

    The first column holds the sampled tokens.
    """

    rollout: Rollout
    positions: Int[Tensor, " T"]
    ids: Int[Tensor, "T C"]

    @property
    def tokens(self) -> list[int]:
        """The N tokens that the model reads: all except the last, which predicts nothing."""
        return [*self.rollout.prompt_tokens, *self.rollout.tokens.tolist()][:-1]

    @property
    def indices(self) -> Int[Tensor, " T"]:
        """The indices into `tokens` at which the supervised tokens are predicted."""
        return self.positions + len(self.rollout.prompt_tokens) - 1

    def spread(
        self, values: Float[Tensor, "T C"] | Int[Tensor, "T C"], elsewhere: Tensor
    ) -> Tensor:
        """Return `values` [N, C] at the supervised positions, and `elsewhere` [N] at all others.

        A single column loses its axis: the service distinguishes [N] from [N, 1].
        """
        spread = elsewhere.to(values.dtype)[:, None].repeat(1, values.shape[1])
        spread[self.indices] = values
        return spread if values.shape[1] > 1 else spread[:, 0]

    def build_datum(self, weights: Float[Tensor, "T C"]) -> Any:
        """Return a datum with a `cross_entropy` of minus the weighted sum of log-probabilities."""
        from tinker import types

        tokens = self.tokens
        following = torch.tensor([*tokens[1:], int(self.rollout.tokens[-1])])
        inputs = {
            "target_tokens": types.TensorData.from_torch(self.spread(self.ids, following)),
            "weights": types.TensorData.from_torch(self.spread(weights, torch.zeros(len(tokens)))),
        }
        return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)

    @property
    def numbers(self) -> int:
        """The number of ids and weights in the datum."""
        return len(self.tokens) * (1 + 2 * self.ids.shape[1])


@dataclass(frozen=True, slots=True)
class Columns:
    """A part of the batch in columns: its requests, and both signals with columns as token ids."""

    part: Part
    texts: tuple[ColumnRequest, ...]
    tokens: TokenBatch
    teacher: TeacherDistribution
    reference: TeacherDistribution


def build_columns(part: Part, rollouts: Sequence[Rollout]) -> Columns:
    """Build the requests for one part of the batch; `rollouts` are the rollouts of all its rows."""
    distributions = [read_tokens(signal, slice(None)) for signal in (part.signal, part.reference)]
    candidates = [ids.topk_ids for ids in distributions if ids.topk_ids is not None]
    ids = torch.cat([part.tokens.tokens[:, None], *(ids.long() for ids in candidates)], dim=1)
    columns = _find_first_occurrences(ids)
    blocks = iter(columns[:, 1:].split([ids.shape[1] for ids in candidates], dim=1))
    signals_in_columns = [
        signal if signal.topk_ids is None else replace(signal, topk_ids=next(blocks))
        for signal in distributions
    ]
    rows, counts = part.tokens.rows.unique_consecutive(return_counts=True)
    lengths = counts.tolist()
    row_rollouts = [rollouts[row] for row in rows.tolist()]
    positions = part.tokens.positions.split(lengths)
    requests = zip(row_rollouts, positions, ids.split(lengths), strict=True)
    texts = tuple(ColumnRequest(*request) for request in requests)
    # In the small vocabulary the sampled token is token 0 everywhere: the first column.
    tokens = replace(part.tokens, tokens=torch.zeros_like(part.tokens.tokens))
    return Columns(part, texts, tokens, *signals_in_columns)


def _find_first_occurrences(ids: Int[Tensor, "T C"]) -> Int[Tensor, "T C"]:
    """Return for each entry the first column of its row with the same id."""
    # A token that both the student and the teacher name would otherwise count as two tokens. A
    # stable sort puts equal ids next to each other, with the first column first; `cummax` copies it
    # along each run of equal ids.
    order = ids.sort(dim=1, stable=True)
    starts_run = torch.ones_like(ids, dtype=torch.bool)
    starts_run[:, 1:] = order.values[:, 1:] != order.values[:, :-1]
    places = torch.arange(ids.shape[1]).expand_as(ids)
    run_starts = torch.where(starts_run, places, 0).cummax(dim=1).values
    first_columns = order.indices.gather(1, run_starts)
    return torch.zeros_like(ids).scatter(1, order.indices, first_columns)


def restrict_signal(
    signal: TeacherSignal,
    tokens: Int[Tensor, " T"],
    candidates: Int[Tensor, "T K"] | None,
    k: int,
    chunk_tokens: int = 128,
) -> TeacherSignal:
    """Reduce a full distribution to the log-probabilities of the sampled tokens and of candidates.

    The candidates are the given tokens, or the teacher's top `k` tokens. A signal without a full
    distribution is returned unchanged.
    """
    if signal.hidden is None and signal.pool is None:
        return signal
    logprobs, topk_ids, topk_logprobs = [], [], []
    for piece in chunks(len(tokens), chunk_tokens):
        distribution = read_tokens(signal, piece)
        full = distribution.full
        if full is None:
            return signal
        # The bucket of a teacher with another vocabulary is not a token.
        full = full.cpu() if distribution.outside is None else full[:, :-1].cpu()
        top_tokens = full.topk(min(k, full.shape[-1]), dim=-1).indices
        ids = top_tokens if candidates is None else candidates[piece]
        sampled = full.gather(-1, tokens[piece, None])[:, 0]
        unknown = distribution.unknown
        logprobs.append(sampled if unknown is None else sampled.masked_fill(unknown, 0.0))
        topk_ids.append(ids)
        topk_logprobs.append(full.gather(-1, ids))
    restricted = TeacherSignal(
        logprobs=torch.cat(logprobs) if logprobs else torch.zeros(0),
        name=signal.name,
        unknown=signal.unknown_tokens,
    )
    if not logprobs or k == 0:
        return restricted
    return replace(restricted, topk_ids=torch.cat(topk_ids), topk_logprobs=torch.cat(topk_logprobs))
