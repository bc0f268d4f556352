"""Token by token: what student and teacher thought of an answer, and what each would rather have written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from practicum import functional as F
from practicum.functional.chunked import chunks
from practicum.objective import read_signal
from practicum.text import Renderer
from practicum.types import Rollout, TeacherSignal

ANSWERS, TOKENS, CHOICES = 6, 400, 5
"""So many answers are traced, so many tokens of each, with so many candidates of student and teacher."""

CHUNK, DIGITS = 64, 6
"""Tokens read at once, and significant digits kept of a number."""

Column = list[float | None]


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a model would most likely have written at each of T tokens: texts and probabilities, likeliest first."""

    texts: list[list[str]]
    probabilities: list[list[float]]


@dataclass(frozen=True, slots=True)
class Trace:
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


def traced(rollouts: Sequence[Rollout]) -> list[int]:
    """The places of the rollouts that are worth a trace: the first answer to each of the first prompts."""
    first: dict[str, int] = {}
    for place, rollout in enumerate(rollouts):
        first.setdefault(rollout.prompt.id, place)
    return list(first.values())[:ANSWERS]


def read_trace(saved: dict[str, object]) -> Trace:
    """Read back what `dataclasses.asdict` gave."""
    sides = {name: saved[name] for name in ("student", "teacher")}
    candidates = {name: Candidates(**side) if isinstance(side, dict) else None for name, side in sides.items()}
    return Trace(**{**saved, **candidates})  # type: ignore[arg-type]


@torch.no_grad()
def trace(rollout: Rollout, own: TeacherSignal, other: TeacherSignal, renderer: Renderer) -> Trace:
    """One rollout under the student's `own` and the teacher's distributions, or what they say of the sampled tokens."""
    kept = rollout.tokens[:TOKENS]
    parts = [_part(kept[part], own[part], other[part], renderer) for part in chunks(len(kept), CHUNK)]
    written = rollout.loss_mask[:TOKENS].tolist()

    def column(of_part: Callable[[_Part], Column]) -> Column:
        values = [value for part in parts for value in of_part(part)]
        return [value if own else None for value, own in zip(values, written, strict=True)]

    return Trace(
        prompt=rollout.prompt.id,
        question=rollout.prompt.messages[-1].content,
        expected=rollout.prompt.answer,
        reward=rollout.reward,
        text=[renderer.piece(token) for token in kept.tolist()],
        control=[renderer.is_control(token) for token in kept.tolist()],
        logprobs=column(lambda part: part.logprobs),
        teacher_logprobs=column(lambda part: part.teacher_logprobs),
        reverse_kl=column(lambda part: part.reverse_kl),
        student_entropy=column(lambda part: part.student_entropy),
        teacher_entropy=column(lambda part: part.teacher_entropy),
        student=_together([part.student for part in parts]),
        teacher=_together([part.teacher for part in parts]),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    logprobs: Column
    teacher_logprobs: Column
    reverse_kl: Column
    student_entropy: Column
    teacher_entropy: Column
    student: Candidates | None
    teacher: Candidates | None


def _part(tokens: Tensor, own: TeacherSignal, other: TeacherSignal, renderer: Renderer) -> _Part:
    nothing: Column = [None] * len(tokens)
    mine, theirs = read_signal(own, slice(None)), read_signal(other, slice(None))
    student, teacher = mine.full, theirs.full
    return _Part(
        logprobs=_of_tokens(student, mine.logprobs, tokens) or nothing,
        teacher_logprobs=_of_tokens(teacher, theirs.logprobs, tokens) or nothing,
        reverse_kl=nothing if student is None or teacher is None else _column(F.reverse_kl(student, teacher)),
        student_entropy=nothing if student is None else _column(F.entropy(student)),
        teacher_entropy=nothing if teacher is None else _column(F.entropy(teacher)),
        student=None if student is None else _candidates(student, renderer),
        teacher=None if teacher is None else _candidates(teacher, renderer),
    )


def _of_tokens(full: Tensor | None, sampled: Tensor | None, tokens: Tensor) -> Column | None:
    """The log-probabilities of the tokens, from the whole distributions or as they were given."""
    if full is not None:
        return _column(F.gather_logprobs(full, tokens.to(full.device)))
    return None if sampled is None else _column(sampled)


def _candidates(logprobs: Float[Tensor, "T V"], renderer: Renderer) -> Candidates:
    top = logprobs.topk(min(CHOICES, logprobs.shape[-1]), dim=-1)
    texts = [[renderer.piece(token) for token in row] for row in top.indices.tolist()]
    return Candidates(texts, [[_short(value) for value in row] for row in top.values.exp().tolist()])


def _together(parts: Sequence[Candidates | None]) -> Candidates | None:
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return Candidates(
        [row for part in known for row in part.texts], [row for part in known for row in part.probabilities]
    )


def _column(values: Float[Tensor, " T"]) -> Column:
    return [_short(value) if value == value and abs(value) != float("inf") else None for value in values.tolist()]


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
