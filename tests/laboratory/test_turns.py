"""The growth of mistakes with the turns of a conversation: by hand, on walks, and from a finished run."""

from pathlib import Path

import pytest

from laboratory.measures.turns import (
    build_tasks,
    compute_growth,
    compute_lost_share,
    compute_wrong_shares,
    count_wrong_turns,
    find_wrong_turns,
)
from practicum.core.plugins import load_plugin
from practicum.errors import RecipeError
from practicum.recipe import parse_recipe
from practicum.run_dir import read_json
from practicum.runs import run
from practicum.tasks.walker import ACTIONS
from practicum.types import Rollout

WALKER = {
    "student": {"model": {"hidden_size": 16, "layers": 1, "heads": 2}},
    "teacher": {"type": "expert"},
    "train": {"steps": 1, "prompts_per_step": 4, "threads": 1},
}


def walks(turns: int, **settings: object):
    """Return the tasks of 1 to `turns` turns."""
    recipe = {**WALKER, "task": {"type": "walker", "turns": turns, "heldout_size": 8, **settings}}
    return build_tasks(parse_recipe(recipe, "walks"))


def test_growth_by_hand():
    assert compute_growth([0.1] * 16)["growth"] == pytest.approx(1), (
        "mistakes that are as likely at every turn"
    )
    growing = compute_growth([0.01 * turn for turn in range(1, 101)])
    assert growing["growth"] == pytest.approx(2, abs=0.02), "mistakes that add up"
    assert growing["wrong_turns"] == pytest.approx(50.5) and growing[
        "wrong_turns/half"
    ] == pytest.approx(12.75)
    assert compute_growth([0.0, 0.0, 0.5, 0.5]) == {"wrong_turns": 1.0, "wrong_turns/half": 0.0}, (
        "no growth from nothing"
    )


@pytest.mark.long
def test_fewer_turns_are_the_beginning_of_more():
    short, long = walks(4)[-1], walks(8)[3]
    assert [prompt.messages for prompt in short.heldout_prompts()] == [
        prompt.messages for prompt in long.heldout_prompts()
    ]
    prompt = short.heldout_prompts()[0]
    for action in ACTIONS:
        walk = Rollout.from_text(prompt, *[action] * 4)
        assert short.reward(walk) == long.reward(walk)


@pytest.mark.long
def test_every_turn_is_judged_as_if_it_were_the_last():
    tasks = walks(6, slip=0.0)
    prompt = tasks[-1].heldout_prompts()[0]
    said: list[str] = []
    while len(said) < 6:
        said.append(best(tasks[-1], prompt, said))
    right = {"prompt": prompt.id, "text": "\n".join(said)}
    assert find_wrong_turns(tasks, [right]) == [[False] * 6]
    cut = {"prompt": prompt.id, "text": "\n".join(said[:2])}
    assert find_wrong_turns(tasks, [cut]) == [[False] * 2 + [True] * 4], (
        "what was cut is wrong from there on"
    )
    both = find_wrong_turns(tasks, [right, cut])
    assert compute_wrong_shares(both) == [0.0, 0.0, 0.5, 0.5, 0.5, 0.5]


def test_turns_behind_the_first_wrong_one_by_hand():
    wrong = [[False, True, True, False, True], [False] * 5, [False, False, False, True, False]]
    assert compute_lost_share(wrong) == {"lost": 2 / 4}, "the conversation without one has none"
    assert compute_lost_share([[False, False], [False, True]]) == {}, "nothing follows the last"


def best(task, prompt, said) -> str:
    """Return the expert's preferred answer."""
    chances = task.expert(prompt, said)
    return max(chances, key=chances.__getitem__)


def test_a_task_without_turns_is_refused():
    for task in ({"type": "reverse"}, {"type": "walker", "turns": 5}):
        recipe = parse_recipe({**WALKER, "task": {"type": "walker"}}, "walks").model_copy(
            update={"task": load_plugin("tasks", task["type"]).Config.model_validate(task)}
        )
        with pytest.raises(
            RecipeError,
            match="conversations are halved; use a task with an even number of `turns`, such as",
        ):
            build_tasks(recipe)


@pytest.mark.long
def test_a_run_is_counted_by_its_last_evaluation(tmp_path: Path):
    recipe = parse_recipe(
        {
            **WALKER,
            "name": "count_wrong_turns",
            "task": {"type": "walker", "turns": 4, "train_size": 8, "heldout_size": 8},
            "rollout": {"max_new_tokens": 20},
            "evaluation": {"prompts": 8},
        },
        "count_wrong_turns",
    )
    folder = run(recipe, out=tmp_path).folder
    found = count_wrong_turns(folder)
    answers = read_json(folder / "after.json")["student"]["answers"]
    wrong = find_wrong_turns(build_tasks(recipe), answers)
    by_hand = compute_wrong_shares(wrong)
    assert found == compute_growth(by_hand) | compute_lost_share(wrong)
    assert by_hand[-1] == pytest.approx(
        1 - read_json(folder / "after.json")["student"]["accuracy"]["mean"]
    )
    assert 0 <= found["wrong_turns/half"] <= found["wrong_turns"] <= 4
