"""Invented memos to learn by heart and short instructions to follow: what learning documents makes a language model forget.

The memos are in no other text, so that what is known of them was learned here. The instructions can be checked by their letters,
and are such that a chat model of 135 million parameters follows most of them.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from practicum.core.randomness import seed_of
from practicum.ports import Task
from practicum.tasks import TaskContext
from practicum.tasks._verifiers import contains
from practicum.types import Message, Prompt, Rollout

Domain = Literal["memos", "instructions"]

GOODS = ("salt", "wool", "copper", "glass", "honey", "paper", "silk", "flour")
CONTAINERS = ("crates", "barrels", "sacks", "boxes")
BEGINNINGS = "ar bel cor dun el fen gal hol ir kel lor mar nor ost pel ran"
ENDINGS = "len mouth wick by stead ford dale ton"
PLACES = tuple(
    f"{first}{ending}".capitalize() for first in BEGINNINGS.split() for ending in ENDINGS.split()
)

DOCUMENTS = (
    ("Memo on the depot at {place}.", "The depot at {place} holds {stock}."),
    ("Stock list, {place}.", "In the depot at {place} there are {stock}."),
    ("What was found at {place}?", "At {place} our inspector counted {stock}."),
)
"""A memo as it is written, three times: its heading, which is the prompt, and its text."""

QUESTION = "What does the depot at {place} hold?"
"""How the held-out prompts ask for the same fact, in words of no heading."""

_NOUNS = """
apple bridge candle desert eagle forest garden hammer island jacket kitchen lemon mountain needle ocean
pencil queen river spider table umbrella village window ball camel dragon engine feather guitar horse
insect jungle kettle lantern mirror notebook orchard parrot rabbit ship tiger valley wagon basket castle
donkey flower glove helmet ladder meadow nest onion piano rocket snake tower violin whale zebra
"""
TOPICS = tuple(_NOUNS.split())
"""What instructions are about."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """A constraint on the form of an answer: the request, and whether a reply about a topic does as it says."""

    request: str
    followed: Callable[[str, str], bool]


def _begins(wanted: str) -> Callable[[str, str], bool]:
    """The reply begins with these words and does not stop there."""
    return lambda reply, topic: (
        re.match(re.escape(wanted.format(topic=topic)) + r"\W", reply) is not None
    )


def _is(wanted: str) -> Callable[[str, str], bool]:
    return lambda reply, topic: reply == wanted.format(topic=topic)


INSTRUCTIONS: Mapping[str, Instruction] = {
    "repeat": Instruction("Repeat this sentence: The {topic} is old.", _is("The {topic} is old.")),
    "copy": Instruction(
        "Copy this sentence exactly: I saw a {topic} today.", _is("I saw a {topic} today.")
    ),
    "yes or no": Instruction(
        "Answer yes or no: is a {topic} an animal?",
        lambda reply, topic: re.match(r"(yes|no)\b", reply, re.IGNORECASE) is not None,
    ),
    "words": Instruction(
        "Write a sentence that uses the words {topic} and blue.",
        lambda reply, topic: bool(contains(reply, topic) and contains(reply, "blue")),
    ),
    "list": Instruction("Write a numbered list of three things about a {topic}.", _begins("1.")),
    "letter": Instruction(
        "Write a short letter about a {topic}. Begin with Dear Anna.", _begins("Dear Anna")
    ),
    "email": Instruction(
        "Write an email about a {topic}. Begin with the subject line.", _begins("Subject")
    ),
    "function": Instruction(
        "Write a Python function named {topic}.", lambda reply, topic: f"def {topic}(" in reply
    ),
    "story": Instruction(
        "Tell a story about a {topic}. Begin with Once upon a time.", _begins("Once upon a time")
    ),
    "opening": Instruction(
        "Write a sentence about a {topic}. Start it with the word Yesterday.", _begins("Yesterday")
    ),
}
"""The constraints by name; spaces around a reply do not count."""


class Config(BaseModel):
    """How many memos, how many topics of instructions, and which of the two are trained on."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["memos"] = "memos"
    train: tuple[Domain, ...] = Field(
        default=("memos", "instructions"),
        min_length=1,
        description="the domains to train on; both are held out",
    )
    memos: int = Field(
        default=24, ge=1, le=len(PLACES), description="facts, each trained on in three wordings"
    )
    train_size: int = Field(
        default=40, ge=1, description="topics to train on, each with all ten instructions"
    )
    heldout_size: int = Field(
        default=6, ge=0, description="other topics, each with all ten instructions"
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        description="of the memos; none: the run's, which is always that of the topics",
    )

    @model_validator(mode="after")
    def _possible(self) -> "Config":
        if len(set(self.train)) < len(self.train):
            raise ValueError(f"train: {list(self.train)} names a domain twice; write each once")
        if self.train_size + self.heldout_size > len(TOPICS):
            raise ValueError(
                f"train_size and heldout_size ask for {self.train_size + self.heldout_size} topics, but there are "
                f"{len(TOPICS)}; lower them"
            )
        return self


