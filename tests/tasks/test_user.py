"""A user who replies to answers: the messages, how often, and a verifier's feedback."""

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from practicum.errors import DataError
from practicum.grading.explaining import EXPLANATIONS
from practicum.ports import TaskContext
from practicum.tasks.user import Config, UserTask, build
from practicum.types import Rollout

ROWS = {"type": "reverse", "alphabet": "abcd", "train_size": 4, "heldout_size": 2}


def open_task(**settings: object) -> UserTask:
    task = build(Config(**{"task": ROWS, **settings}), TaskContext(seed=0, base_dir=Path()))  # type: ignore[arg-type]
    assert isinstance(task, UserTask) and task.opens_episodes
    return task


@pytest.mark.parametrize(
    ("verifier", "reply", "words"),
    [
        ("number", "8 * 7 = 56", "The answer is right."),
        ("number", "it is 54.", "The last number of the answer, 54, is too small."),
        ("number", "1,000", "The last number of the answer, 1000, is too large."),
        ("number", "many", "There is no number in the answer."),
        ("first_line", "54\n56", "The last number of the answer, 54, is too small."),
        ("exact", "56 ", "The answer is right."),
        ("exact", "57", "The answer is not right."),
        ("exact", "  ", "There is no answer."),
        ("contains", "it is 56.", "The answer is right."),
        ("contains", "156", "The answer does not contain what was asked for."),
    ],
)
def test_a_verifier_says_what_is_wrong_and_not_what_is_right(
    verifier: str, reply: str, words: str
) -> None:
    assert EXPLANATIONS[verifier](reply, "56") == words


def test_the_user_replies_until_an_answer_is_right_or_the_tries_are_over() -> None:
    task = open_task(tries=2, wrong="No: {question} {answer} {attempt}")
    prompt = task.train_prompts()[0]
    word, answer = prompt.messages[-1].content, prompt.answer
    episode = task.open(prompt, 0)
    first = episode.step(" {answer} ")
    assert first.messages[0].content == f"No: {word} {answer} {{answer}}" and not first.notes
    last = episode.step("no")
    assert last.messages == () and last.notes == {"next_state": f"No: {word} {answer} no"}
    assert task.open(prompt, 0).step(answer or "").notes == {"next_state": task.config.right}
    assert task.reward(Rollout.from_text(prompt, "no", answer or "")) == 1.0
    assert task.reward(Rollout.from_text(prompt, answer or "", "no")) == 0.0
    assert set("Thanks") <= set(task.letters)


def test_a_reply_without_a_field_or_a_task_that_replies_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"no field \{hint\}; it can have question, answer"):
        Config(task=ROWS, wrong="{hint}")
    with pytest.raises(DataError, match=r"task\.task: .walker. already replies to its answers"):
        open_task(task={"type": "walker"})


def test_questions_are_turns_and_the_bonus_is_for_being_right_before_and_after() -> None:
    task = open_task(asks=["{why}", "{hint} {attempt}", "{question}"], bonus=0.5)
    plain = task.train_prompts()[0]
    prompt, answer = replace(plain, privileged={"hint": "turn"}), plain.answer or ""
    episode = task.open(prompt, 0)
    # The first question lacks its field and is left out.
    asked = [episode.step(text) for text in ("no ", "so", answer)]
    assert [turn.messages[0].content for turn in asked[:2]] == [
        "turn no",
        plain.messages[-1].content,
    ]
    assert asked[2].notes == {"next_state": task.config.right}
    rewards = [
        task.reward(Rollout.from_text(prompt, first, "so", last))
        for first, last in ((answer, answer), ("no", answer), (answer, "no"), ("no", "no"))
    ]
    assert rewards == [1.0, pytest.approx(2 / 3), 0.0, 0.0]


def test_each_line_of_a_question_may_be_a_turn() -> None:
    prompt = open_task().train_prompts()[0]
    prompt = replace(prompt, privileged={"probes": "why?\n\nhow?"})
    for lines, questions in ((True, ["why?", "how?", "and?"]), (False, ["why?\n\nhow?", "and?"])):
        task = open_task(asks=["{probes}", "and?"], lines=lines)
        assert task.list_questions(prompt, "") == questions
