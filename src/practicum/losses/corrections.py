"""Apply the correction of a term: the factor by which each token's coefficient is multiplied."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.functional.estimators import CORRECTIONS, Correction
from practicum.losses.tokens import TermValues, TokenBatch
from practicum.objective.entries import Choice


@dataclass(frozen=True, slots=True)
class TokenCorrection:
    """An entry of the table of corrections with its arguments."""

    entry: Correction
    arguments: Mapping[str, Any]

    def measure(self, values: TermValues, batch: TokenBatch) -> Float[Tensor, " T"]:
        """Return the logarithm that the correction is a function of."""
        # The ratio is to the sampling distribution, temperature and truncation included.
        log_ratio = values.logprobs - batch.sampling_logprobs
        if self.entry.of == "anchor" and values.teacher_logprobs is not None:
            alpha = float(self.arguments["alpha"])
            anchor = values.logprobs - values.teacher_logprobs
            # NaN where the teacher gives no signal: it must not reach later tokens through a
            # product.
            anchor = torch.where(anchor.isnan() & ~values.is_scored, log_ratio, anchor)
            return alpha * log_ratio + (1.0 - alpha) * anchor
        return values.logprobs if self.entry.of == "probability" else log_ratio

    def correct(self, log_ratio: Tensor, advantage: Tensor) -> Float[Tensor, " T"]:
        """Return the factor of each token separately."""
        return self.entry.function(log_ratio, advantage, **self.arguments)

    def correct_returns(self, log_ratio: Tensor, returns: Tensor) -> Float[Tensor, " T"]:
        """Return the factor of each token's return; 1 if the returns already contain the ratios."""
        if self.entry.cumulative:
            return torch.ones_like(returns)
        return self.correct(log_ratio, returns)

    def correct_states(self, log_ratio: Tensor, batch: TokenBatch) -> Float[Tensor, " T"]:
        """Return the factor of a divergence at each state.

        The probability of reaching a state does not depend on the token after it.
        """
        if self.entry.cumulative:
            # The product up to the token, without the token's own ratio.
            return self.compute_prefix_ratio(log_ratio, batch) / log_ratio.exp()
        return self.correct(log_ratio, -torch.ones_like(log_ratio))

    def compute_prefix_ratio(self, log_ratio: Tensor, batch: TokenBatch) -> Float[Tensor, " T"]:
        """Return the product of the ratios of each sequence up to each token; 1 if none is used."""
        if not self.entry.cumulative:
            return torch.ones_like(log_ratio)
        return batch.apply_by_row(log_ratio, lambda row: self.correct(row, torch.ones_like(row)))


def compile_correction(choice: Choice) -> TokenCorrection:
    """Return the correction that a term names."""
    return TokenCorrection(CORRECTIONS[choice.name], choice.arguments)
