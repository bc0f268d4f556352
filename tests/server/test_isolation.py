"""No request changes the answer to another client's request, and no request exceeds its own limits."""

import contextlib
import json
import os
import random
from typing import Any

import pytest

from practicum.errors import CheckpointError
from practicum.server import executor, service
from practicum.server.store import EXPIRY, Store
from practicum.server.wire import load_messages

from .client import V1, VerifierFailed, floats, serving

PLAIN: tuple[dict[str, Any], ...] = (
    {"tokens": [3, 7, 4], "seed": 1},
    {"tokens": [1, 4, 2, 3, 5, 2], "seed": 2, "max_tokens": 1, "prompt_logprobs": True},
    {"tokens": [5, 2], "seed": 3, "num": 2, "temperature": 0.7, "top_p": 0.9},
    {"tokens": [2, 2, 2, 6], "seed": 4, "stop": [], "topk_sample_logprobs": 2},
)
"""Requests of well-behaved clients; the first is the shortest, and most other requests wait in the same lane."""

UNBOUNDED = (
    {"temperature": 1e-40},
    {"temperature": 1e-310},
    {"temperature": 5e-324},
    {"temperature": 1e30},
    {"top_p": 5e-324},
    {"top_p": 1e-7},
    {"stop": ["x"] * 2000},
    {"stop": "x" * 5000},
)


@pytest.fixture(scope="module")
def client(models, tmp_path_factory):
    with serving(models, tmp_path_factory.mktemp("served")) as client:
        yield client


def read_answer(client, reply) -> tuple[list[list[int]], list[float]]:
    """Return the tokens and all log-probabilities of an answer."""
    message = load_messages().SampleResponse()
    message.ParseFromString(client.wait(reply))
    values = [*floats(message.prompt_logprobs)[1:]]
    for sequence in message.sequences:
        values += [*floats(sequence.logprobs), *floats(sequence.topk_sampled_logprobs.logprobs)]
    tokens = [list(memoryview(sequence.tokens).cast("i")) for sequence in message.sequences]
    return tokens, [float(value) for value in values]


def send(client, body: dict[str, Any]) -> dict[str, Any]:
    """Send a sampling request, which may be refused immediately."""
    try:
        return client.ask(base_model="teacher", **body)
    except AssertionError as refusal:
        return {"error": str(refusal)}


def draw_request(draw: random.Random) -> dict[str, Any]:
    """Return a request that a hostile or careless client may send, most of them odd."""
    return {
        "tokens": draw.choice(([3, 7, 4], [], [10**6], [-1], [1] * 40, [0], [2**40])),
        "seed": draw.choice((0, -1, 2**70)),
        "max_tokens": draw.choice((1, 4, 4, 2**30, None)),
        "num": draw.choice((1, 3, 1024)),
        "temperature": draw.choice((0.0, 1.0, 1e-4, 1e4)),
        "top_p": draw.choice((1.0, 1e-6, 0.5)),
        "top_k": draw.choice((-1, 0, 1, 2**31)),
        "stop": draw.choice((None, [], [2**60, -5], "a", [""], ["\u20ac"])),
        "topk_sample_logprobs": draw.choice((0, 1, 1024)),
        "topk_prompt_logprobs": draw.choice((0, 1024)),
        "prompt_alt_tokens_k": draw.choice((0, 1024)),
        "prompt_logprobs": draw.choice((None, True)),
        "prompt_logprobs_last_n": draw.choice((None, None, 50)),
        "target_prompt_logprobs": draw.choice(
            (
                None,
                {"data": [1, 2], "dtype": "int64", "shape": [2, 1]},
                {"data": [], "dtype": "int64", "shape": [2, 1], "sparse_crow_indices": []},
                {"data": [2**62] * 2, "dtype": "int64", "shape": [2, 1]},
            )
        ),
    }


