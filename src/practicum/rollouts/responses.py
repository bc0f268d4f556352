"""Convert the answers in the rows of a dataset into samples."""

import math
from collections.abc import Sequence

import torch

from practicum.core.waits import show_wait
from practicum.errors import DataError, ModelError
from practicum.text import Renderer
from practicum.types import Message, Prompt, Sample


def encode_response(prompt: Prompt, renderer: Renderer, source: str, length: int) -> Sample:
    """Return at most `length` tokens of the answer that a prompt's row has, for a rollout source.

    DataError if the row has no answer, or if the chat template cannot write it after the prompt.
    """
    return encode_message(prompt, _read_answer(prompt, source), renderer, length)


def encode_written(prompt: Prompt, text: object, renderer: Renderer, length: int) -> Sample:
    """Return at most `length` tokens of the answer that a function wrote; DataError for no text."""
    if not isinstance(text, str):
        raise DataError(
            f"rollout.source: the function returned a {type(text).__name__} for prompt "
            f"{prompt.id!r}; return the answer as a text"
        )
    return encode_message(prompt, Message("assistant", text), renderer, length)


def encode_message(prompt: Prompt, answer: Message, renderer: Renderer, length: int) -> Sample:
    """Return at most `length` tokens of an answer; DataError if the template cannot write it."""
    try:
        tokens = renderer.encode_answer(prompt.messages, answer, length)
    except (DataError, ModelError) as error:
        raise DataError(f"prompt {prompt.id!r}: {error}") from None
    if any(token in renderer.stop_ids for token in tokens[:-1]):
        raise DataError(
            f"the response of prompt {prompt.id!r} has a stop token before its end, where the "
            "student would stop; remove it from the text, or from student.stop"
        )
    stops = bool(tokens) and tokens[-1] in renderer.stop_ids
    return Sample(
        torch.tensor(tokens, dtype=torch.long),
        torch.zeros(len(tokens)),
        torch.full((len(tokens),), math.nan),
        "stop" if stops else "length",
    )


def check_responses(
    prompts: Sequence[Prompt], renderer: Renderer, source: str, length: int
) -> None:
    """Raise DataError if `encode_response` would refuse the answers of some rows for a source.

    `length` is the largest number of tokens. Takes less time than rendering the prompts.
    """
    refusals: list[DataError] = []
    with show_wait("reading the answers to imitate", total=len(prompts)) as wait:
        for prompt in prompts:
            try:
                _check_response(prompt, renderer, source, length)
            except DataError as error:
                refusals.append(error)
            wait.advance()
    if refusals:
        raise DataError(
            f"{len(refusals)} of {len(prompts)} rows have no answer that rollout.source "
            f"{source!r} can imitate; the first is {refusals[0]}"
        )


def _check_response(prompt: Prompt, renderer: Renderer, source: str, length: int) -> None:
    """Raise DataError where `encode_response` does. Most answers need not be tokenized for it."""
    answer = _read_answer(prompt, source)
    try:
        needs_tokens = renderer.check_answer(prompt.messages, answer)
    except (DataError, ModelError) as error:
        raise DataError(f"prompt {prompt.id!r}: {error}") from None
    if needs_tokens:
        encode_response(prompt, renderer, source, length)


def _read_answer(prompt: Prompt, source: str) -> Message:
    """Return a row's response, else its answer, as a message; DataError if it has neither."""
    text = prompt.answer if prompt.response is None else prompt.response
    if text is None:
        raise DataError(
            f"prompt {prompt.id!r} has neither a response nor an answer, which rollout.source "
            f"{source!r} learns from; add one to its row, or set source: student"
        )
    reasoning = None if prompt.response is None else prompt.reasoning
    return Message("assistant", text, reasoning=reasoning)
