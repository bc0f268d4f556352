"""Users talk to the student while it learns: their turns become rollouts, and are never lost."""

import json
import socket
import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_user import Client, free_port, served
from toy import TASK, forked, rows, toy_recipe, toy_run, write_recipe

from practicum.cli.serve import is_recipe, serve_recipe
from practicum.core.randomness import seed_of
from practicum.costs import Ledger
from practicum.errors import (
    CapabilityError,
    DataError,
    RecipeError,
    ResourceError,
    VerifierError,
)
from practicum.ports import (
    SampledTurn,
    SamplingClient,
    TurnRequest,
)
from practicum.rollouts import RolloutBatch, Traffic, TrafficRow
from practicum.runs.assembly import assemble_run
from practicum.server.serving import ServerOptions
from practicum.training import asynchronous
from practicum.training.loop import update_student
from practicum.types import Message, Prompt, Sample, SamplingParams

PARAMS = SamplingParams(4, stop_ids=frozenset({0}))


class Words:
    """Renders letters as numbers: 1 opens a question, 2 opens an answer, 0 ends one."""

    longest_token = 9
    opens_thoughts = False

    def render(self, messages: Any) -> tuple[int, ...]:
        if any(message.content == "!" for message in messages):
            raise DataError("the template refuses '!'")
        return (*(code for message in messages for code in self.write(message)), 2)

    def write(self, message: Message) -> list[int]:
        mark = 2 if message.role == "assistant" else 1
        return [mark, *map(ord, message.content), 0]

    def render_reply(self, *messages: Message) -> tuple[int, ...]:
        return self.render(messages)

    def decode(self, tokens: Any) -> str:
        return "".join(chr(token) for token in tokens if token)


class Parrot(SamplingClient):
    """Samples the number of its call, and stores the request."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def sample(self, requests: Any, params: SamplingParams) -> list[Sample]:
        self.requests += [(request, params.max_new_tokens) for request in requests]
        samples = []
        for request in requests:
            tokens = [97 + request.seed % 26, 97 + request.seed % 23, 0][-params.max_new_tokens :]
            values = torch.tensor([-0.5, -0.25, -0.125][: len(tokens)])
            samples.append(Sample(torch.tensor(tokens), values, values * 2, "stop"))
        return samples


class Users:
    """Scripted users: each request is answered before the next one arrives."""

    patience = 0.0

    def __init__(self, *script: Any) -> None:
        self.script = deque(script)
        self.said: list[tuple[Message, ...]] = []
        self.asked: list[TurnRequest] = []

    def receive(self, seconds: float) -> list[TurnRequest]:
        if not self.script:
            return []
        entry = self.script.popleft()
        messages = entry(self.asked) if callable(entry) else entry
        self.asked.append(TurnRequest(messages=messages))
        return [self.asked[-1]]


def ask(*texts: str) -> tuple[Message, ...]:
    """Return a conversation with the user's turns at even positions."""
    return tuple(
        Message("assistant" if place % 2 else "user", text) for place, text in enumerate(texts)
    )


def go_on(number: int, text: str) -> Any:
    """Continue from the answer to an earlier request, as a client does."""

    def speak(asked: list[TurnRequest]) -> tuple[Message, ...]:
        turn = asked[number].answers.get_nowait()
        asked[number].answers.put(turn)
        return (*asked[number].messages, Message("assistant", f" {turn.text}"), *ask(text))

    return speak


def collect(traffic: Traffic, client: Any, step: int, count: int = 1) -> list[Any]:
    batch = RolloutBatch([Prompt("p", ask("?"))] * count, 1, 5, step)
    return traffic.collect(batch, Words(), client, PARAMS)


def make_traffic(users: Users | None, rows: Any = ()) -> tuple[Traffic, list[TrafficRow]]:
    written: list[TrafficRow] = []
    traffic = Traffic(
        append=lambda row: written.append(TrafficRow.model_validate(row)),
        longest_prompt=40,
        ledger=Ledger(),
        users=users,
    )
    return traffic.restore(rows), written


def test_what_the_user_says_next_is_the_note_of_the_turn_and_tokens_stay_as_sampled():
    users = Users(ask("ab"), ask("x"), go_on(0, "no"), go_on(2, "yes"))
    client = Parrot()
    traffic, written = make_traffic(users)
    (rollout,) = collect(traffic, client, 1)
    assert rollout.notes == {"next_state": "no"} and rollout.text == written[0].text
    assert rollout.prompt.messages == ask("ab") and rollout.policy_version == 0
    assert rollout.sampling_logprobs.tolist() == [-0.5, -0.25, -0.125]
    assert rollout.policy_logprobs.tolist() == [-1.0, -0.5, -0.25]
    # The second turn begins with the exact tokens of the first, although the client sent a blank.
    (second,) = collect(traffic, client, 2)
    begin = (*rollout.prompt_tokens, *rollout.tokens.tolist())
    assert second.prompt_tokens == (*begin, *Words().render(ask("no")))
    assert second.notes == {"next_state": "yes"} and second.policy_version == 0
    assert [row.finishes for row in written] == [None, None, 0, 2]
    assert [request.seed for request, _ in client.requests] == [
        seed_of(5, "served", number) for number in range(4)
    ]
    assert traffic.measure(1, 1) == {"turns_open": 2.0} == traffic.measure(2, 1)


