"""Compare student and teacher on an answer token by token, with the candidates of both."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.losses import compare_signals
from practicum.statistics.heldout import Candidates, Column, TokenTrace
from practicum.text import Renderer
from practicum.types import Rollout, TeacherSignal

MAX_ANSWERS, MAX_TOKENS, MAX_CANDIDATES = 6, 400, 5
"""The traced answers, the tokens of each, and the candidates of student and teacher at a token."""

CHUNK, DIGITS = 64, 6
"""The tokens compared at once, and the significant digits of a number in a trace."""

OTHER_TOKENS = "<tokens the student lacks>"
"""The text that stands for all tokens that only the teacher has."""

MEASURES = (
    *("student_logprobs", "teacher_logprobs", "student_entropy", "teacher_entropy", "reverse_kl"),
    *("student_top_ids", "student_top_logprobs", "teacher_top_ids", "teacher_top_logprobs"),
)
"""The measures of each token that a trace needs."""


def choose_traced(rollouts: Sequence[Rollout]) -> list[int]:
    """Return the indices of rollouts to trace: the first answer to each of the first prompts."""
    first: dict[str, int] = {}
    for index, rollout in enumerate(rollouts):
        first.setdefault(rollout.prompt.id, index)
    return list(first.values())[:MAX_ANSWERS]


@torch.no_grad()
def trace(
    rollout: Rollout,
    student_signal: TeacherSignal,
    teacher_signal: TeacherSignal,
    renderer: Renderer,
) -> TokenTrace:
    """Trace one rollout under the signals of student and teacher."""
    tokens, mask = rollout.tokens[:MAX_TOKENS], rollout.loss_mask[:MAX_TOKENS].tolist()
    signals = (student_signal[:MAX_TOKENS], teacher_signal[:MAX_TOKENS])
    compared = compare_signals(signals, tokens, CHUNK, MEASURES, MAX_CANDIDATES)

    def build_column(values: Float[Tensor, " T"] | None) -> Column:
        numbers = [math.nan] * len(mask) if values is None else values.tolist()
        return [
            _round(number) if is_supervised and math.isfinite(number) else None
            for number, is_supervised in zip(numbers, mask, strict=True)
        ]

    def decode(token: int) -> str:
        # A teacher with another vocabulary has one entry after the student's tokens.
        is_bucket = teacher_signal.outside is not None and token == renderer.vocab_size
        return OTHER_TOKENS if is_bucket else renderer.decode_token(token)

    def build_candidates(
        ids: Int[Tensor, "T K"] | None, logprobs: Float[Tensor, "T K"] | None
    ) -> Candidates | None:
        if ids is None or logprobs is None or not mask:
            return None
        texts = [[decode(token) for token in row] for row in ids.tolist()]
        probabilities = [list(map(_round, row)) for row in logprobs.exp().tolist()]
        return Candidates(texts, probabilities)

    return TokenTrace(
        prompt=rollout.prompt.id,
        question=rollout.prompt.messages[-1].content,
        expected=rollout.prompt.answer,
        reward=rollout.reward,
        text=[renderer.decode_token(token) for token in tokens.tolist()],
        control=[renderer.is_control(token) for token in tokens.tolist()],
        logprobs=build_column(compared.student_logprobs),
        teacher_logprobs=build_column(compared.teacher_logprobs),
        reverse_kl=build_column(compared.reverse_kl),
        student_entropy=build_column(compared.student_entropy),
        teacher_entropy=build_column(compared.teacher_entropy),
        student=build_candidates(compared.student_top_ids, compared.student_top_logprobs),
        teacher=build_candidates(compared.teacher_top_ids, compared.teacher_top_logprobs),
    )


def _round(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")
