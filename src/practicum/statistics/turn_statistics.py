"""Student and teacher turn by turn: their agreement before and after the first wrong turn."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from practicum.statistics.groups import mean_of
from practicum.types import Turn

WRONG = 0.05
"""The teacher's probability of a token below which the turn that holds it is wrong."""


@dataclass(frozen=True, slots=True)
class TurnAgreement:
    """One turn of the student under the teacher: means over its tokens, None if they are unknown.

    A turn is wrong if the teacher finds one of its tokens very unlikely, or if one of its calls has
    no result.
    """

    reverse_kl: float | None
    agreement: float | None
    is_wrong: bool


def judge_turns(
    turns: Sequence[Turn],
    teacher_logprobs: Sequence[float | None],
    reverse_kl: Sequence[float | None],
) -> list[TurnAgreement]:
    """Return the agreement in each of the student's turns; both columns have one number per token."""
    judged, start = [], 0
    for turn in turns:
        end = start + turn.tokens
        if turn.role == "assistant":
            logprobs, distances = (
                [number for number in column[start:end] if number is not None]
                for column in (teacher_logprobs, reverse_kl)
            )
            probabilities = [math.exp(logprob) for logprob in logprobs]
            has_failed = any(call.outcome != "answered" for call in turn.calls)
            judged.append(
                TurnAgreement(
                    mean_of(distances),
                    mean_of(probabilities),
                    has_failed or min(probabilities, default=1.0) < WRONG,
                )
            )
        start = end
    return judged


def compare_turns(conversations: Sequence[Sequence[TurnAgreement]]) -> dict[str, float]:
    """Return how first and last turns differ, and how often a turn is wrong before and after another.

    `wrong_before` is the share of wrong turns among turns that only follow right turns, and
    `wrong_after` among turns that follow a wrong turn. Conversations of one turn are not counted.
    """
    longer = [turns for turns in conversations if len(turns) > 1]
    if not longer:
        return {}
    first_wrongs = [find_first_wrong(turns) for turns in longer]
    pairs = list(zip(longer, first_wrongs, strict=True))
    # A conversation stops counting with its first wrong turn: later turns no longer follow only
    # right turns.
    exposed = sum(len(turns) if first is None else first + 1 for turns, first in pairs)
    later = [
        float(turn.is_wrong)
        for turns, first in pairs
        if first is not None
        for turn in turns[first + 1 :]
    ]
    ends = {"first": [turns[0] for turns in longer], "last": [turns[-1] for turns in longer]}
    numbers = {
        **{f"reverse_kl_{end}_turn": mean_of([t.reverse_kl for t in ends[end]]) for end in ends},
        **{f"agreement_{end}_turn": mean_of([t.agreement for t in ends[end]]) for end in ends},
        "first_wrong_turn": mean_of([None if n is None else n + 1.0 for n in first_wrongs]),
        "wrong_before": sum(first is not None for first in first_wrongs) / exposed,
        "wrong_after": mean_of(later),
        "turns_after_wrong": float(len(later)),
    }
    return {name: number for name, number in numbers.items() if number is not None}


def find_first_wrong(turns: Sequence[TurnAgreement]) -> int | None:
    """Return the index of the first wrong turn, or None if all are right."""
    return next((index for index, turn in enumerate(turns) if turn.is_wrong), None)


def reward_step(text: str, corrected: str, rejected: str) -> float:
    """Return the reward of a step that does not solve its task (SCoRe, arXiv 2509.14257).

    It is 0.5 for the corrected step, 0 for the rejected step, and 0.1 for any other step.
    """
    return {corrected.strip(): 0.5, rejected.strip(): 0.0}.get(text.strip(), 0.1)
