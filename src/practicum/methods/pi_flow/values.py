"""Numbers as tokens: a vocabulary of rounded values, and the head that predicts them.

A step of a flow is a Gaussian over the next value of a coordinate. Its head is fixed, and scaled so
that the divergence `mse` of two such predictions is the squared difference of their velocities.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.errors import DataError, NumericError, RecipeError
from practicum.functional.head import Head
from practicum.text import Renderer
from practicum.types import Sample, SampleRequest, SamplingParams

LIMIT, STEP = 4.0, 0.01
"""Values lie between -LIMIT and LIMIT and are multiples of STEP."""

END = "</s>"
"""The stop token, which no trajectory has; it is token 0."""

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
COUNT = round(2 * LIMIT / STEP) + 1


def list_words() -> list[str]:
    """Return the text of each value, in order."""
    middle = COUNT // 2
    return [f"{(number - middle) * STEP:.2f}" for number in range(COUNT)]


def build_renderer() -> Renderer:
    """Return the renderer whose tokens are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: token for token, word in enumerate([END, *list_words()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False
    )
    return Renderer(wrapped, template=TEMPLATE, stop_ids=frozenset({0}))


def require_numbers(renderer: Renderer, part: str) -> None:
    """Raise RecipeError unless the student's tokens are numbers; `part` needs them."""
    vocabulary = renderer.tokenizer.get_vocab()
    if len(vocabulary) != COUNT + 1 or f"{LIMIT:.2f}" not in vocabulary:
        raise RecipeError(
            f"{part} reads trajectories of a flow, and the student writes text; set backend: "
            "{type: flow}"
        )


@cache
def list_values() -> Float[Tensor, " V"]:
    """Return the value of each token; the stop token counts as 0."""
    return torch.tensor([0.0, *map(float, list_words())])


def round_to_tokens(states: Float[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Return the token of the nearest value."""
    return (states.clamp(-LIMIT, LIMIT) / STEP).round().long() + COUNT // 2 + 1


def write_state(state: Float[Tensor, " D"]) -> str:
    """Return a state as text."""
    words = list_words()
    return " ".join(words[token - 1] for token in round_to_tokens(state).tolist())


def read_trajectories(
    prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], dimension: int
) -> Float[Tensor, "B N D"]:
    """Return noise and substates of trajectories of the same length.

    Raises DataError for a prompt or a trajectory with another number of values.
    """
    for prompt, text in zip(prompts, texts, strict=True):
        if len(prompt) != dimension or 0 in prompt:
            raise DataError(
                f"prompt: {len(prompt)} values, or another text than values, for a flow in "
                f"{dimension} dimensions; give one multiple of {STEP} per dimension, between "
                f"-{LIMIT:g} and {LIMIT:g}"
            )
        if len(text) != len(texts[0]) or len(text) % dimension or 0 in text:
            raise DataError(
                f"a trajectory has {len(text)} values, and another {len(texts[0])}; each needs the "
                f"same number of substates in {dimension} dimensions, so set rollout.source: "
                "student or teacher"
            )
    rows = [(*prompt, *text) for prompt, text in zip(prompts, texts, strict=True)]
    return list_values()[torch.tensor(rows)].unflatten(-1, (-1, dimension))


@cache
def build_head(substates: int) -> Head:
    """Return the head that reads the next value's mean, for a flow with this number of substates."""
    values = list_values()
    # A gap d of means has the mse std^2 d^2 / variance^2, and d is the velocities' gap / substates.
    variance = values.std(correction=0) / substates
    return Head(torch.stack([values, -values.square() / 2], dim=-1) / variance, len(values))


def predict_next(
    states: Float[Tensor, "... D"], velocities: Float[Tensor, "... D"], substates: int
) -> Float[Tensor, "... D 2"]:
    """Return the hidden states of the next values: their means, and the constant 1."""
    means = states - velocities / substates
    return torch.stack([means, torch.ones_like(means)], dim=-1)


VelocityFunction = Callable[[int, Tensor], Tensor]
"""Returns the velocities of a batch of states, from the number of their substate."""


def write_trajectories(
    requests: Sequence[SampleRequest],
    params: SamplingParams,
    shape: tuple[int, int],
    compute: VelocityFunction,
) -> list[Sample]:
    """Return the trajectories of given velocities; `shape` is (substates, dimension).

    Each state is rounded to tokens before the next velocity is computed there. Raises RecipeError
    for sampling settings without a meaning here.
    """
    substates, dimension = shape
    length = substates * dimension
    if params.max_new_tokens != length:
        raise RecipeError(
            f"max_new_tokens: {params.max_new_tokens}, but {substates} substates in {dimension} "
            f"dimensions are {length} tokens; set rollout.max_new_tokens: {length}"
        )
    if params.temperature not in (0, 1) or params.top_p < 1 or params.top_k:
        raise RecipeError(
            "rollout: a flow's only randomness is its noise; leave out temperature, top_p and top_k"
        )
    prompts = [request.prompt_tokens for request in requests]
    state = read_trajectories(prompts, [()] * len(prompts), dimension)[:, 0]
    tokens, logprobs, head = [], [], build_head(substates)
    for number in range(substates):
        predicted = predict_next(state, compute(number, state), substates)
        if not predicted.isfinite().all():
            raise NumericError("a velocity is not a number; lower optimizer.learning_rate")
        tokens.append(round_to_tokens(predicted[..., 0]))
        rows = [head.logprobs(part) for part in predicted.split(32)]
        logprobs.append(torch.cat(rows).gather(-1, tokens[-1][..., None])[..., 0])
        state = list_values()[tokens[-1]]
    columns = zip(torch.cat(tokens, dim=1), torch.cat(logprobs, dim=1), strict=True)
    return [Sample(row, torch.zeros(length), policy.clone(), "stop") for row, policy in columns]


def list_times(substates: int) -> Float[Tensor, " N"]:
    """Return the time of each state of a trajectory except the end point."""
    return 1 - torch.arange(substates) / substates
