"""An environment behind a server: its messages are turns, rewards belong to turns, failures end one conversation."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from toy import make_model, rows, toy_run
from websockets.sync.server import ServerConnection, serve

from practicum.errors import DataError
from practicum.ports import TaskContext
from practicum.tasks.openenv import Config, OpenEnv, ServerError, build
from practicum.types import Rollout, Turn

LETTERS = "abcd"


class Counting:
    """Asks for a letter three times; right answers are worth a third. The protocol is OpenEnv 0.10."""

    def __init__(self) -> None:
        self.seed, self.turns = 0, 0
        self.log: list[dict[str, Any]] = []

    def answer(self, message: dict[str, Any]) -> Any:
        if message["type"] == "reset":
            self.seed, self.turns = message["data"]["seed"], 0
            return self.observe(None, done=False)
        letter = LETTERS[(self.seed + self.turns) % 4]
        self.turns += 1
        return self.observe((message["data"]["text"] == letter) / 3, done=self.turns == 3)

    def observe(self, reward: float | None, *, done: bool) -> Any:
        text = LETTERS[(self.seed + self.turns) % 4] * 2
        data = {"observation": {"text": text, "turns": self.turns}, "reward": reward, "done": done}
        return {"type": "observation", "data": data}


ASKED: list[dict[str, Any]] = []


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    yield from run_server(lambda: Counting().answer)


def run_server(open_environment: Callable[[], Callable[[dict[str, Any]], Any]]) -> Iterator[str]:
    """Run a server with an environment for each connection."""

    def handle(connection: ServerConnection) -> None:
        answer = open_environment()
        for text in connection:
            message = json.loads(text)
            ASKED.append(message)
            if message["type"] == "close":
                return
            if (reply := answer(message)) is not None:
                connection.send(json.dumps(reply))

    with serve(handle, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"


def task(url: str, **settings: Any) -> OpenEnv:
    config = Config.model_validate(
        {"url": url, "train_size": 3, "heldout_size": 2, "seconds": 5, **settings}
    )
    built = build(config, TaskContext(0, Path()))
    assert isinstance(built, OpenEnv) and built.opens_episodes
    return built


def test_first_observations_are_the_prompts(url: str) -> None:
    env = task(url, reset={"split": "train"})
    assert [prompt.messages[0].content for prompt in env.train_prompts()] == ["aa", "bb", "cc"]
    assert [prompt.id for prompt in env.heldout_prompts()] == ["openenv-3", "openenv-4"]
    resets = [message["data"] for message in ASKED if message["type"] == "reset"]
    assert resets[-1] == {"index": 4, "split": "train", "seed": 4}


def test_an_episode_goes_on_where_its_prompt_began(url: str) -> None:
    env = task(url)
    episodes = [env.open(prompt, 0) for prompt in env.train_prompts()[:2]]
    assert [episode.step("a").reward for episode in episodes] == [pytest.approx(1 / 3), 0.0]
    second = episodes[0].step("b")
    assert second.message is not None and second.message.content == "cc"
    last = episodes[0].step("x")
    assert last.message is None and last.reward == 0.0 and last.stop_reason == "stop"
    for episode in episodes:
        episode.close()


@pytest.mark.parametrize(("how", "expected"), [("last", 0.25), ("sum", 0.75)])
def test_a_conversation_has_one_reward(url: str, how: str, expected: float) -> None:
    env = task(url, reward=how, reward_range=[-1.0, 1.0])
    turns = (
        Turn("assistant", 1, "a", reward=1.0),
        Turn("user", 1, "bb"),
        Turn("assistant", 1, "b", reward=-0.5),
    )
    prompt = env.train_prompts()[0]
    rollout = Rollout.from_text(prompt, "a", "b")
    assert env.reward(rollout) == 0.0
    assert env.reward(replace(rollout, turns=turns)) == expected


def test_a_reward_out_of_range_ends_its_conversation_and_not_the_run(url: str) -> None:
    env = task(url, reward="sum", reward_range=[0.0, 0.5])
    prompt = env.train_prompts()[0]
    episode = env.open(prompt, 0)
    assert [episode.step(letter).reward for letter in "ab"] == [pytest.approx(1 / 3)] * 2
    with pytest.raises(ServerError, match=r"the reward is 1; set task\.reward_range"):
        episode.step("c")
    episode.close()
    # If it is cut off earlier, it gets the nearer end of the range.
    turns = (Turn("assistant", 1, "a", reward=0.4), Turn("assistant", 1, "b", reward=0.4))
    assert env.reward(replace(Rollout.from_text(prompt, "a", "b"), turns=turns)) == 1.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"reward_range": [1.0, 1.0]}, "1 is not below 1"), ({"url": "http://me:key@host"}, "url")],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Config.model_validate({"url": "http://localhost", **settings})


def test_a_run_converses_with_the_server(url: str, tmp_path: Path) -> None:
    make_model(tmp_path / "student", seed=1)
    make_model(tmp_path / "teacher", seed=2)
    changes = {
        "task": {
            "type": "openenv",
            "url": url,
            "reward": "sum",
            "train_size": 4,
            "heldout_size": 4,
        },
        "rollout.max_new_tokens": 24,
        "train.steps": 2,
    }
    folder = toy_run(tmp_path, tmp_path, changes).folder
    recorded = rows(folder / "rollouts.jsonl")
    talked = [row for row in recorded if len(row.get("turns", ())) > 1]
    assert talked and all(
        turn["text"] in ("aa", "bb", "cc", "dd") for row in talked for turn in row["turns"][1::2]
    )
    assert all(0 <= row["reward"] <= 1 for row in recorded)


BROKEN: dict[str, tuple[Any, str]] = {
    "an error": (
        {"type": "error", "data": {"message": "no such split", "code": "X"}},
        "reset was refused: no such split",
    ),
    "no observation": (
        {"type": "observation", "data": {"done": False}},
        "the answer to reset is no observation",
    ),
    "a list": ([1, 2], "the answer to reset is no observation"),
    "another field": (
        {
            "type": "observation",
            "data": {"observation": {"board": "x"}, "reward": None, "done": False},
        },
        "has no text 'text', it has board; set task.observation to one of them",
    ),
    "silence": (None, "TimeoutError"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_server_that_gives_no_prompt_is_named(name: str) -> None:
    reply, words = BROKEN[name]
    server = run_server(lambda: lambda message: reply)
    with pytest.raises(DataError) as caught:
        task(next(server), seconds=0.3)
    server.close()
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_no_server_and_a_changed_one_are_refused(url: str) -> None:
    with pytest.raises(DataError, match="gave no first observation"):
        task("http://127.0.0.1:9")
    env = task(url)
    other = env.train_prompts()[0].__class__("openenv-1", env.train_prompts()[0].messages)
    with pytest.raises(ServerError, match="a reset with seed 1 begins otherwise than before"):
        env.open(other, 0)
