"""A discriminator learns to recognise the writer, and only pairs answers to the same prompt."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
from learned_scorers import GENERATOR, build_scorer, write_answer

from practicum.methods.gad.discriminator import find_source_pairs
from practicum.models.tensors import read_tensors, write_tensors
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


def test_below_its_least_accuracy_a_discriminator_judges_nothing_and_a_resumed_one_neither(
    models: Path, tmp_path: Path
) -> None:
    GENERATOR.manual_seed(1)
    scorer, resumed = (
        build_scorer(models, tmp_path / name, type="discriminator", least_accuracy=0.8)
        for name in ("first", "second")
    )

    def is_judging(judge: Scorer) -> bool:
        return judge.score([write_answer(0, 4, "student")])[0].value is not None

    assert not is_judging(scorer)
    learn(scorer, (4, 5), 20)
    assert is_judging(scorer)
    learn(scorer, (5, 4), 5)  # the writers change places: its last ten steps are half wrong
    assert not is_judging(scorer)
    learn(resumed, (4, 5), 20)
    assert is_judging(resumed)
    resumed.load_state(copy.deepcopy(scorer.save_state()))
    assert not is_judging(resumed)
    learn(resumed, (5, 4), 10)
    assert is_judging(resumed)


def test_a_loaded_state_replaces_the_accuracies_of_before(models: Path, tmp_path: Path) -> None:
    GENERATOR.manual_seed(2)
    fresh, resumed = (
        build_scorer(models, tmp_path / name, type="discriminator") for name in ("fresh", "resumed")
    )
    learn(fresh, (4, 5), 2)
    state = copy.deepcopy(fresh.save_state())
    assert len(state["accuracies"]) == 2  # type: ignore[arg-type]
    learn(resumed, (4, 5), 5)
    resumed.load_state(state)
    assert resumed.save_state()["accuracies"].tolist() == state["accuracies"].tolist()  # type: ignore[union-attr]
    empty = build_scorer(models, tmp_path / "empty", type="discriminator")
    path = tmp_path / "state.safetensors"
    write_tensors(path, empty.save_state())
    resumed.load_state(read_tensors(path))
    assert not len(resumed.save_state()["accuracies"])  # type: ignore[arg-type]


def test_equal_answers_are_in_no_pair() -> None:
    answer = write_answer(0, 1, "teacher")
    rollouts = [answer, replace(answer, source="student"), write_answer(0, 2, "student")]
    pairs, unpaired = find_source_pairs(rollouts)
    assert pairs.tolist() == [[0, 2]] and unpaired == 0


def test_answers_of_the_reference_are_in_no_pair_of_a_discriminator() -> None:
    sources = ("teacher", "student", "reference", "dataset")
    rollouts = [write_answer(0, 1, source) for source in sources]
    pairs, unpaired = find_source_pairs(rollouts)
    assert pairs.tolist() == [[0, 1], [3, 1]] and unpaired == 0
    assert find_source_pairs([rollouts[0], rollouts[2]])[1] == 1
