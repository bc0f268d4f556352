"""A harness leads a conversation: it asks an endpoint for tokens, and the live student samples them and trains on exactly them.

The requests equal the requests of verifiers 0.4's training client (`verifiers_record.json`, recorded by `make peers`), except
that the token ids belong to this student.
"""

import http.client
import json
import threading
import urllib.error
import urllib.request
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from toy import make_model, rows, toy_run

from practicum.agents.harnesses import AgentEnd, AgentTask
from practicum.agents.token_engine import TokenEngine
from practicum.core.plugins import load_plugin
from practicum.errors import DataError
from practicum.ports import (
    SampledTurn,
    TaskContext,
)
from practicum.tasks import verifiers
from practicum.tasks.verifiers import Config, HarnessError, Verifiers
from practicum.types import Message, Prompt, Rollout, Turn

RECORD = json.loads((Path(__file__).parent / "verifiers_record.json").read_text())
PROMPTS = ("ab", "cd", "ba", "dd")
REPLY = "dc"


def ask(base_url: str, token_ids: list[int]) -> list[int]:
    """Send the requests of the training client: look the model up, then ask for the tokens after a text."""
    root = base_url.removesuffix("/v1")
    with urllib.request.urlopen(f"{base_url}/models", timeout=20) as answer:
        assert json.load(answer)["data"][0]["id"] == RECORD["model"]
    body = json.dumps({**RECORD, "token_ids": token_ids}).encode()
    request = urllib.request.Request(
        f"{root}/inference/v1/generate", body, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            (choice,) = json.load(answer)["choices"]
    except urllib.error.HTTPError as error:
        with error:
            raise OSError(error.read().decode()) from None
    assert [part["token"] for part in choice["logprobs"]["content"]] == [
        f"token_id:{token}" for token in choice["token_ids"]
    ]
    assert choice["finish_reason"] == "stop"
    return choice["token_ids"]


class Runner:
    """Harnesses of a few lines, in threads; `misbehave` changes what they send."""

    def __init__(self, render: Any = None, reward: float = 0.5, misbehave: str = "") -> None:
        self.render, self.reward, self.misbehave = render, reward, misbehave
        self.lock = threading.Lock()
        self.said: list[list[int]] = []

    def list_tasks(self, count: int) -> list[AgentTask]:
        return [
            AgentTask(f"t{number}", (Message("user", prompt),))
            for number, prompt in enumerate(PROMPTS[:count])
        ]

    def start(self, index: int, base_url: str, tokenizer: Path) -> "Future[AgentEnd]":
        run: Future[AgentEnd] = Future()
        run.set_running_or_notify_cancel()

        def work() -> None:
            try:
                run.set_result(self.work(index, base_url, tokenizer))
            except BaseException as error:
                run.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return run

    def work(self, index: int, base_url: str, tokenizer: Path) -> AgentEnd:
        if self.misbehave == "idle":
            threading.Event().wait(5)
        if self.misbehave == "dies":
            raise OSError("the sandbox is gone")
        if self.render is None:
            from transformers import AutoTokenizer

            from practicum.text import Renderer

            assert (tokenizer / "tokenizer.json").is_file()
            with self.lock:
                self.render = Renderer(AutoTokenizer.from_pretrained(tokenizer))
        text = list(self.render.render([Message("user", PROMPTS[index])]))
        for _ in range(2):
            text += ask(base_url, text)
            text += self.render.render_reply(Message("user", REPLY))
            if self.misbehave == "branches":
                text = text[:3] + text[4:]
        with self.lock:
            self.said.append(text)
        return AgentEnd(self.reward, "it broke" if self.misbehave == "breaks" else "")


def make_task(runner: Runner, **settings: Any) -> Verifiers:
    config = Config.model_validate(
        {"taskset": "echo", "train_size": 3, "heldout_size": 1, "seconds": 3, **settings}
    )
    return Verifiers(config, runner)


class Words:
    """Renders a message as numbers."""

    def render(self, messages: Any) -> list[int]:
        return [100, *map(ord, messages[0].content)]

    def render_reply(self, message: Message) -> list[int]:
        return [101, *map(ord, message.content)]


def open_episode(runner: Runner, **settings: Any) -> Any:
    task = make_task(runner, **settings)
    return task.open_tokens(task.train_prompts()[0], 7, lambda folder: None)


def turn(before: list[int], *tokens: int) -> SampledTurn:
    return SampledTurn(tuple(before), tokens, tuple(-0.5 for _ in tokens))


def test_tokens_go_both_ways_as_they_are() -> None:
    runner = Runner(Words())
    episode = open_episode(runner)
    prompt = [100, ord("a"), ord("b")]
    first = episode.answer_tokens(turn(prompt, 7, 8, 2))
    assert first.tokens == (101, ord("d"), ord("c"))
    text = [*prompt, 7, 8, 2, *first.tokens]
    second = episode.answer_tokens(turn(text, 9, 2))
    assert (second.tokens, second.messages, second.reward) == ((), (), 0.5)
    assert runner.said == [[*text, 9, 2, 101, ord("d"), ord("c")]]
    episode.close()


@pytest.mark.parametrize(
    ("misbehave", "before", "error"),
    [
        ("branches", [100, 97, 98], r"its token 3 of 8 differs from the conversation's 6"),
        ("", [100, 97, 99], r"its token 2 of 3 differs"),
        ("dies", [100, 97, 98], "OSError: the sandbox is gone"),
    ],
)
def test_a_harness_that_goes_its_own_way_ends_its_conversation(
    misbehave: str, before: list[int], error: str
) -> None:
    episode = open_episode(Runner(Words(), misbehave=misbehave))
    with pytest.raises(HarnessError, match=error):
        episode.answer_tokens(turn(before, 7, 8, 2))
    episode.close()


def test_what_a_harness_ends_with_is_checked() -> None:
    for runner, error in (
        (Runner(Words(), reward=3), "the reward is 3; set task.reward_range"),
        (Runner(Words(), misbehave="breaks"), "it broke"),
    ):
        episode = open_episode(runner)
        first = episode.answer_tokens(turn([100, 97, 98], 2))
        with pytest.raises(HarnessError, match=error):
            episode.answer_tokens(turn([100, 97, 98, 2, *first.tokens], 2))
    with pytest.raises(TimeoutError, match=r"task\.seconds, 0\.2 s"):
        open_episode(Runner(misbehave="idle"), seconds=0.2).answer_tokens(turn([1], 2))


def test_no_other_program_speaks_in_a_conversation() -> None:
    engine = TokenEngine()
    line = engine.open_line()
    for url, body, status in (
        (line.base_url.replace("/v1", "x/inference/v1/generate"), b'{"token_ids": [1]}', 404),
        (line.base_url.replace("/v1", "/inference/v1/generate"), b'{"token_ids": [-1]}', 400),
    ):
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(urllib.request.Request(url, body), timeout=10)
        assert raised.value.code == status
        raised.value.close()
    for length in ("many", "-1", str(1 << 40)):
        connection = http.client.HTTPConnection(line.base_url.split("/")[2], timeout=10)
        connection.putrequest("POST", "/x/inference/v1/generate")
        connection.putheader("content-length", length)
        connection.endheaders()
        assert connection.getresponse().status == 413
        connection.close()
    engine.close_line(line)


def test_rewards_are_the_taskset_s() -> None:
    task = make_task(Runner(), reward_range=[-1, 1])
    rollout = Rollout.from_text(task.train_prompts()[0], "a")
    spoken = (Turn("assistant", 1, "a"), Turn("assistant", 1, "b", reward=0.25))
    from dataclasses import replace

    assert task.reward(replace(rollout, turns=spoken)) == 0.25
    assert task.reward(replace(rollout, stop_reason="length")) == -1
    assert task.reward(replace(rollout, stop_reason="error")) is None


def test_tasks_become_prompts() -> None:
    task = make_task(Runner())
    assert task.is_harnessed
    assert [prompt.id for prompt in task.train_prompts()] == ["t0", "t1", "t2"]
    assert task.heldout_prompts() == [Prompt("t3", (Message("user", "dd"),))]
    with pytest.raises(DataError, match="has 4 tasks, and 4 are held out"):
        make_task(Runner(), heldout_size=4, train_size=1)
    with pytest.raises(ValidationError, match="reward_range"):
        make_task(Runner(), reward_range=[1, 1])


def test_without_the_package_a_recipe_says_how_to_get_it() -> None:
    config = Config(taskset="echo")
    with pytest.raises(DataError, match=r"pip install -e '\.\[verifiers\]'"):
        load_plugin("tasks", "verifiers").build(config, TaskContext(0, Path()))


def test_the_live_student_speaks_through_a_harness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check two steps: the journal has the exact tokens of harness and student, from newer weights in the second step."""
    runner = Runner()

    class Opened(Runner):
        def executes_code(self) -> bool:
            return False

    runner = Opened()
    monkeypatch.setattr(verifiers, "open_runner", lambda *settings: runner)
    make_model(tmp_path / "student", seed=1)
    make_model(tmp_path / "teacher", seed=2)
    changes = {
        "task": {"type": "verifiers", "taskset": "echo", "train_size": 3, "heldout_size": 1},
        "rollout.n": 2,
        "rollout.max_new_tokens": 40,
        "rollout.episodes": {"at_once": 8, "seconds": 60},
        "train.steps": 2,
        "train.prompts_per_step": 3,
        "evaluation.prompts": 1,
        "evaluation.teacher": False,
    }
    result = toy_run(tmp_path, tmp_path / "run", changes)
    learned = rows(result.folder / "rollouts.jsonl")
    ended = [row for row in learned if row["stop_reason"] == "stop"]
    assert ended and {row["reward"] for row in ended} == {0.5}
    for row in ended:
        assert row["prompt_tokens"] + row["tokens"] in [
            text[: len(row["prompt_tokens"]) + len(row["tokens"])] for text in runner.said
        ]
        assert [part["role"] for part in row["turns"]] == ["assistant", "user", "assistant"]
        assert REPLY in row["turns"][1]["text"]
        # The harness's tokens are not trained on.
        assert row["loss_mask"].count(False) == row["turns"][1]["tokens"]
