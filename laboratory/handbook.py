"""The handbook of the quick start with persons drawn by the run's seed, and questions about a wrong handbook.

The held-out questions are the questions of the quick start, and each handbook question once more
with the domain `wrong handbook`: its answer is what the wrong handbook says. The quick start has
the persons of seed 0.
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from practicum.grading.verifiers import contains
from practicum.ports import TaskConfig, TaskContext
from practicum.rows import PromptSet
from practicum.tasks import jsonl
from practicum.types import Prompt

DATA = Path(__file__).resolve().parents[1] / "recipes" / "quickstart-data"

PERSONS = {
    "fact": [
        "Marlene",
        "Ottokar",
        "Philippa",
        "Benedikt",
        "Dorothea",
        "Casimir",
        "Henrike",
        "Ludmila",
    ],
    "wrong": [
        "Tobias",
        "Rosalind",
        "Leopold",
        "Winifred",
        "Anselm",
        "Gertrude",
        "Valentin",
        "Frederick",
    ],
}
"""The persons of both handbooks, by place in the order of the rows, before they change places."""


class Config(TaskConfig):
    """No settings."""

    type: Literal["laboratory.handbook"] = "laboratory.handbook"


def build(config: Config, context: TaskContext) -> PromptSet:
    """Read the rows of the quick start and give each place other persons."""
    rows = jsonl.Config(
        path=DATA / "train.jsonl", heldout=(DATA / "heldout.jsonl",), verifier="contains"
    )
    task = jsonl.build(rows, context)
    train, heldout = task.train_prompts(), task.heldout_prompts()
    entries = list(dict.fromkeys(prompt.privileged["fact"] for prompt in train))
    persons_by_handbook = draw_persons(context.seed)
    persons = {
        entry: {key: names[place] for key, names in persons_by_handbook.items()}
        for place, entry in enumerate(entries)
    }
    heldout = [rename(prompt, persons) for prompt in heldout]
    return PromptSet(
        train=[rename(prompt, persons) for prompt in train],
        heldout=[*heldout, *(ask_wrong(prompt) for prompt in heldout if prompt.privileged)],
        verify=contains,
    )


def draw_persons(seed: int) -> dict[str, list[str]]:
    """Return the persons of both handbooks by place, after a permutation of all of them."""
    names = sorted(name for persons in PERSONS.values() for name in persons)
    swapped = dict(zip(names, random.Random(seed).sample(names, len(names)), strict=True))
    return {key: [swapped[name] for name in persons] for key, persons in PERSONS.items()}


def read_name(sentence: str) -> str:
    """Return the last word of a handbook's sentence: the person."""
    return sentence.rstrip(".").rpartition(" ")[2]


def rename(prompt: Prompt, persons: Mapping[str, Mapping[str, str]]) -> Prompt:
    """Return the prompt with other persons in its answer and in both handbooks."""
    if not prompt.privileged:
        return prompt
    names = persons[prompt.privileged["fact"]]
    facts = {
        key: sentence.replace(read_name(sentence), names[key])
        for key, sentence in prompt.privileged.items()
    }
    return replace(prompt, answer=names["fact"], privileged=facts)


def ask_wrong(prompt: Prompt) -> Prompt:
    """Return the same question with the answer of the wrong handbook."""
    return replace(
        prompt,
        id=f"{prompt.id}-wrong",
        domain="wrong handbook",
        answer=read_name(prompt.privileged["wrong"]),
    )
