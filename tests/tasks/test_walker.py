"""The walk: a turn by hand, the knowledge of expert and environment, and invalid settings."""

import random
from pathlib import Path

import pytest

from practicum.ports import TaskContext
from practicum.tasks.walker import ACTIONS, POSITIONS, Config, Walk, Walker, WalkerTurn, build
from practicum.types import Rollout

CONTEXT = TaskContext(seed=0, base_dir=Path())


def walker(**settings: object) -> Walker:
    task = build(Config.model_validate(settings), CONTEXT)
    assert isinstance(task, Walker)
    return task


def test_each_turn_that_ends_at_0_is_rewarded_if_the_task_says_so():
    task = walker(turns=3, noise=0, turn_rewards=True, train_size=4)
    prompt = task.train_prompts()[0]
    episode, plain = task.open(prompt, 0), walker(turns=3, noise=0, train_size=4).open(prompt, 0)
    rewards, said = [], []
    for _ in range(3):
        (best,) = [a for a, p in task.expert(prompt, said).items() if p > 0.5]
        said.append(("z" if best != "z" else "v") if len(said) == 1 else best)
        rewards.append(episode.step(said[-1]).reward)
        assert plain.step(said[-1]).reward is None
    assert rewards[:2] == [1 / 3, 0] and rewards[2] in (0, 1 / 3)


def test_a_walk_by_hand():
    walk = Walk(2, (WalkerTurn(3, 4, 3), WalkerTurn(0, 9, 8), WalkerTurn(7, 1, 7)))
    assert [turn.push for turn in walk.turns] == [-2, -2, 2], (
        "(12 + 3) mod 5 - 2, 0 mod 5 - 2, 14 mod 5 - 2"
    )
    assert walk.observe([]) == "I34", "the third position from the left of 0"
    assert walk.choose_best_action([]) == "x" and walk.find_position(["x"]) == 0
    assert walk.observe(["x"]) == "G89", "the second cue acts as 0 and is shown as 8"
    assert walk.choose_best_action(["x"]) == "z" and walk.find_position(["x", "z"]) == 0
    assert walk.choose_best_action(["x", "v"]) == "z", (
        "from -4 a push of 2 leads to -2, and 2 brings it back"
    )
    assert walk.find_position(["v", "v", "v"]) == -6, "2 - 2 - 2, then - 2 - 2, then + 2 - 2"


def test_positions_end_at_six_and_what_is_no_action_is_nothing():
    walk = Walk(5, (WalkerTurn(2, 1, 2), WalkerTurn(2, 1, 2)))
    assert [turn.push for turn in walk.turns] == [2, 2]
    assert (
        walk.find_position(["z"]) == 6
        and walk.find_position(["", "zz"]) == 6
        and walk.find_position([" v ", "vw"]) == 6
    )
    assert walk.choose_best_action([]) == "v" and walk.find_position(["v", "v"]) == 5


def test_it_is_an_environment_with_an_expert():
    task = walker()
    assert task.opens_episodes and task.has_expert and task.letters
    prompt = task.train_prompts()[0]
    said: list[str] = []
    first, second = task.open(prompt, 0), task.open(prompt, 1)
    shown = [prompt.messages[-1].content]
    while True:
        best = max(task.expert(prompt, said).items(), key=lambda item: item[1])
        assert best[1] == 0.96
        said.append(best[0])
        reply = first.step(best[0]).message
        assert reply == second.step(best[0]).message
        if reply is None:
            break
        assert reply.role == "user" and len(reply.content) == 3
        shown.append(reply.content)
    assert len(said) == len(shown) == 16
    assert set("".join([*shown, *said])) <= set(task.letters)
    assert task.reward(Rollout.from_text(prompt, *said)) == 1.0
    assert task.reward(Rollout.from_text(prompt, *said[:-1])) == 0.0, "a walk that was cut off"


def test_an_expert_that_slips_is_right_about_as_often_as_reported():
    task, draw = walker(train_size=1000), random.Random(0)
    right = 0.0
    for prompt in task.train_prompts():
        said: list[str] = []
        for _ in range(16):
            candidates = task.expert(prompt, said)
            said.append(draw.choices(list(candidates), list(candidates.values()))[0])
        right += task.reward(Rollout.from_text(prompt, *said)) or 0.0
    assert abs(right / 1000 - 0.924) < 0.03


def test_noise_changes_what_is_seen_and_nothing_else():
    clear, noisy = walker(noise=0.0), walker(noise=1.0)
    for one, other in zip(clear.heldout_prompts(), noisy.heldout_prompts(), strict=True):
        assert clear.expert(one, ()) == noisy.expert(other, ())
    cues = [prompt.messages[-1].content[1] for prompt in clear.train_prompts()]
    others = [prompt.messages[-1].content[1] for prompt in noisy.train_prompts()]
    wrong = sum(one != other for one, other in zip(cues, others, strict=True)) / len(cues)
    assert 0.87 < wrong < 0.93, "a random digit is the right one in a tenth of all cases"


def test_walks_start_at_zero_unless_they_are_spread():
    assert {prompt.messages[0].content[0] for prompt in walker().train_prompts()} == {"G"}
    assert {prompt.messages[0].content[0] for prompt in walker(spread=2).train_prompts()} == set(
        "EFGHI"
    )


@pytest.mark.long
def test_the_walks_depend_on_their_seed_alone():
    ids = [prompt.messages for prompt in walker().heldout_prompts()]
    assert ids == [prompt.messages for prompt in walker(train_size=1).heldout_prompts()]
    assert ids == [prompt.messages for prompt in walker(seed=0).heldout_prompts()]
    assert ids != [prompt.messages for prompt in walker(seed=1).heldout_prompts()]


def test_a_certain_expert_gives_the_others_nothing():
    task = walker(slip=0.0)
    assert sorted(task.expert(task.train_prompts()[0], ()).values()) == [0.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("settings", [{"slip": 1.0}, {"noise": 1.5}, {"turns": 0}, {"steps": 3}])
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Config.model_validate(settings)


def test_one_character_each():
    assert len(POSITIONS) == 13 and len(ACTIONS) == 5 and not set(POSITIONS) & set(ACTIONS)


def test_other_walks_to_train_on_leave_those_held_out() -> None:
    one, other = walker(train_size=8), walker(train_size=8, train_seed=1)
    assert one.heldout_prompts() == other.heldout_prompts()
    assert one.train_prompts() != other.train_prompts()