def test_rows_alone_decide_what_a_step_learns_from():
    script = (ask("ab"), ask("x"), go_on(1, "a"), go_on(0, "b"), go_on(3, "c"), go_on(2, "d"))
    traffic, written = make_traffic(Users(*script))
    steps = [collect(traffic, Parrot(), step, 2) for step in (1, 2)]
    for known in range(len(written) + 1):
        # Simulate a run that was killed after some rows: the users send the remaining turns to it.
        users = Users(*(tuple(row.list_messages()) for row in written[known:]))
        resumed, more = make_traffic(users, written[:known])
        again = [collect(resumed, Parrot(), step, 2) for step in (1, 2)]
        assert [[r.text for r in step] for step in again] == [[r.text for r in s] for s in steps]
        assert [[r.notes for r in step] for step in again] == [[r.notes for r in s] for s in steps]
        assert [row.tokens for row in written[known:]] == [row.tokens for row in more]
    nobody, _ = make_traffic(None, written)
    assert [r.prompt.id for r in collect(nobody, None, 2, 2)] == [r.prompt.id for r in steps[1]]
    with pytest.raises(DataError, match="has 4 finished turns, and step 3 needs 6"):
        collect(nobody, None, 3, 2)


def test_a_turn_is_finished_once_and_an_edited_history_begins_anew():
    users = Users(
        ask("ab"), go_on(0, "no"), go_on(0, "well"), ask("ab", "edited", "x"), go_on(1, "y")
    )
    traffic, written = make_traffic(users)
    first, second = collect(traffic, Parrot(), 1, 2)
    assert [first.notes, second.notes] == [{"next_state": "no"}, {"next_state": "y"}]
    assert [row.finishes for row in written] == [None, 0, None, None, 1]
    assert tuple(written[3].prompt_tokens) == Words().render(ask("ab", "edited", "x"))


def test_what_cannot_be_answered_is_refused_and_the_run_goes_on():
    users = Users(ask("!"), ask("a" * 50), ask("ab"), go_on(2, "no"))
    traffic, written = make_traffic(users)
    collect(traffic, Parrot(), 1)
    reasons = [request.answers.get_nowait() for request in users.asked[:2]]
    assert reasons[0] == "the template refuses '!'"
    assert reasons[1] == "the conversation has 53 tokens, and 40 are read; begin a new one"
    assert len(written) == 2 and traffic.refused == 2


def test_silence_ends_the_run_and_says_what_is_there():
    traffic, _ = make_traffic(Users(ask("ab")))
    with pytest.raises(VerifierError, match=r"no user spoke for task.seconds, 0 s; 0 of 1 turns"):
        collect(traffic, Parrot(), 1)
    row = {"finishes": 3, "messages": [], "text": "", "stop_reason": "stop", "policy_version": 0}
    columns = ("prompt_tokens", "tokens", "sampling_logprobs", "policy_logprobs")
    bad = TrafficRow(**row, **{column: [] for column in columns})
    with pytest.raises(DataError, match="row 1 of the traffic finishes turn 3"):
        make_traffic(None, [bad])


# The endpoint, and a whole run


