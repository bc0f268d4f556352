"""Compute the token side of an objective: one detached coefficient per token.

It is the product of weights, corrections, rewards and the normalisation over the whole batch.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from practicum.functional.weights import WEIGHTS, TokenStatistics
from practicum.losses.completion_weights import CompletionWeights, compile_completion_weights
from practicum.losses.corrections import TokenCorrection, compile_correction
from practicum.losses.pairs import PairSide, compile_pairs
from practicum.losses.returns import Returns, compile_returns
from practicum.losses.tokens import TermValues, TokenBatch
from practicum.objective.spec import Term


@dataclass(frozen=True, slots=True)
class TokenSide:
    """The functions that compute the coefficients of a term.

    `compute_returns` is None for a value that is differentiated, and `pairs` is None for a term about single
    completions.
    """

    coefficient: float
    needs_signal: bool
    weigh_tokens: Callable[[TokenStatistics], Float[Tensor, " T"]]
    completions: CompletionWeights
    correction: TokenCorrection
    compute_returns: Returns | None
    pairs: PairSide | None

    @torch.no_grad()
    def compute(self, values: TermValues, batch: TokenBatch) -> Float[Tensor, " T"]:
        """Return the detached coefficient of each token's value in the loss, 0 without a signal.

        For a differentiated value it is weight times aggregate; for a sampled token it is also
        times minus the return; for pairs it is the derivative of their loss. Terms with
        `needs_sequences` need whole sequences here.
        """
        if self.needs_signal and values.divergence is None and values.teacher_logprobs is None:
            return torch.zeros_like(values.logprobs)
        if self.pairs is not None:
            return self.pairs.compute_coefficients(values, batch)
        coefficient = (
            self.coefficient
            * batch.aggregate
            * self.weigh_tokens(_collect_statistics(values, batch))
            * self.completions.compute(values, batch)
        )
        log_ratio = self.correction.measure(values, batch)
        if self.compute_returns is None:
            coefficient = coefficient * self.correction.correct_states(log_ratio, batch)
        else:
            returns = self._compute_returns(self.compute_returns, values, batch, log_ratio)
            factor = self.correction.correct_returns(log_ratio, returns)
            coefficient = -coefficient * factor * returns
        # Not a product with the mask: tokens without a signal hold NaN, and NaN times 0 is NaN.
        is_trained = values.is_scored & self.completions.select_tokens(batch)
        return torch.where(is_trained, coefficient, 0.0)

    @torch.no_grad()
    def find_dropped(
        self, values: TermValues, batch: TokenBatch
    ) -> tuple[Bool[Tensor, " T"], Bool[Tensor, " T"]]:
        """Return the tokens that the correction drops, and the tokens that it could drop.

        A token without a return or without a signal is in neither set.
        """
        log_ratio = self.correction.measure(values, batch)
        returns = -torch.ones_like(log_ratio)
        if self.compute_returns is not None:
            returns = self._compute_returns(self.compute_returns, values, batch, log_ratio)
        is_trained = values.is_scored & self.completions.select_tokens(batch) & (returns != 0)
        return is_trained & (self.correction.correct(log_ratio, returns) == 0), is_trained

    def _compute_returns(
        self, compute: Returns, values: TermValues, batch: TokenBatch, log_ratio: Tensor
    ) -> Tensor:
        return compute(values, batch, self.correction.compute_prefix_ratio(log_ratio, batch))


def compile_token_side(term: Term) -> TokenSide:
    """Return the token side of a term."""
    weights, arguments = WEIGHTS[term.weights.name], term.weights.arguments
    return TokenSide(
        coefficient=term.coefficient,
        needs_signal=term.needs_signal,
        weigh_tokens=lambda statistics: weights.function(statistics, **arguments),
        completions=compile_completion_weights(term),
        correction=compile_correction(term.correction),
        compute_returns=compile_returns(term) if term.on_sampled_token else None,
        pairs=compile_pairs(term) if term.signal.pairs else None,
    )


def compute_coefficients(term: Term, values: TermValues, batch: TokenBatch) -> Float[Tensor, " T"]:
    """Return the detached coefficient of each token's value in the loss; see `TokenSide.compute`."""
    return compile_token_side(term).compute(values, batch)


def compute_all_coefficients(
    sides: Sequence[TokenSide], values: Iterable[TermValues], batch: TokenBatch
) -> list[Float[Tensor, " T"]]:
    """Return the coefficients of each term, given the values of each term."""
    return [
        side.compute(term_values, batch) for side, term_values in zip(sides, values, strict=True)
    ]


def compute_full_coefficients(
    sides: Sequence[TokenSide],
    values_by_part: Sequence[Sequence[TermValues]],
    indices: Sequence[Tensor],
    batch: TokenBatch,
) -> list[Float[Tensor, " T"]]:
    """Return each term's coefficients of the full batch, from the values of its parts.

    Needed for terms in which a token's coefficient depends on other tokens, such as returns;
    `indices` place each part's tokens in the batch.
    """
    return compute_all_coefficients(sides, merge_parts(values_by_part, indices), batch)


def merge_parts(
    values_by_part: Sequence[Sequence[TermValues]], indices: Sequence[Tensor]
) -> list[TermValues]:
    """Return each term's values of the full batch, from the values of its parts at `indices`."""
    # Parts reorder the tokens: `argsort` of their batch indices undoes it.
    order = torch.cat(list(indices)).argsort()
    by_term = zip(*values_by_part, strict=True)
    return [TermValues.join(list(parts))[order] for parts in by_term]


def _collect_statistics(values: TermValues, batch: TokenBatch) -> TokenStatistics:
    """Return the per-token statistics that weights are functions of."""
    return TokenStatistics(
        loss_mask=values.is_scored,
        student_entropy=values.student_entropy,
        teacher_entropy=values.teacher_entropy,
        divergence=values.reverse_kl if values.divergence is None else values.divergence,
        logprobs=values.logprobs,
        teacher_logprobs=values.teacher_logprobs,
        reference_logprobs=values.reference_logprobs,
        positions=batch.positions,
        rows=batch.rows,
        sampled_rank=values.sampled_rank,
        greedy_rank=values.greedy_rank,
        drafted_rank=values.drafted_rank,
        special=batch.special,
        turns=batch.turn_numbers,
    )
