"""The tokens whose log-probabilities an objective needs, as the wire has them: a small vocabulary at each position.

A service tells the log-probabilities of tokens that are named. At each supervised position they are the sampled token, the
teacher's candidates and the reference's, side by side as columns; the objective reads the columns as it reads a vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.objective import TeacherDistribution, TokenBatch, read_tokens
from practicum.objective.passes import Part
from practicum.types import Rollout, TeacherSignal


@dataclass(frozen=True, slots=True)
class ColumnRequest:
    """One rollout on the wire: the tokens asked about at each supervised position; the first column is the sampled one."""

    rollout: Rollout
    positions: Int[Tensor, " T"]
    ids: Int[Tensor, "T C"]

    @property
    def tokens(self) -> list[int]:
        """What the model reads: all but the last token, which predicts nothing."""
        return [*self.rollout.prompt_tokens, *self.rollout.tokens.tolist()][:-1]

    @property
    def places(self) -> Int[Tensor, " T"]:
        """Where in what is read the supervised tokens are predicted."""
        return self.positions + len(self.rollout.prompt_tokens) - 1

    def spread(
        self, values: Float[Tensor, "T C"] | Int[Tensor, "T C"], elsewhere: Tensor
    ) -> Tensor:
        """Values at the supervised positions and `elsewhere` [N] at the others; without the axis where there is one column."""
        whole = elsewhere.to(values.dtype)[:, None].repeat(1, values.shape[1])
        whole[self.places] = values
        return whole if values.shape[1] > 1 else whole[:, 0]

    def datum(self, weights: Float[Tensor, "T C"]) -> Any:
        """The package's datum of a `cross_entropy`, whose loss is minus the sum of weights times log-probabilities."""
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
        """How many ids and weights the datum has."""
        return len(self.tokens) * (1 + 2 * self.ids.shape[1])


@dataclass(frozen=True, slots=True)
class Columns:
    """A part of the batch in columns: its texts, and what was said with ids that are columns."""

    part: Part
    texts: tuple[ColumnRequest, ...]
    tokens: TokenBatch
    teacher: TeacherDistribution
    reference: TeacherDistribution


def columns_of(part: Part, rollouts: Sequence[Rollout]) -> Columns:
    """What is to be asked about a part; `rollouts` are those of all rows."""
    whole = slice(None)
    said = [read_tokens(signal, whole) for signal in (part.signal, part.reference)]
    named = [
        part.tokens.tokens[:, None],
        *(one.topk_ids for one in said if one.topk_ids is not None),
    ]
    ids = torch.cat([tensor.long() for tensor in named], dim=1)
    columns = _first_of_its_kind(ids)
    place = 1
    in_columns = []
    for one in said:
        if one.topk_ids is None:
            in_columns.append(one)
            continue
        width = one.topk_ids.shape[1]
        in_columns.append(replace(one, topk_ids=columns[:, place : place + width]))
        place += width
    rows, counts = part.tokens.rows.unique_consecutive(return_counts=True)
    texts = tuple(
        ColumnRequest(rollouts[row], positions, asked)
        for row, positions, asked in zip(
            rows.tolist(),
            part.tokens.positions.split(counts.tolist()),
            ids.split(counts.tolist()),
            strict=True,
        )
    )
    tokens = replace(part.tokens, tokens=torch.zeros_like(part.tokens.tokens))
    return Columns(part, texts, tokens, *in_columns)


def _first_of_its_kind(ids: Int[Tensor, "T C"]) -> Int[Tensor, "T C"]:
    """For each column the first one with the same id, so that a token that stands twice is one token."""
    order = ids.sort(dim=1, stable=True)
    first = torch.zeros_like(ids)
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = order.values[:, 1:] != order.values[:, :-1]
    places = torch.arange(ids.shape[1]).expand_as(ids)
    begin = torch.where(starts, places, 0).cummax(dim=1).values
    return first.scatter(1, order.indices, order.indices.gather(1, begin))


def told(
    signal: TeacherSignal,
    tokens: Int[Tensor, " T"],
    candidates: Int[Tensor, "T K"] | None,
    k: int,
    chunk: int = 128,
) -> TeacherSignal:
    """A teacher's hidden states as log-probabilities of the sampled token and of candidates: those given, or its k likeliest.

    What is no distribution stays as it is.
    """
    if signal.hidden is None and signal.pool is None:
        return signal
    logprobs, ids, values = [], [], []
    for piece in torch.arange(len(tokens)).split(chunk):
        part = slice(int(piece[0]), int(piece[-1]) + 1)
        full = read_tokens(signal, part).full
        if full is None:
            return signal
        full = full.cpu()
        named = (
            candidates[part]
            if candidates is not None
            else full.topk(min(k, full.shape[-1]), dim=-1).indices
        )
        logprobs.append(full.gather(-1, tokens[part, None])[:, 0])
        ids.append(named)
        values.append(full.gather(-1, named))
    if not logprobs:
        return TeacherSignal(logprobs=torch.zeros(0), name=signal.name)
    if k == 0:
        return TeacherSignal(logprobs=torch.cat(logprobs), name=signal.name)
    return TeacherSignal(torch.cat(logprobs), torch.cat(ids), torch.cat(values), name=signal.name)
