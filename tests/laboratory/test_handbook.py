"""The handbook of the quick start: facts by seed, the same questions, and a wrong handbook."""

from pathlib import Path

from laboratory.handbook import Config, build, read_name
from practicum.ports import TaskContext
from practicum.recipe import load_recipe
from practicum.runs.opening import build_task
from practicum.types import Rollout


def draw(seed: int):
    return build(Config(), TaskContext(seed, Path()))


def test_each_seed_has_the_same_questions_and_other_persons() -> None:
    first, again, second = draw(0), draw(0), draw(1)
    assert first.train_prompts() == again.train_prompts()
    for one, two in ((first.train, second.train), (first.heldout, second.heldout)):
        assert [prompt.messages for prompt in one] == [prompt.messages for prompt in two]
    assert [prompt.answer for prompt in first.train] != [prompt.answer for prompt in second.train]


def test_the_quick_start_has_the_persons_of_seed_0() -> None:
    task, drawn = build_task(load_recipe("quickstart")), draw(0)
    assert list(task.train_prompts()) == list(drawn.train)
    asked = [prompt for prompt in drawn.heldout if prompt.domain != "wrong handbook"]
    assert list(task.heldout_prompts()) == asked


def test_each_answer_is_that_of_the_handbook_and_never_of_the_wrong_one() -> None:
    for seed in range(20):
        task = draw(seed)
        facts = {prompt.privileged["fact"] for prompt in task.train}
        wrong = {prompt.privileged["wrong"] for prompt in task.train}
        assert len(facts) == len(wrong) == 8
        assert len({read_name(sentence) for sentence in facts | wrong}) == 16
        for prompt in (*task.train, *task.heldout):
            key = "wrong" if prompt.domain == "wrong handbook" else "fact"
            if prompt.domain == "general":
                assert not prompt.privileged
            else:
                assert prompt.privileged["fact"] in facts
                assert prompt.answer == read_name(prompt.privileged[key])
                rollout = Rollout.from_text(prompt, f"It is {prompt.answer}, I think.")
                assert task.reward(rollout) == 1
