import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from practicum.methods.opsdl.needles import KINDS, SHORTEST, Config, build
from practicum.ports import Task, TaskContext
from practicum.types import Prompt, Rollout


def task(seed: int = 0, /, **settings: object) -> Task:
    return build(Config.model_validate(settings), TaskContext(seed, Path()))


def look_up(prompt: Prompt) -> tuple[list[str], str]:
    """Return the words of a prompt, and the letter of the asked kind, read from the text."""
    text, asked = prompt.messages[0].content.split("?")
    letters = [letter for letter in text if letter in KINDS[asked]]
    assert len(letters) == 1, "each kind occurs once"
    return text.split(" "), letters[0]


@given(st.integers(0, 2**32), st.integers(SHORTEST, 40))
def test_long_and_short_texts_hold_the_answer_once(seed: int, words: int) -> None:
    questions = task(seed, words=words, train_size=3, heldout_size=2)
    train, heldout = questions.train_prompts(), questions.heldout_prompts()
    for prompt in (*train, *heldout):
        text, answer = look_up(prompt)
        assert prompt.answer == answer
        relevant = [word for word in text if re.search("[A-Z]", word)]
        assert len(relevant) == len(KINDS)
        high = 0 if prompt.domain == "short" else words
        low = SHORTEST if prompt in train else high
        assert low <= len(text) - len(relevant) <= high
        assert prompt.privileged["passage"] == " ".join(relevant), "in the order of the text"
        assert prompt.messages[0].content.endswith(prompt.privileged["asked"])
        assert questions.reward(Rollout.from_text(prompt, answer)) == 1.0
        wrong = "B" if answer == "A" else "A"
        assert questions.reward(Rollout.from_text(prompt, wrong)) == 0.0


def test_training_texts_are_long_and_heldout_texts_are_asked_in_both_forms() -> None:
    questions = task(train_size=4, heldout_size=3)
    assert {prompt.domain for prompt in questions.train_prompts()} == {"long"}
    heldout = questions.heldout_prompts()
    assert [prompt.domain for prompt in heldout] == ["long", "short"] * 3
    for long, short in zip(heldout[::2], heldout[1::2], strict=True):
        assert long.answer == short.answer and long.privileged == short.privileged
        assert len(long.messages[0].content) > 1000 > 60 > len(short.messages[0].content)


def test_the_texts_depend_only_on_their_seed() -> None:
    few, many = task(train_size=1, heldout_size=2), task(train_size=9, heldout_size=2)
    assert few.heldout_prompts() == many.heldout_prompts()
    assert few.train_prompts()[0] == many.train_prompts()[0]
    assert few.train_prompts()[0] != task(1, train_size=1).train_prompts()[0]


def test_lengths_of_training_texts_are_log_uniform() -> None:
    """Half of the texts are shorter than the geometric mean of the bounds, 8 and 50 words."""
    questions = task(words=50, train_size=1000).train_prompts()
    below = sum(prompt.messages[0].content.count(" ") - 3 < 20 for prompt in questions)
    assert 440 < below < 560
