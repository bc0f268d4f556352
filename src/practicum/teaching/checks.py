"""Validation of the log-probabilities that a server returned; TeacherError with the reason.

Broken answers are refused and never repaired, with one exception: minus infinity and the numbers
that stand for it become `TEACHER_FLOOR`, and are counted.
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
from practicum.teaching.dialects import ServerScores
from practicum.types import ScoreRequest, TeacherSignal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HIGHEST = 1e-3
"""The rounding allowed in a log-probability above 0, or in a mass above 1."""

MOST = (1 << 31) - 1
"""The largest token id, and the largest integer that can be a log-probability."""

NO_PROBABILITY = -9998.0
"""Servers write -9999 for minus infinity, because JSON has no such number."""

NEAR_UNIFORM = 0.01

MAX_OTHER_TEXTS = 0.2
"""The largest share of differing texts that is explained by other spellings of spaces and bytes."""


def validate_scores(
    scores: ServerScores, request: ScoreRequest, k: int, vocabulary: int | None
) -> tuple[TeacherSignal, int]:
    """Return the signal, and the number of log-probabilities that were raised to the floor.

    `vocabulary` is the number of tokens, if it is known.
    """
    count = len(request.tokens)
    if len(scores.logprobs) != count:
        raise TeacherError(f"{len(scores.logprobs)} log-probabilities for {count} tokens")
    if scores.ids is not None and scores.ids != list(request.tokens):
        pairs = enumerate(zip(scores.ids, request.tokens, strict=False))
        position = next((position for position, (a, b) in pairs if a != b), count)
        raise TeacherError(
            f"it scored other tokens than it was asked about, from token {position} on; answers "
            "were mixed up"
        )
    clamped_values = [_clamp(number, f"token {n}") for n, number in enumerate(scores.logprobs)]
    logprobs = torch.tensor([number for number, _ in clamped_values], dtype=torch.float32)
    clamped = sum(is_clamped for _, is_clamped in clamped_values)
    same = constant(logprobs)
    is_uniform = (
        same is not None
        and vocabulary is not None
        and abs(same + math.log(vocabulary)) < NEAR_UNIFORM
    )
    # With rotary positions a text of one token looks the same from each of its places.
    has_one_token = len({*request.prompt_tokens, *request.tokens}) == 1
    if same is not None and same > TEACHER_FLOOR and (is_uniform or not has_one_token):
        reason = (
            f"minus the ln of {vocabulary}, as from a uniform distribution"
            if is_uniform
            else "and a model's opinions differ"
        )
        raise TeacherError(f"all {count} log-probabilities are {same:.4g}, {reason}")
    if k == 0:
        return TeacherSignal(logprobs=logprobs), clamped
    ids, topk_logprobs = _validate_candidates(scores, k, vocabulary)
    return TeacherSignal(logprobs=logprobs, topk_ids=ids, topk_logprobs=topk_logprobs), clamped


def _clamp(number: Any, where: str) -> tuple[float, bool]:
    """Return a log-probability, and True if it was minus infinity."""
    if number is None:
        return TEACHER_FLOOR, True
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TeacherError(f"the log-probability of {where} is not a number")
    # Python's integers have no limit, but floats and tensors cannot hold very large integers.
    if isinstance(number, int) and abs(number) > MOST:
        raise TeacherError(
            f"the log-probability of {where} has {number.bit_length()} bits, and none is so large"
        )
    # A server that returns probabilities or logits is caught here: both exceed 0 somewhere.
    if math.isnan(number) or number > HIGHEST:
        raise TeacherError(f"the log-probability of {where} is {number:.4g}, and none is above 0")
    return (TEACHER_FLOOR, True) if number <= NO_PROBABILITY else (float(number), False)


def _validate_candidates(
    scores: ServerScores, k: int, vocabulary: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and log-probabilities [T, K], most likely first."""
    count = k if vocabulary is None else min(k, vocabulary)
    rows = [_validate_row(row, count, vocabulary, f"token {n}") for n, row in enumerate(scores.top)]
    if len(rows) != len(scores.logprobs):
        raise TeacherError(f"candidates for {len(rows)} of {len(scores.logprobs)} tokens")
    ids = torch.tensor([[token for token, _ in row] for row in rows], dtype=torch.long)
    logprobs = torch.tensor([[logprob for _, logprob in row] for row in rows], dtype=torch.float32)
    return ids.reshape(len(rows), -1), logprobs.reshape(len(rows), -1)


def is_token(value: Any) -> bool:
    """Return True if a value can be a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST


def _validate_row(
    row: list[tuple[Any, Any]], count: int, vocabulary: int | None, where: str
) -> list[tuple[int, float]]:
    tokens = [token for token, _ in row]
    if len(tokens) != count:
        raise TeacherError(f"{len(tokens)} candidates at {where} instead of {count}")
    if not all(map(is_token, tokens)):
        raise TeacherError(f"a candidate at {where} is not a token id")
    if len(set(tokens)) != len(tokens):
        raise TeacherError(f"a candidate at {where} is listed twice")
    if vocabulary is not None and max(tokens) >= vocabulary:
        raise TeacherError(
            f"candidate {max(tokens)} at {where} is not in the vocabulary of {vocabulary} tokens"
        )
    logprobs = [_clamp(number, f"a candidate at {where}")[0] for _, number in row]
    if any(later > earlier for earlier, later in pairwise(logprobs)):
        raise TeacherError(f"the candidates at {where} are not ordered, most likely first")
    mass = sum(map(math.exp, logprobs))
    if mass > 1 + HIGHEST:
        raise TeacherError(
            f"the candidates at {where} have a probability of {mass:.4g} together; they are not "
            "log-probabilities"
        )
    return list(zip(tokens, logprobs, strict=True))


def check_texts(
    texts: Mapping[int, str], tokenizer: "PreTrainedTokenizerBase", client: JsonClient
) -> None:
    """Raise VocabularyError if the server's texts of tokens differ from the tokenizer's."""
    mismatch = find_other_texts(texts, tokenizer, client)
    if mismatch is not None:
        raise VocabularyError(
            f"{client.address}: the server's tokens are not the student's: {mismatch}; take a teacher "
            "of the student's family, or a text signal"
        )


def find_other_texts(
    texts: Mapping[int, str], tokenizer: "PreTrainedTokenizerBase", client: JsonClient
) -> str | None:
    """Return how many of the server's texts of tokens differ from the tokenizer's; None if few do.

    Spaces around a text and broken characters do not count.
    """
    pairs = {
        token: (text, str(tokenizer.decode([token])))
        for token, text in texts.items()
        if token < len(tokenizer)
    }
    pairs = {token: pair for token, pair in pairs.items() if "\ufffd" not in "".join(pair)}
    unequal = {t: pair for t, pair in pairs.items() if pair[0].strip(" ▁") != pair[1].strip(" ▁")}
    if len(unequal) <= MAX_OTHER_TEXTS * max(len(pairs), 1):
        return None
    token, (server_text, own_text) = min(unequal.items())
    return (
        f"{len(unequal)} of {len(pairs)} texts differ, id {token} is "
        f"{client.quote(server_text, 40)!a} there and {own_text[:40]!a} here"
    )
