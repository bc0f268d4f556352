"""A dozen small skills over short strings, each a domain of its own: the built-in task of pipelines."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from practicum.core.calls import did_you_mean
from practicum.core.randomness import seed_of
from practicum.ports import Task
from practicum.tasks import PromptSet, TaskContext
from practicum.tasks._words import check_enough, sample_words
from practicum.types import Message, Prompt

Skill = Callable[[str, str], str]
"""From a word and the alphabet it is written in to the answer."""


def _shifted(word: str, alphabet: str, by: int) -> str:
    return "".join(alphabet[(alphabet.index(letter) + by) % len(alphabet)] for letter in word)


SKILLS: Mapping[str, Skill] = {
    "copy": lambda word, alphabet: word,
    "reverse": lambda word, alphabet: word[::-1],
    "sort": lambda word, alphabet: "".join(sorted(word, key=alphabet.index)),
    "upper": lambda word, alphabet: word.upper(),
    "next": lambda word, alphabet: _shifted(word, alphabet, 1),
    "back": lambda word, alphabet: _shifted(word, alphabet, -1),
    "left": lambda word, alphabet: word[1:] + word[:1],
    "swap": lambda word, alphabet: word[-1] + word[1:-1] + word[0],
    "double": lambda word, alphabet: "".join(2 * letter for letter in word),
    "mirror": lambda word, alphabet: word + word[::-1],
    "tail": lambda word, alphabet: word[1:],
    "first": lambda word, alphabet: word[0] * len(word),
}
"""What is done with the word `dcab`: dcab, bacd, abcd, DCAB, edbc, cbfa, cabd, bcad, ddccaabb, dcabbacd, cab, dddd."""


class Config(BaseModel):
    """Which skills, and on which words: letters of the alphabet, `shortest` to `longest` of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["skills"] = "skills"
    skills: tuple[str, ...] = Field(
        default=tuple(SKILLS), min_length=1, description="the skills that are held out"
    )
    train: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="the skills to train on, some of `skills`; none: all of them",
    )
    alphabet: str = Field(
        default="abcdef", min_length=2, description="lower-case letters, each once"
    )
    shortest: int = Field(default=2, ge=2, description="letters of the shortest word")
    longest: int = Field(default=4, ge=2, le=100, description="letters of the longest word")
    train_size: int = Field(
        default=256, ge=1, description="words to train on, each with every skill of `train`"
    )
    seed: int | None = Field(default=None, ge=0, description="of the words; none: the run's")
    heldout_size: int = Field(
        default=16, ge=0, description="other words, each with every skill of `skills`"
    )

    @property
    def trained(self) -> tuple[str, ...]:
        """The skills of the training prompts."""
        return self.skills if self.train is None else self.train

    @model_validator(mode="after")
    def _possible(self) -> "Config":
        _check_names("skills", self.skills, SKILLS)
        _check_names("train", self.trained, self.skills)
        if not (self.alphabet.isalpha() and self.alphabet.islower()) or len(
            set(self.alphabet)
        ) < len(self.alphabet):
            raise ValueError(
                f"alphabet {self.alphabet!r}: write lower-case letters, each once, for example abcdef"
            )
        wanted = self.train_size + self.heldout_size
        check_enough(self.alphabet, self.shortest, self.longest, wanted, "words")
        return self


def _check_names(
    field: str, names: Sequence[str], known: Mapping[str, Skill] | Sequence[str]
) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{field}: no skill named {name!r}; {did_you_mean(name, list(known))}")
        if names.count(name) > 1:
            raise ValueError(f"{field}: {name!r} stands twice; write each skill once")


def _prompt(skill: str, word: str, alphabet: str) -> Prompt:
    """`sort: dcab`, which is also the prompt's id."""
    text = f"{skill}: {word}"
    return Prompt(
        text, (Message("user", text),), answer=SKILLS[skill](word, alphabet), domain=skill
    )


def build(config: Config, context: TaskContext) -> Task:
    """Seeded words, all different, with a skill each.

    The held-out prompts are of all skills whatever is trained on, so that a run also measures what it unlearns. A
    held-out word is in no training prompt, and drawn first, so that it stays the same whatever the number of training
    words. Skills take turns, so that the first few prompts have all of them.
    """
    draw = random.Random(seed_of(context.seed if config.seed is None else config.seed, "skills"))
    count = config.heldout_size + config.train_size
    words = sample_words(draw, config.alphabet, config.shortest, config.longest, count)
    heldout, train = words[: config.heldout_size], words[config.heldout_size :]
    return PromptSet(
        train=[_prompt(skill, word, config.alphabet) for word in train for skill in config.trained],
        heldout=[
            _prompt(skill, word, config.alphabet) for word in heldout for skill in config.skills
        ],
    )