@pytest.mark.parametrize("seed", range(4))
def test_no_request_changes_the_answer_to_another(client, seed):
    draw = random.Random(seed)
    alone = [read_answer(client, client.ask(base_model="teacher", **body)) for body in PLAIN]
    before = len(client.said)
    for _ in range(6):
        with client.held():
            mine = [client.ask(base_model="teacher", **body) for body in PLAIN]
            odd = [send(client, draw_request(draw)) for _ in range(3)]
            mine += [client.ask(base_model="teacher", **body) for body in PLAIN]
        for reply, (tokens, logprobs) in zip(mine, alone * 2, strict=True):
            found = read_answer(client, reply)
            assert found[0] == tokens
            assert found[1] == pytest.approx(logprobs, abs=1e-5)
        for reply in odd:
            with contextlib.suppress(VerifierFailed):
                assert "error" in reply or client.wait(reply)
    assert not any(line.startswith("failed:") for line in client.said[before:])


@pytest.mark.parametrize("params", UNBOUNDED, ids=lambda params: str(params)[:24])
def test_settings_without_a_number_in_float32_are_refused(client, params):
    body = {
        "prompt": {"chunks": [{"tokens": [3, 7, 4]}]},
        "sampling_params": {"max_tokens": 4, **params},
    }
    reply = client.post("asample", 400, base_model="teacher", **body)
    assert next(iter(params)) in reply["error"]


def test_more_candidates_than_tokens_are_all_tokens(client):
    found = client.sample([3, 7, 4], base_model="teacher", stop=[], topk_sample_logprobs=1024)
    table = found.sequences[0].topk_sampled_logprobs
    assert table.k < 1024 and table.length == 4


@pytest.mark.parametrize("step", ["_score", "_draw", "_score_drawn"])
def test_of_a_failed_batch_the_request_at_fault_fails_by_itself(client, monkeypatch, step):
    work = getattr(executor, step)

    def fail(model, overlay, requests):
        if any(request.item.tokens == (7, 7, 7) for request in requests):
            raise RuntimeError("out of range")
        return work(model, overlay, requests)

    alone = [read_answer(client, client.ask(base_model="teacher", **body)) for body in PLAIN]
    monkeypatch.setattr(executor, step, fail)
    with client.held():
        first = [client.ask(base_model="teacher", **body) for body in PLAIN]
        culprit = client.ask([7, 7, 7], base_model="teacher")
        last = [client.ask(base_model="teacher", **body) for body in PLAIN]
    assert [read_answer(client, reply)[0] for reply in (*first, *last)] == [
        tokens for tokens, _ in alone * 2
    ]
    with pytest.raises(VerifierFailed, match="the server failed"):
        client.wait(culprit)
    assert sum(line.startswith("failed: RuntimeError") for line in client.said) > 0


def test_a_failed_request_sent_again_is_computed_again(client, monkeypatch):
    sampler = client.sampler(77, base_model="teacher")
    body = {"sampling_session_id": sampler, "seq_id": 5}

    def fail(model, overlay, requests):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(executor, "_draw", fail)
        reply = client.ask([3, 7, 4], **body)
        for _ in range(2):
            with pytest.raises(VerifierFailed):
                client.wait(reply)
    assert client.ask([3, 7, 4], **body)["request_id"] == reply["request_id"]
    assert read_answer(client, reply)[0]


def test_the_cells_of_an_answer_are_bounded(client, monkeypatch):
    monkeypatch.setattr(executor, "MAX_CELLS", 60)
    asked = {"base_model": "teacher", "stop": [], "num": 4, "max_tokens": 5}
    assert client.sample([3, 7, 4], topk_sample_logprobs=3, **asked)
    with pytest.raises(VerifierFailed, match="64 cells") as failure:
        client.sample([3, 7, 4, 4], topk_prompt_logprobs=1, topk_sample_logprobs=3, **asked)
    assert "ask for fewer" in str(failure.value)
    with pytest.raises(VerifierFailed, match="80 cells"):
        client.sample([3, 7, 4], topk_sample_logprobs=4, **asked)


