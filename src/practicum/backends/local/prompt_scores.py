"""What a model says about every token of a given text, and what it would have said instead.

One pass over the text answers all of it: the tokens' own log-probabilities, the k likeliest at each position, those of tokens
that the caller names, draws from the model at each position, and the first token after the text.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from practicum.backends.local.drawing import (
    draw,
    draw_exponentials,
    random_stream,
    sample_by_exponential_race,
)
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.packing import hidden_states
from practicum.backends.local.prepared import MIN_HEAD_ROWS, prepack_head
from practicum.backends.local.sampler import SCORED_TOKENS
from practicum.core.randomness import seed_of
from practicum.costs.segments import how_many_fit
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
    """One answer a question, in order; what shares a pass changes nothing but rounding."""
    language_model.model.eval()
    answers: list[PromptScores] = []
    with language_model.weights(overlay or {}):
        head = language_model.head().pinned()
        if sum(question.rows + 1 for question in questions) >= MIN_HEAD_ROWS:
            head = prepack_head(head)
        for part in _passes(questions, language_model.packs_up_to):
            whole = hidden_states(language_model, [_text(question) for question in part])
            each = whole.split([question.rows + 1 for question in part])
            for question, hidden in zip(part, each, strict=True):
                following = _following(head, hidden[-1:], question, language_model.tokenizer)
                answers.append(_answer(head, hidden, question, chunk_tokens, following))
    return answers


def _answer(
    head: Head,
    hidden: Float[Tensor, "T D"],
    question: PromptQuestion,
    chunk_tokens: int,
    following: list[Sample],
) -> PromptScores:
    own = torch.tensor(question.tokens[question.first :], dtype=torch.long, device=hidden.device)
    stream = random_stream(seed_of(question.seed, "draws"))
    columns: list[list[Tensor]] = []
    for piece in chunks(question.rows, chunk_tokens):
        logprobs = head.logprobs(hidden[piece])
        top = logprobs.topk(question.topk)
        drawn = _drawn(logprobs, question, stream)
        found = [
            logprobs.gather(-1, own[piece, None]),
            top.indices,
            top.values,
            drawn,
            logprobs.gather(-1, drawn),
        ]
        if question.targets is not None:
            targets = question.targets[piece].to(hidden.device)
            found.append(logprobs.gather(-1, targets.clamp_min(0)).masked_fill(targets < 0, 0.0))
        columns.append([column.cpu() for column in found])
    width = 0 if question.targets is None else question.targets.shape[1]
    empty = [
        torch.zeros(0, size)
        for size in (1, question.topk, question.topk, question.draws, question.draws, width)
    ]
    joined = [torch.cat(parts) for parts in zip(*columns, strict=True)] if columns else empty
    return PromptScores(
        logprobs=joined[0][:, 0],
        topk_ids=joined[1].long(),
        topk_logprobs=joined[2],
        target_logprobs=None if question.targets is None else joined[5],
        drawn=joined[3].long(),
        drawn_logprobs=joined[4],
        following=following,
    )


def _drawn(
    logprobs: Float[Tensor, "T V"], question: PromptQuestion, stream: torch.Generator
) -> Int[Tensor, "T D"]:
    """Independent draws at each position, in turn from one stream; at temperature 0 the likeliest token every time."""
    count, vocabulary = logprobs.shape
    if question.temperature == 0 or not question.draws:
        return logprobs.argmax(dim=-1, keepdim=True).expand(-1, question.draws)
    noise = draw_exponentials([stream] * (count * question.draws), vocabulary).view(
        count, question.draws, -1
    )
    scores = logprobs / question.temperature
    return torch.stack(
        [
            sample_by_exponential_race(scores, noise[:, turn].to(scores.device))[0]
            for turn in range(question.draws)
        ],
        dim=1,
    )


def _following(
    head: Head,
    hidden: Float[Tensor, "1 D"],
    question: PromptQuestion,
    tokenizer: PreTrainedTokenizerBase | None,
) -> list[Sample]:
    if question.params is None or not question.following:
        return []
    check = stop_check(question.params, tokenizer)
    logits = head.logits(hidden).expand(len(question.following), -1)
    noise = draw_exponentials(
        [random_stream(seed) for seed in question.following], logits.shape[-1]
    ).to(hidden.device)
    tokens, sampled, natural = (column.cpu() for column in draw(logits, question.params, noise))
    return [
        Sample(
            tokens=tokens[row : row + 1],
            sampling_logprobs=sampled[row : row + 1].float(),
            policy_logprobs=natural[row : row + 1].float(),
            stop_reason="stop" if stopped else "length",
        )
        for row, stopped in enumerate(check(tokens[:, None].tolist()))
    ]


def _passes(
    questions: Sequence[PromptQuestion], packs_up_to: int
) -> Iterator[Sequence[PromptQuestion]]:
    while questions:
        count = how_many_fit(
            [_text(question) for question in questions], SCORED_TOKENS, packs_up_to
        )
        yield questions[:count]
        questions = questions[count:]


def _text(question: PromptQuestion) -> ScoreRequest:
    """The scored tokens after those before them, and any one token that stands for what comes next."""
    return ScoreRequest(question.tokens[: question.first], (*question.tokens[question.first :], 0))
