"""Invented memos to memorise, and short instructions that such training makes a model forget.

The memos occur in no other text, so a model only knows them from training on them. The letters of a
reply show whether it follows an instruction, and a chat model of 135 million parameters follows
most instructions.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Literal

from pydantic import Field, model_validator

from practicum.core.randomness import seed_of
from practicum.grading.verifiers import contains
from practicum.ports import Task, TaskConfig, TaskContext
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
"""The three wordings of a memo: its heading, which is the prompt, and its text."""

QUESTION = "What does the depot at {place} hold?"
"""The wording of the held-out prompts: it asks for the same fact and repeats no heading."""

_NOUNS = """
apple bridge candle desert eagle forest garden hammer island jacket kitchen lemon mountain needle
ocean pencil queen river spider table umbrella village window ball camel dragon engine feather
guitar horse insect jungle kettle lantern mirror notebook orchard parrot rabbit ship tiger valley
wagon basket castle donkey flower glove helmet ladder meadow nest onion piano rocket snake tower
violin whale zebra
"""
TOPICS = tuple(_NOUNS.split())
"""The subjects of the instructions."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """A constraint on the form of a reply: its request, and a predicate of reply and topic."""

    request: str
    is_followed: Callable[[str, str], bool]


def _match_start(start: str) -> Callable[[str, str], bool]:
    """Return the predicate of replies that begin with these words and continue after them."""
    return lambda reply, topic: re.match(re.escape(start) + r"\W", reply) is not None


def _is(sentence: str) -> Callable[[str, str], bool]:
    return lambda reply, topic: reply == sentence.format(topic=topic)


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
    "list": Instruction(
        "Write a numbered list of three things about a {topic}.", _match_start("1.")
    ),
    "letter": Instruction(
        "Write a short letter about a {topic}. Begin with Dear Anna.", _match_start("Dear Anna")
    ),
    "email": Instruction(
        "Write an email about a {topic}. Begin with the subject line.", _match_start("Subject")
    ),
    "function": Instruction(
        "Write a Python function named {topic}.", lambda reply, topic: f"def {topic}(" in reply
    ),
    "story": Instruction(
        "Tell a story about a {topic}. Begin with Once upon a time.",
        _match_start("Once upon a time"),
    ),
    "opening": Instruction(
        "Write a sentence about a {topic}. Start it with the word Yesterday.",
        _match_start("Yesterday"),
    ),
}
"""The constraints by name; spaces around a reply are removed before the check."""


class Config(TaskConfig):
    """The number of memos and of topics of instructions, and the domains to train on."""

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
        description="seed of the memos; none: the run's seed, which always draws the topics",
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> "Config":
        if len(set(self.train)) < len(self.train):
            raise ValueError(f"train: {list(self.train)} names a domain twice; write each once")
        topics = self.train_size + self.heldout_size
        if topics > len(TOPICS):
            raise ValueError(
                f"train_size and heldout_size ask for {topics} topics, but there are "
                f"{len(TOPICS)}; lower them"
            )
        return self


class Memos(Task):
    """Seeded memos and instructions, alternating, each a domain; see `practicum.ports.Task`.

    The held-out memo prompts ask for the trained facts in other words: knowing a document means
    knowing its content. The held-out instructions use separate topics. The held-out prompts do not
    depend on the trained domains.
    """

    def __init__(self, config: Config, seed: int) -> None:
        facts = _draw_facts(config.memos, seed if config.seed is None else config.seed)
        draw = random.Random(seed_of(seed, "topics"))
        topics = draw.sample(TOPICS, config.heldout_size + config.train_size)
        self._instructions: dict[str, tuple[Instruction, str]] = {}
        questions = [
            _build_prompt(f"memo: {place}", QUESTION.format(place=place), "memos", answer=stock)
            for place, stock in facts.items()
        ]
        instructions = self._build_instructions(topics[: config.heldout_size])
        self._heldout = _interleave(questions, instructions)
        documents = _build_documents(facts) if "memos" in config.train else []
        trained_topics = topics[config.heldout_size :] if "instructions" in config.train else []
        self._train = _interleave(documents, self._build_instructions(trained_topics))

    def _build_instructions(self, topics: Sequence[str]) -> list[Prompt]:
        prompts = []
        for topic in topics:
            for name, instruction in INSTRUCTIONS.items():
                text = instruction.request.format(topic=topic)
                prompt = _build_prompt(f"{name}: {topic}", text, "instructions")
                self._instructions[prompt.id] = (instruction, topic)
                prompts.append(prompt)
        return prompts

    def train_prompts(self) -> Sequence[Prompt]:
        """Return memo headings, with texts as responses, and instructions, which have none."""
        return self._train

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Return a question for each memo, and instructions on other topics."""
        return self._heldout

    def reward(self, rollout: Rollout) -> float | None:
        """Return 1 if the reply contains the stock or follows its instruction, else 0."""
        prompt = rollout.prompt
        if prompt.answer is not None:
            return contains(rollout.answer, prompt.answer)
        instruction, topic = self._instructions[prompt.id]
        return float(instruction.is_followed(rollout.answer.strip(), topic))


def _draw_facts(count: int, seed: int) -> dict[str, str]:
    """Draw the stock of each place; a smaller count gives a prefix of a larger one."""
    draw = random.Random(seed_of(seed, "memos"))
    # All places are shuffled for every count, so that fewer memos are a prefix of more.
    places = draw.sample(PLACES, len(PLACES))[:count]
    return {
        place: f"{draw.randint(11, 99)} {draw.choice(CONTAINERS)} of {draw.choice(GOODS)}"
        for place in places
    }


def _build_documents(facts: Mapping[str, str]) -> list[Prompt]:
    prompts = []
    for place, stock in facts.items():
        for number, wording in enumerate(DOCUMENTS, start=1):
            heading, text = (part.format(place=place, stock=stock) for part in wording)
            name = f"memo {number}: {place}"
            prompts.append(_build_prompt(name, heading, "memos", answer=stock, response=text))
    return prompts


def _build_prompt(
    name: str, text: str, domain: Domain, answer: str | None = None, response: str | None = None
) -> Prompt:
    return Prompt(name, (Message("user", text),), answer=answer, response=response, domain=domain)


def _interleave(memos: Sequence[Prompt], instructions: Sequence[Prompt]) -> list[Prompt]:
    """Alternate memos and instructions, so that the first prompts hold both; the rest follows."""
    alternating = chain.from_iterable(zip_longest(memos, instructions))
    return [prompt for prompt in alternating if prompt is not None]


def build(config: Config, context: TaskContext) -> Task:
    """Draw the memos and the topics."""
    return Memos(config, context.seed)
