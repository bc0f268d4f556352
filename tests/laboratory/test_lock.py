"""Locks: the prompt does not contain the code, the dataset only teaches its form, and only the whole code is right."""

from collections import Counter
from pathlib import Path

import pytest
from pydantic import ValidationError

from laboratory.lock import Config, build
from practicum.ports import TaskContext
from practicum.types import Rollout


def task(seed: int = 0, **settings: object):
    return build(Config.model_validate(settings), TaskContext(seed, Path()))


def test_every_try_at_a_lock_has_its_code_and_a_random_one_to_imitate():
    made = task(locks=3, length=4, train_size=300, heldout_size=6)
    codes = {prompt.id[0]: prompt.answer for prompt in made.train_prompts()}
    assert sorted(codes) == ["A", "B", "C"]
    for prompt in [*made.train_prompts(), *made.heldout_prompts()]:
        assert prompt.answer == codes[prompt.id[0]]
        assert prompt.response is not None
        assert len(prompt.response) == 4
    letters = Counter(prompt.response[0] for prompt in made.train_prompts() if prompt.response)
    assert max(letters.values()) < 0.4 * 300, "what is imitated says nothing of the code"
    assert not {p.id for p in made.train_prompts()} & {p.id for p in made.heldout_prompts()}


def test_a_code_is_right_as_a_whole_or_not_at_all():
    made = task()
    prompt = made.train_prompts()[0]
    assert prompt.answer is not None
    assert made.reward(Rollout.from_text(prompt, prompt.answer)) == 1.0
    assert (
        made.reward(Rollout.from_text(prompt, prompt.answer[:-1]))
        == made.reward(Rollout.from_text(prompt, ""))
        == 0.0
    )


def test_the_codes_belong_to_the_seed():
    pinned = build(Config(seed=3), TaskContext(9, Path()))
    assert task(3).train_prompts() == task(3).train_prompts() == pinned.train_prompts()
    assert task(3).train_prompts() != task(4).train_prompts()


@pytest.mark.parametrize("letters", ["aab", "aB", "a1"])
def test_letters_that_are_none_are_refused(letters):
    with pytest.raises(
        ValidationError, match="write lower-case letters, each once, for example abcd"
    ):
        task(letters=letters)
