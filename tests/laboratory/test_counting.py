"""Counting: the prompts, the reward by place, and the readings of a run."""

import itertools
import json
import random
from pathlib import Path

import pytest

from laboratory.counting import EXAMPLE, Config, build, find_right, share_right
from laboratory.measures.places import average_parts, read_places
from practicum.ports import TaskContext
from practicum.types import Rollout


def draw(seed: int):
    return build(Config(), TaskContext(seed, Path()))


def test_each_seed_draws_other_prompts_and_keeps_the_held_out_ones_apart() -> None:
    draws = draw(0), draw(1)
    for task in draws:
        ids = [prompt.id for prompt in (*task.heldout, *task.train)]
        assert len(ids) == len(set(ids)) == 24 + 128
        assert f"Count from {EXAMPLE[0]} to {EXAMPLE[1]}." not in ids
    assert draws[0].heldout == draw(0).heldout != draws[1].heldout


def test_an_answer_is_right_and_each_of_its_numbers_counts() -> None:
    for prompt in draw(2).heldout:
        assert prompt.answer is not None
        numbers = prompt.answer.split(", ")
        assert 66 <= len(numbers) <= 75
        assert all(int(high) - int(low) == 1 for low, high in itertools.pairwise(numbers))
        assert draw(2).reward(Rollout.from_text(prompt, f"Here: {prompt.answer}.")) == 1
        place = random.Random(prompt.id).randrange(len(numbers))
        wrong = ", ".join([*numbers[:place], "7", *numbers[place + 1 :]])
        right = find_right(wrong, prompt.answer)
        assert right.count(False) == 1 and not right[place]
        assert share_right(wrong, prompt.answer) == pytest.approx(1 - 1 / len(numbers))


@pytest.mark.parametrize(
    ("reply", "share"),
    [("", 0.0), ("5, 4", 0.5), ("5, 4, 3, 2", 1.0), ("5, 4, 3, 2, 1, 0, 5, 4", 0.5), ("4, 3", 0.0)],
)
def test_short_long_and_shifted_replies(reply: str, share: float) -> None:
    assert share_right(reply, "5, 4, 3, 2") == share


def test_quarters_by_hand() -> None:
    answers = [[True, True, True, False], [True, True, False, False, False]]
    assert average_parts(answers) == {
        "accuracy/part_1": 1.0,
        "accuracy/part_2": 1.0,
        "accuracy/part_3": 0.5,
        "accuracy/part_4": 0.0,
    }


def test_the_readings_of_a_run(tmp_path: Path) -> None:
    answers = [{"text": "9, 8, 1, 6", "expected": "9, 8, 7, 6"}]
    (tmp_path / "after.json").write_text(json.dumps({"student": {"answers": answers}}))
    rows = [{"step": 1, "reverse_kl_at_0": 2.0}, {"step": 2, "reverse_kl_at_0": 1.0, "loss": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_places(tmp_path) == {
        "accuracy/part_1": 1.0,
        "accuracy/part_2": 1.0,
        "accuracy/part_3": 0.0,
        "accuracy/part_4": 1.0,
        "divergence_at_0": 1.0,
    }
