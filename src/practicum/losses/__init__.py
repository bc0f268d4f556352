"""Compute a loss: compile the objective, then the values and the coefficients of the tokens."""

from practicum.losses.closed_form import LossChunk, build_chunk
from practicum.losses.compile import CompiledObjective, compile_objective
from practicum.losses.signal_reader import compare_signals, read_tokens
from practicum.losses.token_axis import compute_coefficients
from practicum.losses.tokens import (
    TermValues,
    TokenBatch,
    build_token_batch,
)
from practicum.losses.vocabulary_axis import (
    compare_candidates,
    compute_term_values,
    compute_values,
    cuts_to_candidates,
    measures_teacher,
    read_target,
)

__all__ = [
    "CompiledObjective",
    "LossChunk",
    "TermValues",
    "TokenBatch",
    "build_chunk",
    "build_token_batch",
    "compare_candidates",
    "compare_signals",
    "compile_objective",
    "compute_coefficients",
    "compute_term_values",
    "compute_values",
    "cuts_to_candidates",
    "measures_teacher",
    "read_target",
    "read_tokens",
]