def test_a_run_learns_from_users_is_resumed_and_read_again_with_the_same_bytes(models, tmp_path):
    port = free_port()
    said: list[Any] = []
    failures: list[BaseException] = []

    def speak(*conversations: tuple[str, ...]) -> threading.Thread:
        def work() -> None:
            try:
                said.extend(Client(port).converse(*texts) for texts in conversations)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    user = speak(("ab", "cd", "<unk> ba"))
    toy_run(models, tmp_path, served(port, **{"train.steps": 1}))
    user.join()
    user = speak(("dd", "a", "b"))
    toy_run(models, tmp_path, served(port), resume=True, allow_changed=["train.steps"])
    user.join()
    assert not failures, failures
    traffic = rows(tmp_path / "toy" / "traffic.jsonl")
    assert [row["text"] for row in traffic] == [text for texts in said for text in texts]
    assert [row["policy_version"] for row in traffic] == [0, 0, 0, 1, 1, 1]
    replayed = served(8000, **{"rollout.source": f"served({tmp_path / 'toy' / 'traffic.jsonl'})"})
    toy_run(models, tmp_path / "again", replayed)
    for name in ("metrics.jsonl", "rollouts.jsonl", "traffic.jsonl"):
        again = (tmp_path / "again" / "toy" / name).read_bytes()
        assert again == (tmp_path / "toy" / name).read_bytes(), name
    learned = rows(tmp_path / "toy" / "rollouts.jsonl")
    assert [row["notes"]["next_state"] for row in learned] == ["cd", "<unk> ba", "a", "b"]
    metrics = rows(tmp_path / "toy" / "metrics.jsonl")
    assert [row["turns_open"] for row in metrics] == [1.0, 2.0]
    with pytest.raises(RecipeError, match="would learn from some turns twice or never"):
        toy_run(
            models,
            tmp_path / "again",
            {**replayed, "train.prompts_per_step": 1},
            resume=True,
            allow_changed=["train.prompts_per_step"],
        )


def test_users_are_answered_while_an_update_is_computed(models, tmp_path, monkeypatch):
    """With rollouts ahead a copy of the weights answers: the first update waits for an answer and ends after it."""
    port = free_port()
    answered: list[str] = []
    has_started, is_answered = threading.Event(), threading.Event()

    def update(step: int, *arguments: Any) -> Any:
        if step == 1:
            has_started.set()
            assert is_answered.wait(60), "no user is answered before the update ends"
        return update_student(step, *arguments)

    def speak() -> None:
        client = Client(port)
        answered.extend(client.converse("ab", "cd", "ba"))
        assert has_started.wait(60), "two turns are finished, so the first update begins"
        answered.extend(client.converse("dd"))
        is_answered.set()
        answered.extend(client.converse("ac", "b", "dd"))

    monkeypatch.setattr(asynchronous, "update_student", update)
    changes = {"rollout.max_staleness": 1, "train.checkpoint_every": None}
    user = threading.Thread(target=speak)
    user.start()
    toy_run(models, tmp_path, served(port, **changes))
    user.join(20)
    traffic = rows(tmp_path / "toy" / "traffic.jsonl")
    assert [row["text"] for row in traffic] == answered and len(answered) == 7
    learned = rows(tmp_path / "toy" / "rollouts.jsonl")
    assert [row["notes"]["next_state"] for row in learned] == ["cd", "ba", "b", "dd"]
    # Both steps are sampled by the initial policy, the second while the first is learned from.
    assert {row["policy_version"] for row in learned} == {0}
    replayed = served(8000, **changes)
    replayed["rollout.source"] = f"served({tmp_path / 'toy' / 'traffic.jsonl'})"
    toy_run(models, tmp_path / "again", replayed)
    for name in ("metrics.jsonl", "rollouts.jsonl", "traffic.jsonl"):
        again = (tmp_path / "again" / "toy" / name).read_bytes()
        assert again == (tmp_path / "toy" / name).read_bytes(), name
    # Killed with the second step in flight; its turns are not prompts of the task.
    killed = tmp_path / "killed"
    saved = {**replayed, "train.checkpoint_every": 1}
    assert forked(lambda: toy_run(models, killed, saved), {"PRACTICUM_FAULT": "update:2"}) == 137
    toy_run(models, killed, saved, resume=True)
    for name in ("metrics.jsonl", "rollouts.jsonl", "traffic.jsonl"):
        again = (killed / "toy" / name).read_bytes()
        assert again == (tmp_path / "toy" / name).read_bytes(), name


