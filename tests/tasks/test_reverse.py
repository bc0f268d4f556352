from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from practicum.ports import Task, TaskContext
from practicum.tasks.reverse import Config, build
from practicum.types import Rollout


def task(seed: int = 0, **settings: object) -> Task:
    return build(Config.model_validate(settings), TaskContext(seed, Path()))


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 2))
def test_strings_are_different_within_bounds_and_scored_by_their_reverse(
    seed: int, shortest: int, more: int
) -> None:
    made = task(
        seed,
        alphabet="abc",
        shortest=shortest,
        longest=shortest + more,
        train_size=2,
        heldout_size=1,
    )
    prompts = [*made.train_prompts(), *made.heldout_prompts()]
    assert len({prompt.id for prompt in prompts}) == 3
    for prompt in prompts:
        word = prompt.messages[0].content
        assert shortest <= len(word) <= shortest + more
        assert set(word) <= set("abc")
        assert made.reward(Rollout.from_text(prompt, f" {word[::-1]}\n")) == 1.0
        assert made.reward(Rollout.from_text(prompt, word[::-1] + "a")) == 0.0


def test_the_same_seed_gives_the_same_strings() -> None:
    assert task(3).train_prompts() == task(3).train_prompts()
    assert task(3).train_prompts() != task(4).train_prompts()
    assert task(3, train_size=5).heldout_prompts() == task(3).heldout_prompts()


def test_every_string_there_is_can_be_asked_for() -> None:
    made = task(alphabet="ab", shortest=1, longest=3, train_size=10, heldout_size=4)
    assert len({prompt.id for prompt in [*made.train_prompts(), *made.heldout_prompts()]}) == 14


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"alphabet": "ab", "longest": 3, "train_size": 9, "heldout_size": 0},
            "ask for 9 strings, but 2 letters make",
        ),
        ({"shortest": 4, "longest": 3}, "shortest is 4 and longest 3; shortest may not be greater"),
        ({"alphabet": "aba"}, "alphabet 'aba' repeats a letter; write each letter once"),
        ({"alphabet": "a b"}, "alphabet 'a b' contains a space"),
        ({"alphabet": "a"}, "at least 2 characters"),
        ({"letters": "abc"}, "Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        task(**settings)
