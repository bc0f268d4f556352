"""The real OpenEnv: its server holds the environments that a student converses with. `make peers` runs this file in an
environment that has openenv.
"""

import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import recording
from toy import make_model, rows, toy_run

pytest.importorskip("openenv", reason="run by `make peers`, where openenv is installed")

pytestmark = pytest.mark.slow

LETTERS = "abcd"
RESULTS: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def record() -> Iterator[None]:
    yield from recording.record("openenv", version("openenv"), RESULTS)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Run an OpenEnv server with an environment that asks for a letter three times."""
    import uvicorn
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Say(Action):
        text: str

    class Show(Observation):
        text: str = ""

    class Letters(Environment[Say, Show, State]):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.seed, self.turns = 0, 0

        def _show(self, reward: float | None) -> Show:
            return Show(text=self.letter * 2, reward=reward, done=self.turns == 3)

        @property
        def letter(self) -> str:
            return LETTERS[(self.seed + self.turns) % 4]

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Show:
            self.seed, self.turns = seed or 0, 0
            return self._show(None)

        def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Show:
            reward = (action.text == self.letter) / 3
            self.turns += 1
            return self._show(reward)

        @property
        def state(self) -> State:
            return State(episode_id="e", step_count=self.turns)

    app = create_app(Letters, Say, Show, env_name="letters", max_concurrent_envs=64)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True


def test_a_student_converses_with_a_server_of_openenv(url: str, tmp_path: Path) -> None:
    make_model(tmp_path / "student", seed=1, pretrain=60)
    make_model(tmp_path / "teacher", seed=2)
    task = {"type": "openenv", "url": url, "reward": "sum", "train_size": 8, "heldout_size": 4}
    changes = {"task": task, "rollout.max_new_tokens": 32, "train.steps": 2}
    recorded = rows(toy_run(tmp_path, tmp_path, changes).folder / "rollouts.jsonl")
    talked = [row for row in recorded if len(row.get("turns", ())) > 1]
    assert talked and not any(row["stop_reason"] in ("error", "timeout") for row in recorded)
    for row in talked:
        said = [turn["text"] for turn in row["turns"]]
        seed = int(row["prompt"].removeprefix("openenv-"))
        letters = [LETTERS[(seed + turn) % 4] for turn in range(4)]
        assert said[1::2] == [letter * 2 for letter in letters[1 : 1 + len(said[1::2])]]
        rewards = [
            turn.get("reward") for turn in row["turns"][::2] if turn.get("reward") is not None
        ]
        right = [(text == letter) / 3 for text, letter in zip(said[::2], letters, strict=False)]
        assert rewards == pytest.approx(right[: len(rewards)])
        assert row["reward"] == pytest.approx(sum(rewards))
    RESULTS["conversations"] = {
        "held": len(recorded),
        "with more than one turn": len(talked),
        "turns": sum(len(row["turns"][::2]) for row in talked),
    }
