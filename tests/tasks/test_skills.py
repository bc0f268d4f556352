import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from practicum.ports import Task, TaskContext
from practicum.tasks.skills import EFFORTS, SKILLS, Config, build
from practicum.types import Rollout


def task(seed: int = 0, **settings: object) -> Task:
    return build(Config.model_validate(settings), TaskContext(seed, Path()))


ANSWERS = {
    "copy": "dcab",
    "reverse": "bacd",
    "sort": "abcd",
    "upper": "DCAB",
    "next": "edbc",
    "back": "cbfa",
    "left": "cabd",
    "swap": "bcad",
    "double": "ddccaabb",
    "mirror": "dcabbacd",
    "tail": "cab",
    "first": "dddd",
}


def test_each_skill_does_what_its_name_says() -> None:
    assert {name: skill("dcab", "abcdef") for name, skill in SKILLS.items()} == ANSWERS


@given(st.integers(0, 2**32), st.integers(2, 4), st.integers(0, 2))
def test_prompts_are_different_within_bounds_and_scored_exactly(
    seed: int, shortest: int, more: int
) -> None:
    made = task(
        seed,
        alphabet="abc",
        shortest=shortest,
        longest=shortest + more,
        train_size=4,
        heldout_size=3,
    )
    prompts = [*made.train_prompts(), *made.heldout_prompts()]
    assert len({prompt.id for prompt in prompts}) == 7 * len(SKILLS)
    for prompt in prompts:
        found = re.fullmatch(r"(\w+): ([abc]+)", prompt.messages[0].content)
        assert (
            found is not None
            and found[1] == prompt.domain
            and shortest <= len(found[2]) <= shortest + more
        )
        assert prompt.answer == SKILLS[found[1]](found[2], "abc")
        assert made.reward(Rollout.from_text(prompt, f" {prompt.answer}\n")) == 1.0
        assert made.reward(Rollout.from_text(prompt, prompt.answer + "a")) == 0.0


def test_a_walk_has_its_thoughts_whatever_the_effort() -> None:
    made = task(skills=[*EFFORTS], shortest=3, longest=3, train_size=180, heldout_size=32)
    prompts = [*made.train_prompts(), *made.heldout_prompts()]
    assert len({prompt.id for prompt in prompts}) == 3 * 212
    lengths = {effort: list[int]() for effort in EFFORTS}
    for prompt in prompts:
        effort, question = (message.content for message in prompt.messages)
        start, *signs = question.removeprefix("walk: ")
        place, way = "abcdef".index(start), ""
        for sign in signs:
            place += 1 if sign == "+" else -1
            way += "abcdef"[place % 6]
        assert effort == prompt.domain and prompt.answer == way[-1] and len(way) == 6
        assert prompt.response is not None
        thoughts = prompt.response.removesuffix(way[-1])
        assert thoughts in ("", f"<think>{way[1::2]}</think>", f"<think>{way}</think>")
        assert made.reward(Rollout.from_text(prompt, prompt.response)) == 1.0
        assert made.reward(Rollout.from_text(prompt, f"<think>{way}")) == 0.0
        lengths[effort].append(len(thoughts))
    # The cold start shows each effort the same mixture, so only rewards can separate them.
    for values in lengths.values():
        assert all(60 <= values.count(length) <= 85 for length in (0, 18, 21))


def test_the_skills_held_out_stay_whatever_is_trained() -> None:
    chosen = ("sort", "copy", "first")
    whole, expert = task(skills=chosen), task(skills=chosen, train=["copy"], train_size=9)
    assert {prompt.domain for prompt in expert.train_prompts()} == {"copy"} and len(
        expert.train_prompts()
    ) == 9
    assert expert.heldout_prompts() == whole.heldout_prompts()
    assert [prompt.domain for prompt in whole.heldout_prompts()[:6]] == [*chosen, *chosen]


def test_a_held_out_word_is_in_no_training_prompt() -> None:
    made = task(alphabet="ab", train_size=20, heldout_size=8)
    held_out = {prompt.messages[0].content.split(": ")[1] for prompt in made.heldout_prompts()}
    assert not held_out & {
        prompt.messages[0].content.split(": ")[1] for prompt in made.train_prompts()
    }


def test_the_same_seed_gives_the_same_words() -> None:
    assert task(3).train_prompts() == task(3).train_prompts()
    assert task(3).train_prompts() != task(4).train_prompts()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"skills": ["sorted"]}, "skills: no skill named 'sorted'; did you mean 'sort'"),
        ({"skills": ["sort", "copy", "sort"]}, "skills: 'sort' is listed twice"),
        (
            {"skills": ["sort", "copy"], "train": ["cop"]},
            "train: no skill named 'cop'; did you mean 'copy'",
        ),
        ({"skills": ["sort"], "train": ["copy"]}, "train: no skill named 'copy'"),
        ({"skills": []}, "at least 1 item"),
        ({"alphabet": "abA"}, "alphabet 'abA': write lower-case letters, each once"),
        ({"alphabet": "aba"}, "alphabet 'aba': write lower-case letters, each once"),
        ({"shortest": 4, "longest": 3}, "shortest is 4 and longest 3; shortest may not be greater"),
        ({"alphabet": "ab", "longest": 3}, "ask for 272 words, but 2 letters make only 12"),
        ({"skill": ["sort"]}, "Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        task(**settings)
