"""Whether what a server says about tokens can be right: TeacherError with the reason where it cannot.

What is broken is refused, never repaired, with one exception: minus infinity and its stand-ins become `TEACHER_FLOOR`, and are
counted.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from practicum.errors import TeacherError, VocabularyError
from practicum.functional import TEACHER_FLOOR
from practicum.remote.http import JsonClient
from practicum.statistics.signal import constant
from practicum.teachers._dialects import ServerScores
from practicum.types import ScoreRequest, TeacherSignal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HIGHEST = 1e-3
"""A log-probability above this, or a mass above 1 + this, is not rounding any more."""

MOST = (1 << 31) - 1
"""The largest id of a token, and the largest number that a log-probability is written with."""

NO_PROBABILITY = -9998.0
"""Servers write -9999 for minus infinity, because JSON has no such number."""

NEAR_UNIFORM = 0.01

OTHER_TEXTS = 0.2
"""A share of tokens with other texts above this is another vocabulary; below it, two ways of writing spaces and bytes."""


def validate_scores(
    said: ServerScores, request: ScoreRequest, k: int, vocabulary: int | None
) -> tuple[TeacherSignal, int]:
    """The signal and how many of its log-probabilities had to be lifted to the floor.

    `vocabulary` is the number of tokens there are, where it is known.
    """
    count = len(request.tokens)
    if len(said.logprobs) != count:
        raise TeacherError(f"{len(said.logprobs)} log-probabilities for {count} tokens")
    if said.ids is not None and said.ids != list(request.tokens):
        place = next(
            (p for p, (a, b) in enumerate(zip(said.ids, request.tokens, strict=False)) if a != b),
            count,
        )
        raise TeacherError(
            f"it scored other tokens than it was asked about, from token {place} on; answers were mixed up"
        )
    clamped_values = [_number(value, f"token {place}") for place, value in enumerate(said.logprobs)]
    logprobs = torch.tensor([value for value, _ in clamped_values], dtype=torch.float32)
    clamped = sum(was for _, was in clamped_values)
    same = constant(logprobs)
    if same is not None and same > TEACHER_FLOOR:
        uniform = vocabulary is not None and abs(same + math.log(vocabulary)) < NEAR_UNIFORM
        raise TeacherError(
            f"all {count} log-probabilities are {same:.4g}, "
            + (
                f"minus the ln of {vocabulary}, which is no opinion"
                if uniform
                else "and a model's opinions differ"
            )
        )
    if k == 0:
        return TeacherSignal(logprobs=logprobs), clamped
    ids, values = _candidates(said, k, vocabulary)
    return TeacherSignal(logprobs=logprobs, topk_ids=ids, topk_logprobs=values), clamped


def _number(value: Any, where: str) -> tuple[float, bool]:
    """A log-probability, and whether it was minus infinity."""
    if value is None:
        return TEACHER_FLOOR, True
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TeacherError(f"the log-probability of {where} is no number")
    if isinstance(value, int) and abs(value) > MOST:
        raise TeacherError(
            f"the log-probability of {where} has {value.bit_length()} bits, and none is so large"
        )
    if math.isnan(value) or value > HIGHEST:
        raise TeacherError(f"the log-probability of {where} is {value:.4g}, and none is above 0")
    return (TEACHER_FLOOR, True) if value <= NO_PROBABILITY else (float(value), False)


def _candidates(
    said: ServerScores, k: int, vocabulary: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and log-probabilities [T, K], likeliest first."""
    wanted = k if vocabulary is None else min(k, vocabulary)
    rows = [_row(row, wanted, vocabulary, f"token {place}") for place, row in enumerate(said.top)]
    if len(rows) != len(said.logprobs):
        raise TeacherError(f"candidates for {len(rows)} of {len(said.logprobs)} tokens")
    ids = torch.tensor([[token for token, _ in row] for row in rows], dtype=torch.long)
    values = torch.tensor([[value for _, value in row] for row in rows], dtype=torch.float32)
    return ids.reshape(len(rows), -1), values.reshape(len(rows), -1)


def is_token(value: Any) -> bool:
    """Return whether a value can be the id of a token."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST


def _row(
    row: list[tuple[Any, Any]], wanted: int, vocabulary: int | None, where: str
) -> list[tuple[int, float]]:
    tokens = [token for token, _ in row]
    if len(tokens) != wanted:
        raise TeacherError(f"{len(tokens)} candidates at {where} instead of {wanted}")
    if not all(map(is_token, tokens)):
        raise TeacherError(f"a candidate at {where} is no token id")
    if len(set(tokens)) != len(tokens):
        raise TeacherError(f"a candidate at {where} stands twice")
    if vocabulary is not None and max(tokens) >= vocabulary:
        raise TeacherError(
            f"candidate {max(tokens)} at {where} is not in the vocabulary of {vocabulary} tokens"
        )
    values = [_number(value, f"a candidate at {where}")[0] for _, value in row]
    if any(later > earlier for earlier, later in pairwise(values)):
        raise TeacherError(f"the candidates at {where} are not ordered, likeliest first")
    mass = sum(map(math.exp, values))
    if mass > 1 + HIGHEST:
        raise TeacherError(
            f"the candidates at {where} have a probability of {mass:.4g} together; they are not log-probabilities"
        )
    return list(zip(tokens, values, strict=True))


def check_texts(
    texts: Mapping[int, str], tokenizer: "PreTrainedTokenizerBase", client: JsonClient
) -> None:
    """VocabularyError where the server's texts of tokens are not the tokenizer's, but for spaces and broken characters."""
    compared = {
        token: (text, str(tokenizer.decode([token])))
        for token, text in texts.items()
        if token < len(tokenizer)
    }
    compared = {t: (a, b) for t, (a, b) in compared.items() if "\ufffd" not in a + b}
    other = {t: pair for t, pair in compared.items() if pair[0].strip(" ▁") != pair[1].strip(" ▁")}
    if len(other) > OTHER_TEXTS * max(len(compared), 1):
        token, (theirs, ours) = min(other.items())
        raise VocabularyError(
            f"{client.address}: the server's tokens are not the student's: {len(other)} of {len(compared)} texts differ, "
            f"id {token} is {client.shown(theirs, 40)!a} there and {ours[:40]!a} here; take a teacher of the student's family, "
            "or a text signal"
        )