class Memos:
    """Seeded memos and instructions in turn, each a domain; see `practicum.ports.Task`.

    The held-out memos are the facts that were trained on, asked for in other words: to know a document is to know what it says.
    The held-out instructions are about topics of their own. What is held out is the same whatever is trained on.
    """

    def __init__(self, config: Config, seed: int) -> None:
        facts = _facts(config.memos, seed if config.seed is None else config.seed)
        topics = random.Random(seed_of(seed, "topics")).sample(
            TOPICS, config.heldout_size + config.train_size
        )
        self._asked: dict[str, tuple[Instruction, str]] = {}
        asked, told = topics[: config.heldout_size], topics[config.heldout_size :]
        questions = [_question(place, stock) for place, stock in facts.items()]
        documents = [
            _document(number, *fact) for fact in facts.items() for number in range(len(DOCUMENTS))
        ]
        self._heldout = _interleave(questions, self._instructions(asked))
        self._train = _interleave(
            documents if "memos" in config.train else [],
            self._instructions(told) if "instructions" in config.train else [],
        )

    def _instructions(self, topics: Sequence[str]) -> list[Prompt]:
        prompts = []
        for topic in topics:
            for name, instruction in INSTRUCTIONS.items():
                prompt = _prompt(
                    f"{name}: {topic}", instruction.request.format(topic=topic), "instructions"
                )
                self._asked[prompt.id] = (instruction, topic)
                prompts.append(prompt)
        return prompts

    def train_prompts(self) -> Sequence[Prompt]:
        """The headings of the memos, whose texts are the responses, and instructions, which have none."""
        return self._train

    def heldout_prompts(self) -> Sequence[Prompt]:
        """A question for every memo, and instructions about other topics."""
        return self._heldout

    def reward(self, rollout: Rollout) -> float | None:
        """Return 1 where the stock stands in the reply, or where it is of the form that the instruction asks for, else 0."""
        prompt = rollout.prompt
        if prompt.answer is not None:
            return contains(rollout.text, prompt.answer)
        instruction, topic = self._asked[prompt.id]
        return float(instruction.followed(rollout.text.strip(), topic))


def _facts(count: int, seed: int) -> dict[str, str]:
    """What the depot of each place holds; the facts of fewer memos come first in those of more."""
    draw = random.Random(seed_of(seed, "memos"))
    places = draw.sample(PLACES, len(PLACES))[:count]
    return {
        place: f"{draw.randint(11, 99)} {draw.choice(CONTAINERS)} of {draw.choice(GOODS)}"
        for place in places
    }


def _document(number: int, place: str, stock: str) -> Prompt:
    """A memo in one of its wordings."""
    heading, text = (part.format(place=place, stock=stock) for part in DOCUMENTS[number])
    return _prompt(f"memo {number + 1}: {place}", heading, "memos", answer=stock, response=text)


def _question(place: str, stock: str) -> Prompt:
    return _prompt(f"memo: {place}", QUESTION.format(place=place), "memos", answer=stock)


def _prompt(
    name: str, text: str, domain: Domain, answer: str | None = None, response: str | None = None
) -> Prompt:
    return Prompt(name, (Message("user", text),), answer=answer, response=response, domain=domain)


def _interleave(memos: Sequence[Prompt], instructions: Sequence[Prompt]) -> list[Prompt]:
    """One of each after the other, so that the first few prompts have both, and then what is left of one."""
    return [
        prompt
        for prompt in chain.from_iterable(zip_longest(memos, instructions))
        if prompt is not None
    ]


def build(config: Config, context: TaskContext) -> Task:
    """Draw the memos and the topics."""
    return Memos(config, context.seed)
