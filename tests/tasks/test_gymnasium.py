"""Gymnasium as conversations: actions and their texts, replies that are no action, experts, frames, and odd environments."""

import random
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from pydantic import ValidationError
from toy import assert_same_run, forked, rows, toy_run

from practicum.errors import DataError
from practicum.pictures import IMAGE, is_picture, load_picture
from practicum.ports import TaskContext
from practicum.tasks.gymnasium import (
    BINS,
    NO_ACTION,
    ActionSpace,
    Config,
    Gymnasium,
    build,
    read_space,
)
from practicum.types import Rollout, Turn


class Line(gymnasium.Env[Any, Any]):
    """A point on a line; the reward is minus its distance to 0, and the episode ends at 0."""

    observation_space = spaces.Box(-2.0, 2.0, (1,), np.float64)
    action_space = spaces.Box(np.array([-1.0]), np.array([3.0]), (1,), np.float64)

    render_mode = "rgb_array"

    def __init__(self, actions: int | None = None) -> None:
        if actions is not None:
            self.action_space = ODD[actions]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1)
        return np.array([self.place]), {"instruction": "go"}

    def step(self, action: Any) -> Any:
        self.place += float(action[0])
        is_there = abs(self.place) < 0.1
        return np.array([self.place]), -abs(self.place), is_there, False, {}

    def render(self) -> Any:
        return np.full((4, 6, 3), round(50 * (self.place + 2)), np.uint8)


ODD = (spaces.Discrete(27), spaces.MultiBinary(2), spaces.Box(-np.inf, np.inf))
"""Spaces whose actions cannot be written."""


def act(env: Line) -> Any:
    """Return the way to 0."""
    return np.clip([-env.place], -1, 3)


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    gymnasium.register("Line-v0", f"{__name__}:Line")


def task(**settings: Any) -> Gymnasium:
    config = {"env": "Line-v0", "train_size": 4, "heldout_size": 2, "turns": 3, **settings}
    built = build(Config.model_validate(config), TaskContext(0, Path()))
    assert isinstance(built, Gymnasium)
    return built


def read(actions: ActionSpace, text: str) -> Any:
    """Return the action of a text that is one."""
    action = actions.read(text)
    assert action is not None
    return action


def test_each_bin_is_read_as_its_middle_and_written_as_itself() -> None:
    space = spaces.Box(np.array([-1.0, 0.0]), np.array([3.0, 8.0]), (2,), np.float64)
    actions = read_space(space, 4)
    assert actions.letters == BINS[:4] and actions.length == 2
    assert np.array_equal(read(actions, BINS[0] + BINS[3]), [-0.5, 7.0])
    draw = random.Random(0)
    for _ in range(100):
        text = "".join(draw.choices(actions.letters, k=2))
        assert actions.write(read(actions, text)) == text
        point = [draw.uniform(-1, 3), draw.uniform(0, 8)]
        near = read(actions, actions.write(point))
        assert abs(near[0] - point[0]) <= 0.5 and abs(near[1] - point[1]) <= 1
    assert actions.write([-7.0, 99.0]) == BINS[0] + BINS[3]


def test_discrete_actions_are_letters_from_the_first_number_on() -> None:
    actions = read_space(spaces.Discrete(3, start=5), 256)
    assert [actions.read(letter) for letter in "abc"] == [5, 6, 7]
    assert [actions.write(number) for number in (5, 6, 7)] == ["a", "b", "c"]


@pytest.mark.parametrize("text", ["", "d", "ab", "A", "<user>", "\ud800", "5"])
def test_other_texts_are_no_action(text: str) -> None:
    assert read_space(spaces.Discrete(3), 256).read(text) is None


def test_a_reply_without_an_action_changes_nothing_and_costs_a_turn() -> None:
    env = task()
    prompt = env.train_prompts()[0]
    assert prompt.messages[0].content.startswith("go\n")
    state = prompt.messages[0].content.removeprefix("go\n")
    episode = env.open(prompt, 7)
    first, second, last = (episode.step(text) for text in ("left", "", "?"))
    for observation in (first, second):
        assert observation.message is not None
        assert observation.message.content == NO_ACTION + state
        assert observation.warning == NO_ACTION and observation.reward == 0
    assert last.message is None
    episode.close()


def test_the_expert_solves_every_episode_and_its_labels_follow_the_student() -> None:
    env = task(expert=f"{__name__}:act", turns=6)
    assert env.has_expert and not task().has_expert
    for prompt in env.train_prompts():
        episode, turns = env.open(prompt, 0), list[str]()
        turns.append(env.actions.write([0.4]))
        observation = episode.step(turns[0])
        while observation.message is not None:
            (best,) = env.expert(prompt, turns)
            turns.append(best)
            observation = episode.step(best)
        assert abs(episode.env.unwrapped.place) < 0.1 and len(turns) < 6


def test_a_turn_that_began_otherwise_is_completed_by_the_expert() -> None:
    place = "practicum.methods.rpd.reach"
    env = task(env=f"{place}:practicum/Reach-v0", expert=f"{place}:act")
    prompt = env.train_prompts()[0]
    (best,) = env.expert(prompt, ())
    other = BINS[0] if best[0] != BINS[0] else BINS[1]
    assert env.redirect(prompt, (), other) == {other + best[1]: 1.0}
    assert env.redirect(prompt, (), "xyz") == {"xyz": 1.0}


