"""Token by token: what student and teacher thought of an answer, and what each would rather have written."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.objective import compare_signals
from practicum.text import Renderer
from practicum.types import Rollout, TeacherSignal

ANSWERS, TOKENS, CHOICES = 6, 400, 5
"""So many answers are traced, so many tokens of each, with so many candidates of student and teacher."""

CHUNK, DIGITS = 64, 6
"""Tokens read at once, and significant digits kept of a number."""

MEASURES = (
    *("student_logprobs", "teacher_logprobs", "student_entropy", "teacher_entropy", "reverse_kl"),
    *("student_top_ids", "student_top_logprobs", "teacher_top_ids", "teacher_top_logprobs"),
)
"""What a trace says of a token."""

Column = list[float | None]


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a model would most likely have written at each of T tokens: texts and probabilities, likeliest first."""

    texts: list[list[str]]
    probabilities: list[list[float]]


@dataclass(frozen=True, slots=True)
class TokenTrace:
    """One held-out answer, token by token; None where the teacher did not say.

    `text` is what each token reads as and `control` whether it is a special one. Log-probabilities are those of the
    sampled tokens; reverse KL and entropies are in nats and of whole distributions, so a teacher that gives no more than
    the sampled tokens has none. Of tokens that the student did not write there are no numbers.
    """

    prompt: str
    question: str
    expected: str | None
    reward: float | None
    text: list[str]
    control: list[bool]
    logprobs: Column
    teacher_logprobs: Column
    reverse_kl: Column
    student_entropy: Column
    teacher_entropy: Column
    student: Candidates | None
    teacher: Candidates | None


def choose_traced(rollouts: Sequence[Rollout]) -> list[int]:
    """The places of the rollouts that are worth a trace: the first answer to each of the first prompts."""
    first: dict[str, int] = {}
    for place, rollout in enumerate(rollouts):
        first.setdefault(rollout.prompt.id, place)
    return list(first.values())[:ANSWERS]


def read_trace(saved: dict[str, object]) -> TokenTrace:
    """Read back what `dataclasses.asdict` gave."""
    sides = {name: saved[name] for name in ("student", "teacher")}
    candidates = {
        name: Candidates(**side) if isinstance(side, dict) else None for name, side in sides.items()
    }
    return TokenTrace(**{**saved, **candidates})  # type: ignore[arg-type]


@torch.no_grad()
def trace(
    rollout: Rollout, own: TeacherSignal, other: TeacherSignal, renderer: Renderer
) -> TokenTrace:
    """One rollout under the student's `own` and the teacher's distributions, or what they say of the sampled tokens."""
    tokens, written = rollout.tokens[:TOKENS], rollout.loss_mask[:TOKENS].tolist()
    compared = compare_signals((own[:TOKENS], other[:TOKENS]), tokens, CHUNK, MEASURES, CHOICES)

    def column(values: Float[Tensor, " T"] | None) -> Column:
        numbers = [math.nan] * len(written) if values is None else values.tolist()
        return [
            _short(number) if is_own and math.isfinite(number) else None
            for number, is_own in zip(numbers, written, strict=True)
        ]

    def candidates(
        ids: Int[Tensor, "T K"] | None, logprobs: Float[Tensor, "T K"] | None
    ) -> Candidates | None:
        if ids is None or logprobs is None or not written:
            return None
        texts = [[renderer.decode_token(token) for token in row] for row in ids.tolist()]
        return Candidates(
            texts, [[_short(value) for value in row] for row in logprobs.exp().tolist()]
        )

    return TokenTrace(
        prompt=rollout.prompt.id,
        question=rollout.prompt.messages[-1].content,
        expected=rollout.prompt.answer,
        reward=rollout.reward,
        text=[renderer.decode_token(token) for token in tokens.tolist()],
        control=[renderer.is_control(token) for token in tokens.tolist()],
        logprobs=column(compared.student_logprobs),
        teacher_logprobs=column(compared.teacher_logprobs),
        reverse_kl=column(compared.reverse_kl),
        student_entropy=column(compared.student_entropy),
        teacher_entropy=column(compared.teacher_entropy),
        student=candidates(compared.student_top_ids, compared.student_top_logprobs),
        teacher=candidates(compared.teacher_top_ids, compared.teacher_top_logprobs),
    )


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
