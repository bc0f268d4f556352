"""A discriminator learns to recognise the writer, and only pairs answers to the same prompt."""

from pathlib import Path

import pytest
from learned_scorers import GENERATOR, build_scorer, write_answer

from practicum.methods.gad.discriminator import find_source_pairs
from practicum.ports.scoring import Scorer
from practicum.training.judging import add_judgements


def learn(scorer: Scorer, letters: tuple[int, int], steps: int) -> list[float]:
    """Let a discriminator learn; return the share of pairs in the right order over the newest ten steps."""
    accuracy = []
    for _ in range(steps):
        pairs = [
            write_answer(number, token, source)
            for number in range(8)
            for token, source in zip(letters, ("teacher", "student"), strict=True)
        ]
        accuracy.append(scorer.fit(list(add_judgements(pairs, {"judge": scorer}, {})))["accuracy"])
    return accuracy[-10:]


def test_a_discriminator_tells_writers_apart_and_falls_to_chance_where_they_are_equal(
    models: Path, tmp_path: Path
) -> None:
    GENERATOR.manual_seed(0)
    scorer = build_scorer(models, tmp_path, type="discriminator")
    apart = learn(scorer, (4, 5), 20)
    assert min(apart) > 0.9
    # The student becomes the teacher: the learned differences no longer order the pairs.
    equal = learn(scorer, (4, 4), 40)
    assert sum(equal) / len(equal) == pytest.approx(0.5, abs=0.12)


def test_answers_of_the_reference_are_in_no_pair_of_a_discriminator() -> None:
    sources = ("teacher", "student", "reference", "dataset")
    rollouts = [write_answer(0, 1, source) for source in sources]
    pairs, unpaired = find_source_pairs(rollouts)
    assert pairs.tolist() == [[0, 1], [3, 1]] and unpaired == 0
    assert find_source_pairs([rollouts[0], rollouts[2]])[1] == 1