# Names


@pytest.mark.parametrize("run", ["::", "..", ".:", "a:train:1:", "a" * 5000, "a:train:" + "1" * 40])
def test_no_name_of_a_run_reaches_outside_the_store(tmp_path, run):
    store = Store(tmp_path / "out")
    outside = tmp_path / "weights" / "v"
    (outside / "checkpoints" / "step-1").mkdir(parents=True)
    (outside / "checkpoints" / "step-1" / "f").write_text("x")
    (outside / EXPIRY).write_text(json.dumps({"at": "2020-01-01T00:00:00+00:00"}))
    os.mkdir(tmp_path / "out")
    with pytest.raises(CheckpointError, match="no training run"):
        store.list_checkpoints(run)
    assert outside.is_dir()


@pytest.mark.parametrize("run", ["::", "%2e%2e", ".:", "a" * 5000])
def test_checkpoints_of_a_malformed_run_are_not_found(client, run):
    response = client.http.get(f"{V1}/training_runs/{run}/checkpoints")
    assert response.status_code == 404
    assert len(response.text) < 400


def test_the_number_of_a_model_fits_into_the_name_of_its_run(client):
    body = {"session_id": client.session, "base_model": "student", "lora_config": {"rank": 4}}
    reply = client.post("create_model", 400, model_seq_id=10**9, **body)
    assert "model_seq_id" in reply["error"]


def test_the_sampling_sessions_of_a_session_are_bounded(client, monkeypatch):
    opened = [client.sampler(number, base_model="teacher") for number in (400, 401)]
    count = len(client.http.get(f"{V1}/sessions/{client.session}").json()["sampler_ids"])
    monkeypatch.setattr(service, "MAX_SAMPLERS", count)
    body = {"session_id": client.session, "base_model": "teacher"}
    error = client.post("create_sampling_session", 400, **body, sampling_session_seq_id=402)
    assert error["error"] == (
        f"this session has opened {count} sampling sessions, the most that are kept; create a new "
        "session"
    )
    # An open request is not a new one, and is still answered.
    assert client.sampler(401, base_model="teacher") == opened[1]
    assert client.sample([1], sampling_session_id=opened[0]).sequences
    other = client.post("create_session", tags=[], user_metadata=None, sdk_version="0")
    body["session_id"] = other["session_id"]
    client.post("create_sampling_session", **body, sampling_session_seq_id=1)


@pytest.mark.parametrize(
    "fields",
    [
        {"display_name": "x" * 20_000},
        {"tags": ["x" * 100] * 200},
        {"project_id": "x" * 20_000},
        {"user_metadata": {"a": "x" * 9_000}, "tags": ["x" * 9_000]},
        {"user_metadata": {"x" * 20_000: 1}},
    ],
    ids=["name", "tags", "project", "together", "key"],
)
def test_what_describes_a_session_is_bounded(client, fields):
    assert "16 KiB" in client.post("create_session", 400, **fields)["error"]


def test_what_describes_a_model_is_bounded(client):
    large = {"a": "x" * 20_000}
    body = {"session_id": client.session, "base_model": "student", "lora_config": {"rank": 4}}
    reply = client.post("create_model", 400, model_seq_id=1, user_metadata=large, **body)
    assert "16 KiB" in reply["error"]
    model = client.model(number=2)
    for kind in ("save_weights", "save_weights_for_sampler"):
        reply = client.post(kind, 400, model_id=model, path="a", user_metadata=large)
        assert "16 KiB" in reply["error"]


@pytest.mark.parametrize("site", ["cross-site", "same-site", "same-origin"])
def test_a_page_that_embeds_an_address_of_the_server_is_refused(client, site):
    response = client.http.get(f"{V1}/checkpoints", headers={"sec-fetch-site": site})
    assert response.status_code == 403
    response = client.http.get(f"{V1}/checkpoints", headers={"sec-fetch-site": "none"})
    assert response.status_code == 200
