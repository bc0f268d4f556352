"""A discriminator learns to tell writers apart, and pairs only answers to the same prompt."""

from pathlib import Path
from typing import Any

import pytest
import torch
from toy import toy_recipe

from practicum.methods.gad.discriminator import find_source_pairs
from practicum.ports.scoring import Scorer
from practicum.runs.assembly import assemble_run
from practicum.training.judging import add_judgements
from practicum.types import Message, Prompt, Rollout

GENERATOR = torch.Generator()


def build(models: Path, folder: Path, **settings: Any) -> Scorer:
    # A discriminator needs the teacher's answers.
    changes = {"rollout.source": "join(teacher)", "rollout.n": 2}
    scorers = {"judge": {"learning_rate": 0.01, **settings}}
    recipe = toy_recipe(models, {**changes, "scorers": scorers})
    return assemble_run(recipe, folder).parts.scorers["judge"]


def write(number: int, token: int, source: Any, reward: float | None = None) -> Rollout:
    """An answer of three tokens, the last of which is given."""
    tokens = torch.randint(0, 4, (3,), generator=GENERATOR)
    tokens[-1] = token
    none = torch.zeros(3)
    return Rollout(
        prompt=Prompt(f"p{number}", (Message("user", "ab"),)),
        prompt_tokens=(1, 2),
        tokens=tokens,
        loss_mask=torch.ones(3, dtype=torch.bool),
        sampling_logprobs=none,
        policy_logprobs=none,
        policy_version=0,
        stop_reason="stop",
        text="",
        reward=reward,
        source=source,
    )


def learn(scorer: Scorer, letters: tuple[int, int], steps: int) -> list[float]:
    """Let a discriminator learn; return the share of pairs that it ordered rightly in the newest ten steps."""
    accuracy = []
    for _ in range(steps):
        pairs = [
            write(number, token, source)
            for number in range(8)
            for token, source in zip(letters, ("teacher", "student"), strict=True)
        ]
        accuracy.append(scorer.fit(list(add_judgements(pairs, {"judge": scorer}, {})))["accuracy"])
    return accuracy[-10:]


def test_a_discriminator_tells_writers_apart_and_falls_to_chance_where_they_are_equal(
    models: Path, tmp_path: Path
) -> None:
    GENERATOR.manual_seed(0)
    scorer = build(models, tmp_path, type="discriminator")
    apart = learn(scorer, (4, 5), 20)
    assert min(apart) > 0.9
    # The student becomes the teacher: what was learned to tell them apart orders nothing any more.
    equal = learn(scorer, (4, 4), 40)
    assert sum(equal) / len(equal) == pytest.approx(0.5, abs=0.12)


def test_answers_of_the_reference_are_in_no_pair_of_a_discriminator() -> None:
    sources = ("teacher", "student", "reference", "dataset")
    rollouts = [write(0, 1, source) for source in sources]
    pairs, unpaired = find_source_pairs(rollouts)
    assert pairs.tolist() == [[0, 1], [3, 1]] and unpaired == 0
    assert find_source_pairs([rollouts[0], rollouts[2]])[1] == 1
