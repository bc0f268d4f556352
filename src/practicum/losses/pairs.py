"""Pair the completions of each prompt, and compute one coefficient per token from the pairs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from practicum import functional as F
from practicum.losses.tokens import TermValues, TokenBatch
from practicum.objective.signals.pair import Config as Pair
from practicum.objective.spec import Term

PREFERRED = ("dataset", "teacher")
"""With `choose=source`, completions by these writers are chosen and all others are rejected."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of a batch as rows (chosen, rejected), and the unpaired rows."""

    rows: Int[Tensor, "P 2"]
    unpaired: Bool[Tensor, " R"]


@dataclass(frozen=True, slots=True)
class PairSide:
    """The choice of pairs and the loss of a term about them."""

    signal: Pair
    scorer: str
    coefficient: float
    needs_signal: bool

    def find_pairs(self, values: TermValues, batch: TokenBatch) -> Pairs:
        """Return all pairs of a chosen and a rejected completion of the same prompt.

        A completion without a signal of the term's model is in no pair.
        """
        count = len(batch.groups)
        scored = torch.bincount(batch.rows[values.is_scored], minlength=count).tolist()
        ranks = self._rank_rows(values, batch)
        pairs = [
            (chosen, rejected)
            for rows in batch.group_rows()
            for chosen in rows
            for rejected in rows
            if _is_above(ranks[chosen], ranks[rejected]) and scored[chosen] and scored[rejected]
        ]
        paired = {row for pair in pairs for row in pair}
        # A rollout with several teachers has several rows; it is counted by its first row.
        firsts = [row for row in range(count) if batch.first[row] == row]
        unpaired = torch.tensor([row not in paired for row in firsts], dtype=torch.bool)
        rows = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2)
        return Pairs(rows.to(batch.rows.device), unpaired)

    def compute_coefficients(self, values: TermValues, batch: TokenBatch) -> Float[Tensor, " T"]:
        """Return the coefficient of each token's log-probability in the mean loss of all pairs."""
        signal = self.signal
        coefficients = F.pair_coefficients(
            signal.loss,
            self._read_answers(values, batch),
            self.find_pairs(values, batch).rows,
            signal.beta,
            signal.margin,
        )
        return torch.where(values.is_scored, self.coefficient * coefficients, 0.0)

    def compare_pairs(
        self, values: TermValues, batch: TokenBatch
    ) -> tuple[Float[Tensor, " P"], Float[Tensor, " P"], Bool[Tensor, " R"]]:
        """Return each pair's loss, 1.0 where the chosen answer is ahead, and the rows in no pair."""
        pairs, signal = self.find_pairs(values, batch), self.signal
        numbers, _ = F.measure_answers(signal.loss, self._read_answers(values, batch))
        chosen, rejected = (numbers[column] for column in pairs.rows.unbind(dim=1))
        losses = F.pair_loss(signal.loss, chosen, rejected, signal.beta, signal.margin)
        return losses, (chosen > rejected).to(losses), pairs.unpaired

    def _read_answers(self, values: TermValues, batch: TokenBatch) -> F.Answers:
        """Return the log-probabilities of student and reference, 0 at tokens without a signal."""
        logprobs, reference = values.logprobs, values.teacher_logprobs
        if reference is None and self.needs_signal:
            # No completion has a signal, so there is no pair.
            reference = torch.zeros_like(logprobs)
        unscored = ~values.is_scored
        return F.Answers(
            logprobs.masked_fill(unscored, 0.0),
            batch.rows,
            len(batch.groups),
            None if reference is None else reference.masked_fill(unscored, 0.0),
        )

    def _rank_rows(self, values: TermValues, batch: TokenBatch) -> Sequence[float | None]:
        """Return the rank of each completion: higher is preferred, None is not comparable."""
        choose, rewards = self.signal.choose, batch.read_rewards(self.scorer)
        if choose == "source":
            return [float(source in PREFERRED) for source in batch.sources]
        if choose == "reward":
            return rewards
        if choose == "low_reward":
            return [None if reward is None else -reward for reward in rewards]
        count = len(batch.groups)
        if values.teacher_logprobs is None:
            return [None] * count
        scores = values.teacher_logprobs.masked_fill(~values.is_scored, 0.0)
        sums = scores.new_zeros(count).index_add_(0, batch.rows, scores)
        return (sums / torch.bincount(batch.rows, minlength=count).clamp_min(1)).tolist()


def compile_pairs(term: Term) -> PairSide:
    """Return the side of a term about pairs."""
    assert isinstance(term.signal, Pair), "no other signal compares completions in pairs"
    return PairSide(term.signal, term.scorer, term.coefficient, term.needs_signal)


def _is_above(rank: float | None, lower: float | None) -> bool:
    return rank is not None and lower is not None and rank > lower
