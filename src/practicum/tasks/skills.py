"""A dozen small skills on short strings, each a domain: the built-in task of pipelines."""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import Literal

from pydantic import Field, model_validator

from practicum.core.calls import suggest_name
from practicum.core.randomness import seed_of
from practicum.ports import Task, TaskConfig, TaskContext
from practicum.rows import PromptSet
from practicum.rows.words import check_enough, check_letters, sample_words
from practicum.text.thoughts import CLOSE, OPEN
from practicum.types import Message, Prompt

Skill = Callable[[str, str], str]
"""A function from a word and its alphabet to the answer."""


def _shift(word: str, alphabet: str, by: int) -> str:
    return "".join(alphabet[(alphabet.index(letter) + by) % len(alphabet)] for letter in word)


SKILLS: Mapping[str, Skill] = {
    "copy": lambda word, alphabet: word,
    "reverse": lambda word, alphabet: word[::-1],
    "sort": lambda word, alphabet: "".join(sorted(word, key=alphabet.index)),
    "upper": lambda word, alphabet: word.upper(),
    "next": lambda word, alphabet: _shift(word, alphabet, 1),
    "back": lambda word, alphabet: _shift(word, alphabet, -1),
    "left": lambda word, alphabet: word[1:] + word[:1],
    "swap": lambda word, alphabet: word[-1] + word[1:-1] + word[0],
    "double": lambda word, alphabet: "".join(2 * letter for letter in word),
    "mirror": lambda word, alphabet: word + word[::-1],
    "tail": lambda word, alphabet: word[1:],
    "first": lambda word, alphabet: word[0] * len(word),
}
"""The skills. They turn the word `dcab` into, in this order: dcab, bacd, abcd, DCAB, edbc, cbfa,
cabd, bcad, ddccaabb, dcabbacd, cab, dddd.
"""

EFFORTS = ("none", "high", "max")
"""Further skills: to walk through the alphabet, at the effort of thinking that the system turn names."""

EASIER = "easier"
"""The privileged field with a question that has the same answer: to copy it."""


class Config(TaskConfig):
    """The skills, and the words: their letters, and their lengths from `shortest` to `longest`."""

    type: Literal["skills"] = "skills"
    skills: tuple[str, ...] = Field(
        default=tuple(SKILLS),
        min_length=1,
        description="the skills of the held-out prompts; also `none`, `high`, `max`: walks through "
        "the alphabet at this effort of thinking",
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
    seed: int | None = Field(
        default=None, ge=0, description="seed of the words; none: the run's seed"
    )
    heldout_size: int = Field(
        default=16, ge=0, description="other words, each with every skill of `skills`"
    )

    @property
    def trained(self) -> tuple[str, ...]:
        """The skills of the training prompts."""
        return self.skills if self.train is None else self.train

    @model_validator(mode="after")
    def _check_skills(self) -> "Config":
        _check_names("skills", self.skills, (*SKILLS, *EFFORTS))
        _check_names("train", self.trained, self.skills)
        check_letters("alphabet", self.alphabet, "abcdef")
        count = self.train_size + self.heldout_size
        check_enough(self.alphabet, self.shortest, self.longest, count, "words")
        return self


def _check_names(field: str, names: Sequence[str], skills: Collection[str]) -> None:
    for name in names:
        if name not in skills:
            raise ValueError(f"{field}: no skill named {name!r}; {suggest_name(name, skills)}")
        if names.count(name) > 1:
            raise ValueError(f"{field}: {name!r} is listed twice; list each skill once")


def _build_prompts(words: Sequence[str], skills: Sequence[str], alphabet: str) -> list[Prompt]:
    """Build prompts such as `sort: dcab`, which is also the id, skill after skill for each word."""
    prompts = []
    for word in words:
        for skill in skills:
            if skill in EFFORTS:
                prompts.append(_build_walk(skill, word, alphabet))
                continue
            text = f"{skill}: {word}"
            answer = SKILLS[skill](word, alphabet)
            easier = {EASIER: f"copy: {answer}"}
            prompts.append(
                Prompt(
                    text, (Message("user", text),), answer=answer, privileged=easier, domain=skill
                )
            )
    return prompts


def _build_walk(effort: str, word: str, alphabet: str) -> Prompt:
    """Build a prompt such as `walk: a--++-+`: one letter on for +, one back for -; the answer is the last letter.

    The signs are the word's later letters in binary. The thoughts of the response hold none, half or
    all of the letters on the way. This share is drawn and does not follow the effort: reinforcement
    learning makes the efforts.
    """
    width = (len(alphabet) - 1).bit_length()
    bits = "".join(f"{alphabet.index(letter):0{width}b}" for letter in word[1:])
    steps = [2 * int(bit) - 1 for bit in bits]
    way = "".join(accumulate(steps, lambda at, by: _shift(at, alphabet, by), initial=word[0]))
    stride = random.Random(seed_of(0, effort, word)).randrange(3)
    thoughts = f"{OPEN}{way[stride::stride]}{CLOSE}" if stride else ""
    text = f"walk: {word[0]}{bits.translate({48: '-', 49: '+'})}"
    return Prompt(
        f"{effort} {text}",
        (Message("system", effort), Message("user", text)),
        answer=way[-1],
        response=f"{thoughts}{way[-1]}",
        domain=effort,
    )


def build(config: Config, context: TaskContext) -> Task:
    """Draw distinct words, and build a prompt for each word and skill.

    The held-out prompts always have all skills, so that a run also measures forgetting. The held-out
    words are drawn first and are in no training prompt, so they do not depend on the number of
    training words. Skills alternate, so that the first few prompts include all skills.
    """
    draw = random.Random(seed_of(context.seed if config.seed is None else config.seed, "skills"))
    count = config.heldout_size + config.train_size
    words = sample_words(draw, config.alphabet, config.shortest, config.longest, count)
    heldout, train = words[: config.heldout_size], words[config.heldout_size :]
    return PromptSet(
        train=_build_prompts(train, config.trained, config.alphabet),
        heldout=_build_prompts(heldout, config.skills, config.alphabet),
    )
