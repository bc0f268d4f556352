"""The handbook of the quick start with persons drawn by the run's seed, and questions about a wrong handbook.

The held-out questions are those of the quick start, and each question about the handbook once more
with the domain `wrong handbook`: its answer is what the wrong handbook says.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from practicum.grading.verifiers import contains
from practicum.ports import TaskConfig, TaskContext
from practicum.rows import PromptSet
from practicum.tasks import jsonl
from practicum.types import Prompt

DATA = Path(__file__).resolve().parents[1] / "recipes" / "quickstart-data"


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
    names = draw_names(train, context.seed)
    heldout = [rename(prompt, names) for prompt in heldout]
    return PromptSet(
        train=[rename(prompt, names) for prompt in train],
        heldout=[*heldout, *(ask_wrong(prompt) for prompt in heldout if prompt.privileged)],
        verify=contains,
    )


def read_name(sentence: str) -> str:
    """Return the last word of a handbook's sentence: the person."""
    return sentence.rstrip(".").rpartition(" ")[2]


def draw_names(prompts: Sequence[Prompt], seed: int) -> dict[str, str]:
    """Return a permutation of all persons of both handbooks."""
    persons = sorted(
        {read_name(prompt.privileged[key]) for prompt in prompts for key in ("fact", "wrong")}
    )
    return dict(zip(persons, random.Random(seed).sample(persons, len(persons)), strict=True))


def rename(prompt: Prompt, names: dict[str, str]) -> Prompt:
    """Return the prompt with other persons in its answer and in both handbooks."""
    if not prompt.privileged:
        return prompt
    facts = {
        key: sentence.replace(read_name(sentence), names[read_name(sentence)])
        for key, sentence in prompt.privileged.items()
    }
    return replace(prompt, answer=read_name(facts["fact"]), privileged=facts)


def ask_wrong(prompt: Prompt) -> Prompt:
    """Return the same question with the answer of the wrong handbook."""
    return replace(
        prompt,
        id=f"{prompt.id}-wrong",
        domain="wrong handbook",
        answer=read_name(prompt.privileged["wrong"]),
    )
