"""Find a fact of the asked kind in a long and mostly irrelevant text: needles in a haystack.

A text is words of random lower-case letters, and four words have a capital letter inside, one
letter of each kind. A question such as `?2` asks for the letter of a kind, as RULER (2404.06654)
asks for one of several needles. The privileged field `passage` holds only the four words, and
`asked` the question.
"""

import random
from dataclasses import replace
from string import ascii_lowercase
from typing import Literal

from pydantic import Field

from practicum.core.randomness import seed_of
from practicum.ports import Task, TaskConfig, TaskContext
from practicum.rows import PromptSet
from practicum.types import Message, Prompt

KINDS = {"1": "ABCDEF", "2": "GHIJKL", "3": "MNOPQR", "4": "STUVWX"}
"""The kinds of facts, each with its letters: a guess within the asked kind is right in one of six."""

SHORTEST = 8
"""The number of irrelevant words in the shortest text to train on."""


class Config(TaskConfig):
    """The length of the longest texts, and the numbers of questions."""

    type: Literal["needles"] = "needles"
    words: int = Field(
        default=180,
        ge=SHORTEST,
        description="irrelevant words of a held-out text, three to seven letters each; texts to train on have 8 to `words`",
    )
    train_size: int = Field(default=2048, ge=1, description="texts to train on")
    heldout_size: int = Field(
        default=32, ge=0, description="other texts, each asked whole and as its passage"
    )


def build(config: Config, context: TaskContext) -> Task:
    """Draw the texts; the held-out texts are asked twice, in the domains `long` and `short`."""
    words, seed = config.words, context.seed
    heldout = [
        _build_prompt(f"heldout-{n}", words, words, seed) for n in range(config.heldout_size)
    ]
    train = [_build_prompt(f"train-{n}", SHORTEST, words, seed) for n in range(config.train_size)]
    return PromptSet(train, [form for long in heldout for form in (long, _shorten(long))])


def _build_prompt(name: str, low: int, high: int, seed: int) -> Prompt:
    """Draw a text and a question; the number of irrelevant words is log-uniform."""
    draw = random.Random(seed_of(seed, "needles", name))
    facts = {kind: draw.choice(letters) for kind, letters in KINDS.items()}
    relevant = [_draw_word(draw, letter) for letter in facts.values()]
    count = round(low * (high / low) ** draw.random())
    text = [*relevant, *(_draw_word(draw) for _ in range(count))]
    draw.shuffle(text)
    kind = draw.choice(list(KINDS))
    passage = " ".join(word for word in text if word in relevant)
    fields = {"passage": passage, "asked": f"?{kind}"}
    question = Message("user", f"{' '.join(text)}?{kind}")
    return Prompt(name, (question,), answer=facts[kind], privileged=fields, domain="long")


def _draw_word(draw: random.Random, letter: str = "") -> str:
    """Draw a word with this letter anywhere in it."""
    letters = draw.choices(ascii_lowercase, k=draw.randint(3, 7))
    letters[draw.randrange(len(letters))] += letter
    return "".join(letters)


def _shorten(prompt: Prompt) -> Prompt:
    """Return the same question about the passage."""
    question = Message("user", "{passage}{asked}".format_map(prompt.privileged))
    return replace(prompt, id=f"{prompt.id}-short", messages=(question,), domain="short")