def test_the_experts_slips_have_their_probability_and_follow_the_prompt() -> None:
    env = task(expert=f"{__name__}:act", slip=0.25)
    prompt = env.train_prompts()[0]
    (best,) = task(expert=f"{__name__}:act").expert(prompt, ())
    chances = env.expert(prompt, ())
    assert sum(chances.values()) == pytest.approx(1) and chances[best] >= 0.75
    assert chances == env.expert(prompt, ()) and len(chances) > 5


def test_frames_are_pictures_of_the_observation_or_rendered_ones() -> None:
    env = task(view="frame")
    prompt = env.train_prompts()[0]
    (message,) = prompt.messages
    assert message.content == f"go\n{IMAGE}"
    before = load_picture(message.images[0])[1]
    assert before.size == (6, 4)
    place = float(env.open(prompt, 0).env.unwrapped.place)
    assert before.getpixel((0, 0)) == (round(50 * (place + 2)),) * 3
    shown = env.open(prompt, 0).step(BINS[0]).message
    assert shown is not None and shown.content == IMAGE
    assert load_picture(shown.images[0])[1].tobytes() != before.tobytes()


@pytest.mark.parametrize(("how", "expected"), [("last", 0.6), ("sum", 0.2)])
def test_an_episode_has_one_reward(how: str, expected: float) -> None:
    env = task(reward=how, reward_range=[-5.0, 0.0])
    rollout = Rollout.from_text(env.train_prompts()[0], "a", "b")
    assert env.reward(rollout) == 0
    turns = (Turn("assistant", 1, "a", reward=-2.0), Turn("assistant", 1, "b", reward=-2.0))
    object.__setattr__(rollout, "turns", turns)
    assert env.reward(rollout) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"reward_range": [1.0, 1.0]}, "1 is not below 1"),
        ({"expert": "act"}, "'act' is no name; write package.module:function"),
        ({"bins": 257}, "bins"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Config.model_validate({"env": "Line-v0", **settings})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"env": "Lines-v9"}, "Lines-v9 cannot be used (NameNotFound"),
        ({"env": "no_module:Line-v0"}, "cannot be used (ModuleNotFoundError"),
        ({"expert": "no_module:act"}, "cannot be used (ValueError: "),
        ({"kwargs": {"actions": 0}}, "actions of Discrete(27) cannot be"),
        ({"kwargs": {"actions": 1}}, "a Discrete space of at most 26"),
        ({"kwargs": {"actions": 2}}, "a Box with bounds"),
        ({"view": "frame", "env": "CartPole-v1"}, "that renders; set kwargs: {render_mode"),
    ],
)
def test_environments_that_cannot_be_used_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError) as caught:
        task(**settings)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gymnasium", None)
    with pytest.raises(DataError, match=r"needs the package gymnasium; .*\[gymnasium\]"):
        task()


def test_a_run_acts_in_the_environment_and_learns_from_the_expert(tmp_path: Path) -> None:
    changes = {
        "student": {"model": {"hidden_size": 16, "layers": 1, "heads": 2}},
        "teacher": {"type": "expert"},
        "task": {
            "type": "gymnasium",
            "env": "Line-v0",
            "expert": f"{__name__}:act",
            "reward": "last",
            "reward_range": [-2.0, 0.0],
            "train_size": 4,
            "heldout_size": 2,
            "turns": 3,
        },
        "objective": {"signal": "action"},
        "rollout.max_new_tokens": 40,
        "train.steps": 2,
    }
    folder = toy_run(tmp_path, tmp_path, changes).folder
    recorded = rows(folder / "rollouts.jsonl")
    talked = [row for row in recorded if len(row.get("turns", ())) > 1]
    assert talked and all(0 <= row["reward"] <= 1 for row in recorded)


FRAMES = {
    "student": {
        "model": {"architecture": "llava", "hidden_size": 16, "layers": 1, "heads": 2, "seed": 1}
    },
    "teacher": {"type": "expert"},
    "task": {
        "type": "gymnasium",
        "env": "Line-v0",
        "view": "frame",
        "expert": f"{__name__}:act",
        "reward": "last",
        "reward_range": [-2.0, 0.0],
        "train_size": 4,
        "heldout_size": 2,
        "turns": 3,
    },
    "objective": {
        "losses": [
            {"signal": "action(-257)", "divergence": "forward_kl"},
            {"signal": "text", "divergence": "ce", "source": "environment", "coefficient": 0.1},
        ]
    },
    "rollout.max_new_tokens": 160,
    "train.steps": 4,
}


def test_a_student_sees_a_frame_in_each_turn_and_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    whole = toy_run(tmp_path, tmp_path / "whole", FRAMES).folder
    recorded = rows(whole / "rollouts.jsonl")
    answered = [row for row in recorded if IMAGE in "".join(t["text"] for t in row["turns"])]
    assert answered
    for row in answered:
        pictures = [token for token in row["tokens"] if is_picture(token)]
        assert len(pictures) == 16 * sum(turn["text"].count(IMAGE) for turn in row["turns"])
        masked = zip(row["tokens"], row["loss_mask"], strict=True)
        assert not any(is_learned for token, is_learned in masked if is_picture(token))
    part = tmp_path / "part"
    status = forked(lambda: toy_run(tmp_path, part, FRAMES), {"PRACTICUM_FAULT": "update:3"})
    assert status == 137
    assert_same_run(whole, toy_run(tmp_path, part, FRAMES, resume=True).folder)
