from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from practicum.ports import Task, TaskContext
from practicum.tasks.memos import DOCUMENTS, INSTRUCTIONS, TOPICS, Config, build
from practicum.types import Rollout


def task(seed: int = 0, /, **settings: object) -> Task:
    return build(Config.model_validate(settings), TaskContext(seed, Path()))


FOLLOWED = {
    "repeat": "The lemon is old.",
    "copy": "I saw a lemon today.",
    "yes or no": "No. A lemon is a fruit.",
    "words": "The lemon lay in a Blue bowl.",
    "list": "1. A lemon is yellow.\n2. It is",
    "letter": "Dear Anna,\n\nI have a lemon.",
    "email": "Subject: A lemon\n\nDear",
    "function": "```python\ndef lemon(n):",
    "story": "Once upon a time, a lemon",
    "opening": "Yesterday, a lemon fell.",
}
NOT_FOLLOWED = {
    "repeat": [
        "The lemon is old. It is.",
        "the lemon is old.",
        "The melon is old.",
        "Repeat this: The lemon is old.",
    ],
    "copy": ["I saw a lemon today.\n\nThis is", '"I saw a lemon today."', ""],
    "yes or no": ["A lemon is no animal.", "Nobody knows.", "Not at all."],
    "words": [
        "The lemon is yellow.",
        "The sky is blue.",
        "Lemons are not blue.",
        "A lemon and a blueberry.",
    ],
    "list": ["A lemon: 1. yellow", "10. A lemon", "1.", "- a lemon"],
    "letter": ["Dear Mr. Smith,", "Dear Annabel,", "To Anna"],
    "email": ["Dear Anna,", "Subjects", "A lemon. Subject: none"],
    "function": ["```python\ndef lemonade():", "def lemon", "A lemon is a fruit."],
    "story": ["There was once a lemon.", "once upon a time, a lemon"],
    "opening": ["The lemon fell yesterday.", "Yesterdays are lemons."],
}


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_an_instruction_is_followed_to_the_letter_or_not_at_all(name: str) -> None:
    followed = INSTRUCTIONS[name].is_followed
    assert followed(FOLLOWED[name], "lemon")
    assert not any(followed(reply, "lemon") for reply in NOT_FOLLOWED[name])
    assert not followed("The depot at Arlen holds 43 crates of salt.", "lemon"), (
        "a memo follows no instruction"
    )


def test_rewards_are_of_the_whole_reply_but_for_spaces_around_it() -> None:
    made = task()
    prompts = {prompt.id: prompt for prompt in [*made.train_prompts(), *made.heldout_prompts()]}
    assert made.reward(Rollout.from_text(prompts["repeat: lemon"], " The lemon is old.\n")) == 1.0
    assert made.reward(Rollout.from_text(prompts["repeat: lemon"], "The whale is old.")) == 0.0
    memo = next(prompt for prompt in made.heldout_prompts() if prompt.domain == "memos")
    assert (
        memo.answer is not None
        and made.reward(Rollout.from_text(memo, f"It holds {memo.answer}.")) == 1.0
    )
    assert made.reward(Rollout.from_text(memo, f"It holds 1{memo.answer}.")) == 0.0
    assert made.reward(Rollout.from_text(memo, "It holds salt.")) == 0.0


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 8), st.integers(0, 3))
def test_prompts_are_as_many_as_asked_for_and_all_different(
    seed: int, memos: int, topics: int, more: int
) -> None:
    made = task(seed, memos=memos, train_size=topics, heldout_size=more)
    train, heldout = made.train_prompts(), made.heldout_prompts()
    assert len(train) == len(DOCUMENTS) * memos + len(INSTRUCTIONS) * topics
    assert len(heldout) == memos + len(INSTRUCTIONS) * more
    prompts = [*train, *heldout]
    assert (
        len({prompt.id for prompt in prompts})
        == len({prompt.messages for prompt in prompts})
        == len(prompts)
    )


def test_a_held_out_memo_is_a_fact_that_was_trained_on_and_asked_for_in_other_words() -> None:
    made = task(memos=5)
    trained = [prompt for prompt in made.train_prompts() if prompt.domain == "memos"]
    for memo in (prompt for prompt in made.heldout_prompts() if prompt.domain == "memos"):
        place = memo.id.removeprefix("memo: ")
        documents = [prompt for prompt in trained if prompt.id.endswith(f": {place}")]
        assert len(documents) == 3
        for document in documents:
            assert (
                document.answer == memo.answer
                and made.reward(Rollout.from_text(document, document.response or "")) == 1.0
            )
            assert memo.answer is not None and memo.answer in (document.response or "")
            assert memo.answer not in document.messages[0].content


def test_a_held_out_instruction_is_about_a_topic_of_no_training_prompt() -> None:
    made = task(train_size=len(TOPICS) - 6)
    told, asked = (
        {prompt.id.split(": ")[1] for prompt in prompts if prompt.domain == "instructions"}
        for prompts in (made.train_prompts(), made.heldout_prompts())
    )
    assert len(asked) == 6 and told | asked == set(TOPICS) and not told & asked


def test_what_is_held_out_stays_whatever_is_trained_and_both_domains_take_turns() -> None:
    whole, memos = task(), task(train=["memos"], train_size=2)
    assert {prompt.domain for prompt in memos.train_prompts()} == {"memos"}
    assert memos.heldout_prompts() == whole.heldout_prompts()
    assert [prompt.domain for prompt in whole.heldout_prompts()[:4]] == [
        "memos",
        "instructions",
    ] * 2
    assert task(memos=3).heldout_prompts()[0] == whole.heldout_prompts()[0], (
        "fewer memos are the first of more"
    )


def test_the_seed_of_the_task_keeps_the_memos_and_that_of_the_run_draws_the_topics() -> None:
    def of(domain: str, made: Task) -> list[object]:
        prompts = [*made.train_prompts(), *made.heldout_prompts()]
        return [
            (prompt.id, prompt.response or prompt.answer)
            for prompt in prompts
            if prompt.domain == domain
        ]

    assert task(3).train_prompts() == task(3).train_prompts()
    assert of("memos", task(3)) != of("memos", task(4))
    assert of("memos", task(3, seed=7)) == of("memos", task(4, seed=7))
    assert of("instructions", task(3, seed=7)) == of("instructions", task(3, seed=8))
    assert of("instructions", task(3, seed=7)) != of("instructions", task(4, seed=7))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": ["memo"]}, "Input should be 'memos' or 'instructions'"),
        ({"train": ["memos", "memos"]}, "names a domain twice; write each once"),
        ({"train": []}, "at least 1 item"),
        ({"memos": 0}, "greater than or equal to 1"),
        ({"memos": 129}, "less than or equal to 128"),
        ({"train_size": 70}, "ask for 76 topics, but there are 60; lower them"),
        ({"train_size": 0}, "greater than or equal to 1"),
        ({"topics": 3}, "Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        task(**settings)