def test_the_endpoint_speaks_the_chat_protocol_and_refuses_what_is_none():
    task = make_task(token_file=None)
    client = Client(task.config.port)
    answers: list[tuple[int, str]] = []
    bodies: list[tuple[Any, dict[str, str]]] = [
        ({"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "max_tokens": 3}, {}),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "stream": True}, {}),
        ({"messages": [{"role": "user", "content": "hi"}]}, {"origin": "http://page.example"}),
        ({"messages": [{"role": "user", "content": "hi"}]}, {"host": "page.example"}),
        ({"messages": []}, {}),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, {}),
        ({"messages": [{"role": "user", "content": "hi"}], "n": 2}, {}),
        ({"messages": [{"role": "user", "content": "hi"}], "tools": [{}]}, {}),
        ({"messages": [{"role": "user", "content": "hi"}], "model": "other"}, {}),
        ([1], {}),
    ]  # fmt: skip
    thread = threading.Thread(
        target=lambda: answers.extend(client.post(body, **headers) for body, headers in bodies)
    )
    assert task.receive(0) == []
    thread.start()
    requests = [request for _ in range(2) for request in answer_next(task)]
    thread.join(20)
    task.close()
    assert [status for status, _ in answers] == [200, 200, 403, 403, 400, 400, 400, 400, 400, 400]
    assert requests[0].max_tokens == 3 and requests[0].messages == ask("hi")
    whole = json.loads(answers[0][1])
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "yo"}
    assert whole["choices"][0]["logprobs"]["content"] == [
        {"token": "token_id:3", "logprob": -0.5},
        {"token": "token_id:0", "logprob": -0.25},
    ]
    assert whole["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    *events, done = [line[6:] for line in answers[1][1].split("\n\n") if line]
    parts = [json.loads(event)["choices"][0] for event in events]
    assert done == "[DONE]" and parts[0]["delta"]["content"] == "yo"
    assert parts[1] == {"index": 0, "delta": {}, "finish_reason": "stop"}
    reasons = [json.loads(body)["error"]["message"] for _, body in answers[4:]]
    assert [reason.split(":")[0] for reason in reasons] == [
        "messages", "messages", "n", "tools", "model", "the body"
    ]  # fmt: skip


def make_task(**changes: Any) -> Any:
    from practicum.ports import TaskContext
    from practicum.tasks.served import Config, build

    config = Config.model_validate({"type": "served", "task": TASK, "port": free_port(), **changes})
    task = build(config, TaskContext(seed=0, base_dir=Path()))
    assert task.serves_users
    return task


def answer_next(task: Any) -> list[TurnRequest]:
    requests: list[TurnRequest] = []
    while not requests:
        requests = list(task.receive(0.2))
    for request in requests:
        request.reply(SampledTurn((1, 2), (3, 0), (-0.5, -0.25), "yo"))
    return requests


def test_users_find_the_student_at_an_ipv6_address(caplog):
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    task = make_task(host="::1")
    with caplog.at_level("INFO"):
        assert task.receive(0) == []
    place = f"http://[::1]:{task.config.port}/v1/chat/completions"
    assert place in caplog.text
    answers: list[Any] = []
    body = {"messages": [{"role": "user", "content": "hi"}]}
    client = Client(task.config.port, "::1")
    thread = threading.Thread(target=lambda: answers.append(client.post(body)))
    thread.start()
    answer_next(task)
    thread.join(20)
    assert answers[0][0] == 200
    with pytest.raises(ResourceError, match=rf"^\[::1\]:{task.config.port} cannot be served on"):
        make_task(host="::1", port=task.config.port).receive(0)
    task.close()


def test_only_holders_of_the_token_are_answered(tmp_path):
    token = "tml-" + "b2" * 12
    path = tmp_path / "token"
    path.write_text(token)
    path.chmod(0o600)
    task = make_task(token_file=str(path))
    assert task.receive(0) == []
    body = {"messages": [{"role": "user", "content": "hi"}]}
    client = Client(task.config.port)
    assert client.post(body)[0] == 401
    thread = threading.Thread(target=lambda: answer_next(task))
    thread.start()
    assert client.post(body, authorization=f"Bearer {token}")[0] == 200
    thread.join(20)
    task.close()
    with pytest.raises(RecipeError, match=r"task.host: 0\.0\.0\.0 can be reached"):
        make_task(host="0.0.0.0")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rollout.n": 2}, "rollout.n is 2, and a user gets one answer; set n: 1"),
        ({"rollout.source": "student"}, "does not listen to users"),
        ({"task": TASK}, "served needs users, and this task has none"),
        ({"task": {"type": "served", "task": {"type": "walker"}}}, "replies to its answers itself"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_served(
    models, tmp_path, changes, error
):
    with pytest.raises((RecipeError, CapabilityError, DataError), match=error):
        assemble_run(toy_recipe(models, served(**changes)), tmp_path)


def test_a_recipe_is_served_at_an_address_and_goes_on_there(models, tmp_path):
    port = free_port()
    recipe = write_recipe(
        models, tmp_path / "chat.yaml", {**served(1), "name": "chat", "train.steps": 1}
    )
    client = Client(port)
    said: list[str] = []
    user = threading.Thread(target=lambda: said.extend(client.converse("ab", "cd", "ba")))
    user.start()
    options = ServerOptions(
        [str(recipe), "train.prompts_per_step=2"], port=port, out=tmp_path / "out"
    )
    assert is_recipe(options.models) and not is_recipe(["student"])
    serve_recipe(options)
    user.join(20)
    traffic = rows(tmp_path / "out" / "chat" / "traffic.jsonl")
    assert [row["text"] for row in traffic] == said and len(said) == 3
    # Nothing remains to do, so the run waits for no user.
    serve_recipe(options)
