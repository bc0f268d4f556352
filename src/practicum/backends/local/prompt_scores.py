"""Score every token of a text, list the model's most likely tokens, and sample alternatives.

One forward pass over the text gives all results: the tokens' log-probabilities, the k most likely
tokens at each position, the log-probabilities of tokens that the caller names, samples at each
position, and the first token after the text.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from practicum.backends.local.device_limits import find_limits
from practicum.backends.local.drawing import (
    draw_exponentials,
    open_random_stream,
    sample_by_exponential_race,
    sample_tokens,
)
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.packing import iterate_hidden_states
from practicum.backends.local.prepared import MIN_HEAD_ROWS, prepack_head
from practicum.core.randomness import seed_of
from practicum.costs.segments import split_by_tokens
from practicum.functional.chunked import chunks
from practicum.functional.head import Head
from practicum.ports.hosting import PromptQuestion, PromptScores
from practicum.text import stop_check
from practicum.types import Sample, ScoreRequest


@torch.no_grad()
def score_prompts(
    language_model: LanguageModel,
    overlay: Mapping[str, Tensor] | None,
    questions: Sequence[PromptQuestion],
    chunk_tokens: int = 128,
) -> list[PromptScores]:
    """Answer each question, in order; sharing a pass changes answers only by rounding."""
    language_model.model.eval()
    scores: list[PromptScores] = []
    with language_model.weights(overlay or {}):
        head = language_model.head().detached()
        if sum(question.rows + 1 for question in questions) >= MIN_HEAD_ROWS:
            head = prepack_head(head)
        requests = [_build_request(question) for question in questions]
        states = iterate_hidden_states(
            language_model, requests, find_limits(language_model.device).scored_tokens
        )
        for question, hidden in zip(questions, states, strict=True):
            following = _sample_following(head, hidden[-1:], question, language_model.tokenizer)
            scores.append(_score_prompt(head, hidden, question, chunk_tokens, following))
    return scores


def split_questions(
    language_model: LanguageModel, questions: Sequence[PromptQuestion]
) -> list[slice]:
    """Return slices of the questions, in order, that are answered in one pass each."""
    requests = [_build_request(question) for question in questions]
    return split_by_tokens(
        requests,
        find_limits(language_model.device).scored_tokens,
        language_model.max_packed_tokens,
    )


def _score_prompt(
    head: Head,
    hidden: Float[Tensor, "T D"],
    question: PromptQuestion,
    chunk_tokens: int,
    following: list[Sample],
) -> PromptScores:
    tokens = torch.tensor(question.tokens[question.first :], dtype=torch.long, device=hidden.device)
    stream = open_random_stream(seed_of(question.seed, "draws"))
    columns: list[list[Tensor]] = []
    # Use one empty piece if there are no rows, so that every column has the right width.
    for piece in list(chunks(question.rows, chunk_tokens)) or [slice(0, 0)]:
        logprobs = head.logprobs(hidden[piece])
        top = logprobs.topk(question.topk)
        samples = _sample_alternatives(logprobs, question, stream)
        chunk = [
            logprobs.gather(-1, tokens[piece, None]),
            top.indices,
            top.values,
            samples,
            logprobs.gather(-1, samples),
        ]
        if question.targets is not None:
            targets = question.targets[piece].to(hidden.device)
            chunk.append(logprobs.gather(-1, targets.clamp_min(0)).masked_fill(targets < 0, 0.0))
        columns.append(chunk)
    joined = [torch.cat(column).cpu() for column in zip(*columns, strict=True)]
    return PromptScores(
        logprobs=joined[0][:, 0],
        topk_ids=joined[1],
        topk_logprobs=joined[2],
        target_logprobs=None if question.targets is None else joined[5],
        drawn=joined[3],
        drawn_logprobs=joined[4],
        following=following,
    )


def _sample_alternatives(
    logprobs: Float[Tensor, "T V"], question: PromptQuestion, stream: torch.Generator
) -> Int[Tensor, "T D"]:
    """Sample `question.draws` tokens at each position, all from the same random stream.

    At temperature 0 every sample is the most likely token.
    """
    count, vocabulary = logprobs.shape
    if question.temperature == 0 or not count * question.draws:
        return logprobs.argmax(dim=-1, keepdim=True).expand(-1, question.draws)
    noise = draw_exponentials([stream] * (count * question.draws), vocabulary).to(logprobs.device)
    turns = noise.view(count, question.draws, -1).unbind(1)
    scores = logprobs / question.temperature
    return torch.stack([sample_by_exponential_race(scores, turn)[0] for turn in turns], dim=1)


def _sample_following(
    head: Head,
    hidden: Float[Tensor, "1 D"],
    question: PromptQuestion,
    tokenizer: PreTrainedTokenizerBase | None,
) -> list[Sample]:
    """Sample the first token after the text once for each seed in `question.following`."""
    if question.params is None or not question.following:
        return []
    check = stop_check(question.params, tokenizer)
    logits = head.logits(hidden).expand(len(question.following), -1)
    streams = [open_random_stream(seed) for seed in question.following]
    noise = draw_exponentials(streams, logits.shape[-1]).to(hidden.device)
    columns = [column.cpu() for column in sample_tokens(logits, question.params, noise)]
    tokens, sampled, untempered = (column.split(1) for column in columns)
    stops = check(columns[0][:, None].tolist())
    return [
        Sample(token, logprob.float(), policy.float(), "stop" if stopped else "length")
        for token, logprob, policy, stopped in zip(tokens, sampled, untempered, stops, strict=True)
    ]


def _build_request(question: PromptQuestion) -> ScoreRequest:
    # Token 0 is a placeholder for the token after the text: the last position predicts `following`.
    return ScoreRequest(question.tokens[: question.first], (*question.tokens[question.first :], 0))
