"""Texts of a random process with known probabilities: letters that depend on the three letters before them.

A student can miss the process in every context by little or much, so its error has no shelf, and the error is known exactly. The
logits of the next letter are a sum of three random tables, for one, two and three letters of context: a model that learns more of
them comes nearer.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from practicum.core.randomness import seed_of
from practicum.ports import TaskConfig, TaskContext
from practicum.rows import PromptSet
from practicum.types import Message, Prompt

LETTERS = "abcdefghijkl"
ORDER = 3
SCALES = (1.5, 1.2, 1.0)
"""The spread of the logits that one, two and three letters of context add."""

ANSWER = 20
"""Letters of an answer."""

BURN_IN = 16
"""Letters that are dropped before a text, so that it begins anywhere in the process."""


class Config(TaskConfig):
    """The number of texts; `seed` draws the process and the texts."""

    type: Literal["laboratory.scaling.chain"] = "laboratory.scaling.chain"
    seed: int = Field(default=0, ge=0)
    train_size: int = Field(default=20_000, ge=1)
    heldout_size: int = Field(default=256, ge=1)


@dataclass(frozen=True)
class Chain:
    """A process: the log-probability of the next letter after each three letters."""

    seed: int

    @cached_property
    def logprobs(self) -> Float[Tensor, "a a a a"]:
        """The table, with the oldest letter of the context first."""
        generator, count = self._open_generator("process"), len(LETTERS)
        logits = torch.zeros([count] * (ORDER + 1))
        for order, scale in enumerate(SCALES, start=1):
            # A table of fewer letters of context has no axes for the older ones.
            logits = logits + scale * torch.randn([count] * (order + 1), generator=generator)
        return logits.log_softmax(dim=-1)

    def sample(self, count: int, length: int, part: str) -> Int[Tensor, "n t"]:
        """Draw texts; parts of the data have different draws."""
        generator = self._open_generator(part)
        texts = torch.randint(len(LETTERS), (count, ORDER), generator=generator)
        for _ in range(BURN_IN + length):
            weights = self.logprobs[tuple(texts[:, -ORDER:].T)].exp()
            texts = torch.cat([texts, torch.multinomial(weights, 1, generator=generator)], dim=1)
        return texts[:, -length:]

    def read(self, texts: Int[Tensor, "n t"]) -> Float[Tensor, "n s a"]:
        """Return the log-probabilities of each letter after the first three."""
        before = [texts[:, place : texts.shape[1] - ORDER + place] for place in range(ORDER)]
        return self.logprobs[tuple(before)]

    def _open_generator(self, part: str) -> torch.Generator:
        return torch.Generator().manual_seed(seed_of(self.seed, "chain", part))


def build(config: Config, context: TaskContext) -> PromptSet:
    """Draw texts; the prompt is the first three letters, and the answer the next 20."""
    # No answer is right or wrong, so there is no reward.
    return PromptSet(
        train=_draw_prompts(config, "train", config.train_size),
        heldout=_draw_prompts(config, "heldout", config.heldout_size),
        grade=lambda reply, prompt: None,
    )


def _draw_prompts(config: Config, part: str, count: int) -> list[Prompt]:
    texts = Chain(config.seed).sample(count, ORDER + ANSWER, part).tolist()
    return [
        _build_prompt(f"{part}-{index}", "".join(LETTERS[letter] for letter in text))
        for index, text in enumerate(texts)
    ]


def _build_prompt(name: str, text: str) -> Prompt:
    return Prompt(name, (Message("user", text[:ORDER]),), answer=text[ORDER:])


def measure_errors(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int, count: int = 512
) -> dict[str, float]:
    """Return how far a model is from the process, in nats per letter.

    `modelling` is KL(process || model) on texts of the process, `generation` is KL(model || process) on texts of the model, and
    `error` is their mean. All distributions are over the letters.
    """
    chain = Chain(seed)
    texts = chain.sample(count, ORDER + ANSWER, "measured")
    generated = _write_texts(model, tokenizer, texts[:, :ORDER], seed)
    modelling = _compare(chain.read(texts), _score_texts(model, tokenizer, texts))
    generation = _compare(_score_texts(model, tokenizer, generated), chain.read(generated))
    return {
        "modelling": modelling,
        "generation": generation,
        "error": (modelling + generation) / 2,
    }


def _compare(first: Float[Tensor, "n s a"], second: Float[Tensor, "n s a"]) -> float:
    """Return the mean KL(first || second)."""
    return (first.exp() * (first - second)).sum(dim=-1).mean().item()


def _write_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    starts: Int[Tensor, "n o"],
    seed: int,
) -> Int[Tensor, "n t"]:
    generator = torch.Generator().manual_seed(seed_of(seed, "chain", "written"))
    texts = starts
    for _ in range(ANSWER):
        weights = _score_texts(model, tokenizer, texts, last=True)[:, -1].exp()
        texts = torch.cat([texts, torch.multinomial(weights, 1, generator=generator)], dim=1)
    return texts


@torch.no_grad()
def _score_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Int[Tensor, "n t"],
    last: bool = False,
) -> Float[Tensor, "n s a"]:
    """Return the model's log-probabilities of each letter of the answers, or only of the next letter."""
    letters = torch.tensor(tokenizer.convert_tokens_to_ids(list(LETTERS)))
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "".join(LETTERS[letter] for letter in start)}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for start in texts[:, :ORDER].tolist()
    ]
    ids = torch.cat([torch.tensor(prompts), letters[texts[:, ORDER:]]], dim=1)
    logits = model(input_ids=ids).logits[:, len(prompts[0]) - 1 :]
    logits = logits[:, -1:] if last else logits[:, :-1]
    return logits[:, :, letters].log_softmax(dim=-1)
