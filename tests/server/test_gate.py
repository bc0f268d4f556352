"""Access control: accepted clients and requests; the tokens and options of the command line."""

import os

import pytest

from practicum.core.access import TOKEN_VARIABLE, is_loopback, read_token
from practicum.errors import RecipeError, ResourceError
from practicum.server.limits import RequestLimits
from practicum.server.serving import ServerOptions, parse_models, serve

from .client import V1, serving

TOKEN = "tml-" + "a1" * 12
LOCAL = frozenset({"localhost", "127.0.0.1"})


@pytest.fixture(scope="module")
def guarded(models, tmp_path_factory):
    with serving(models, tmp_path_factory.mktemp("served"), token=TOKEN, hosts=LOCAL) as client:
        yield client


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": ""},
        {"x-api-key": TOKEN[:-1]},
        {"x-api-key": TOKEN + "x"},
        {"x-api-key": "", "authorization": f"Basic {TOKEN}"},
    ],
    ids=["none", "short", "long", "basic"],
)
def test_nothing_is_answered_without_the_token(guarded, headers):
    for method, path in (
        ("POST", "create_session"),
        ("GET", "get_server_capabilities"),
        ("GET", "nothing"),
    ):
        response = guarded.http.request(method, f"{V1}/{path}", headers=headers)
        assert response.status_code == 401
        assert (
            response.json()["error"]
            == "the token is missing or wrong; set TINKER_API_KEY to the token of this server"
        )
        assert TOKEN not in response.text
    query = guarded.http.get(f"{V1}/get_server_capabilities?api_key={TOKEN}", headers=headers)
    assert query.status_code == 401


def test_the_token_opens_and_health_needs_none(guarded):
    assert guarded.http.get(f"{V1}/get_server_capabilities").status_code == 200
    bearer = {"x-api-key": "", "authorization": f"Bearer {TOKEN}"}
    assert guarded.http.get(f"{V1}/get_server_capabilities", headers=bearer).status_code == 200
    assert guarded.http.get("/healthz", headers={"x-api-key": ""}).json() == {"status": "ok"}
    assert not any(TOKEN in line for line in guarded.said)


def test_web_pages_and_other_names_are_refused(guarded):
    page = guarded.http.get("/healthz", headers={"origin": "http://evil.example"})
    assert (page.status_code, page.json()["error"]) == (
        403,
        "requests from web pages are not answered",
    )
    for host in (
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "",
        "[::1",
        "localhost@evil.example",
    ):
        assert guarded.http.get("/healthz", headers={"host": host}).status_code == 403
    for host in ("localhost:8000", "127.0.0.1:1"):
        assert guarded.http.get("/healthz", headers={"host": host}).status_code == 200


def test_bodies_have_a_size(guarded):
    most = 2**20
    response = guarded.http.post(f"{V1}/telemetry", content=b"x" * (most + 1))
    assert (response.status_code, response.json()["error"]) == (
        413,
        f"the body is larger than {most} bytes; send it in parts",
    )

    def endless():
        for _ in range(40):
            yield b"x" * 2**16

    assert guarded.http.post(f"{V1}/telemetry", content=endless()).status_code == 413


def test_a_body_has_one_length(guarded):
    both = {"content-length": "2", "transfer-encoding": "chunked"}
    response = guarded.http.post(f"{V1}/telemetry", content=b"{}", headers=both)
    assert response.status_code == 400
    assert response.json()["error"].startswith(
        "a body has a content-length or is sent in chunks, not both"
    )


def test_json_may_be_as_large_as_the_longest_text_needs():
    limits = RequestLimits()
    assert limits.compute_json_bytes(512) == 2**20 + 512 * 64 * 8
    assert limits.compute_json_bytes(2**20) == limits.body_bytes


def test_a_body_that_does_not_arrive_is_not_waited_for_for_ever(models, tmp_path):
    import asyncio

    from starlette.requests import Request

    from practicum.server.app import _Pages
    from practicum.server.refusals import HttpRefusal

    async def silent():
        await asyncio.sleep(60)
        return {"type": "http.request", "body": b"", "more_body": False}

    with serving(models, tmp_path, limits=RequestLimits(body_seconds=0.05)) as client:
        request = Request({"type": "http", "method": "POST", "headers": []}, silent)
        with pytest.raises(
            HttpRefusal, match=r"the body was not here within 0.05 s; send it again"
        ) as refused:
            asyncio.run(_Pages(client.service)._receive(request, 10))
    assert refused.value.status == 408


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "CreateSession: body: Invalid JSON"),
        (b"[1]", "CreateSession: body: Input should be an object"),
        (b'{"tags": [NaN]}', "CreateSession: tags.0"),
        (b'{"sdk_version": "\xff"}', "CreateSession: body: Invalid JSON"),
        (
            b'{"user_metadata": ' + b"[" * 5000 + b"]" * 5000 + b"}",
            "CreateSession: body: Invalid JSON: recursion limit",
        ),
        (
            b'{"tags": "x", "more": 1}',
            "CreateSession: tags: Input should be a valid array (and 1 more)",
        ),
    ],
    ids=["empty", "list", "nan", "utf-8", "deep", "wrong"],
)
def test_json_is_strict(guarded, body, text):
    response = guarded.http.post(f"{V1}/create_session", content=body)
    assert response.status_code == 400
    assert response.json()["error"].startswith(text)


@pytest.mark.parametrize(
    "numbers",
    [
        {"temperature": float("inf")},
        {"temperature": -1},
        {"top_p": 0},
        {"max_tokens": 0},
        {"max_tokens": "4"},
        {"top_k": -2},
    ],
    ids=str,
)
def test_numbers_have_their_ranges(guarded, numbers):
    import json

    body = {"prompt": {"chunks": []}, "sampling_params": numbers, "base_model": "teacher"}
    response = guarded.http.post(f"{V1}/asample", content=json.dumps(body))
    assert response.status_code == 400
    assert response.json()["error"].startswith("SampleBody: ")


@pytest.mark.parametrize("body", [b"\xff\xff\xff", b"not a message", b"\x0a\xff\xff\xff\xff\x0f"])
def test_protobuf_that_is_none_is_refused(guarded, body):
    headers = {"content-type": "application/x-protobuf"}
    response = guarded.http.post(f"{V1}/forward_backward", content=body, headers=headers)
    assert response.status_code == 400
    assert "the body is not a ForwardBackwardRequest" in response.json()["error"]
    other = guarded.http.post(
        f"{V1}/forward_backward", content=body, headers={"content-type": "application/json"}
    )
    assert other.json()["error"] == "forward_backward reads application/x-protobuf, not compressed"


def tensors():
    from practicum.server.wire import load_messages

    m = load_messages()
    yield (
        m.Tensor(dtype=m.DTYPE_FLOAT32, dense=b"abc"),
        "3 bytes are no whole number of entries of 4",
    )
    yield (
        m.Tensor(dtype=m.DTYPE_FLOAT32, dense=b"abcd", shape=[2]),
        r"1 values do not have the shape \[2\]",
    )
    yield (
        m.Tensor(dtype=m.DTYPE_FLOAT32, dense=b"abcd", shape=[-1, -1]),
        r"1 values do not have the shape",
    )
    yield m.Tensor(dtype=m.DTYPE_BFLOAT16, dense=b"ab"), "tensors are float32, int64 or int32"
    sparse = m.SparseCsr(
        values=b"abcd", crow_indices=bytes(8) + (1).to_bytes(8, "little"), col_indices=bytes(8)
    )
    yield (
        m.Tensor(dtype=m.DTYPE_FLOAT32, sparse_csr=sparse, shape=[1, 2**40]),
        "of at most 67108864 entries together",
    )
    yield (
        m.Tensor(dtype=m.DTYPE_FLOAT32, sparse_csr=sparse, shape=[2, 1]),
        "do not belong to a matrix of shape",
    )
    yield (
        m.Tensor(dtype=m.DTYPE_FLOAT32, sparse_csr=sparse, shape=[1, 0]),
        "do not belong to a matrix of shape",
    )


@pytest.mark.parametrize("number", range(7))
def test_tensors_that_are_none_are_refused(number):
    from practicum.server.refusals import HttpRefusal
    from practicum.server.wire import load_messages, read_train_request

    tensor, text = list(tensors())[number]
    request = load_messages().ForwardBackwardRequest(model_id="x", loss_fn="ppo")
    request.data.add().loss_fn_inputs["weights"].CopyFrom(tensor)
    with pytest.raises(HttpRefusal, match=text):
        read_train_request(request.SerializeToString())


def test_sparse_tensors_are_written_out():
    import numpy as np

    from practicum.server.wire import load_messages, read_train_request

    m = load_messages()
    sparse = m.SparseCsr(
        values=np.array([5, 6, 7], "<i8").tobytes(),
        crow_indices=np.array([0, 1, 1, 3], "<i8").tobytes(),
        col_indices=np.array([1, 0, 2], "<i8").tobytes(),
    )
    request = m.ForwardBackwardRequest(model_id="x", loss_fn="ppo")
    tensor = request.data.add().loss_fn_inputs["target_tokens"]
    tensor.CopyFrom(m.Tensor(dtype=m.DTYPE_INT64, sparse_csr=sparse, shape=[3, 3]))
    found = read_train_request(request.SerializeToString()).data[0].inputs["target_tokens"]
    assert found.tolist() == [[0, 5, 0], [0, 0, 0], [6, 0, 7]]


# The command line


def test_off_this_machine_a_token_is_needed(models, tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(
        RecipeError,
        match=r"--host 0.0.0.0 can be reached from other machines, so a token is needed: set PRACT",
    ):
        serve(ServerOptions([str(models / "teacher")], host="0.0.0.0", port=0, out=tmp_path))


def test_small_answers_are_sent_at_once():
    """Check TCP_NODELAY: asyncio sets it on connections of a listener that is named TCP, and on no others."""
    import socket

    from practicum.server.serving import _listen

    with _listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_a_taken_port_is_named(models, tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ResourceError, match=rf"127.0.0.1:{port} cannot be served on \(Address already in use\)"
        ):
            serve(ServerOptions([str(models / "teacher")], port=port, out=tmp_path))


def test_tokens_are_long_private_and_of_the_kind_that_clients_send(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert read_token(None, "--token-file") is None
    for weak in ("secret", "tml-short", "x" * 30, "tml-" + "ä" * 20):
        monkeypatch.setenv(TOKEN_VARIABLE, weak)
        with pytest.raises(
            RecipeError,
            match=rf"the token of {TOKEN_VARIABLE} must begin with tml- and have at least 20",
        ) as error:
            read_token(None, "--token-file")
        assert weak not in str(error.value)
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n", encoding="utf-8")
    os.chmod(path, 0o644)
    with pytest.raises(
        RecipeError, match=f"--token-file {path} can be read by others; chmod 600 {path}"
    ):
        read_token(path, "--token-file")
    os.chmod(path, 0o600)
    assert read_token(path, "--token-file") == TOKEN
    with pytest.raises(RecipeError, match="cannot be read"):
        read_token(tmp_path / "none", "--token-file")


def test_models_have_names_and_students_are_some_of_them():
    served, students = parse_models(ServerOptions(["a", "Qwen/Qwen3-8B=folder"]))
    assert list(served) == ["a", "Qwen/Qwen3-8B"] and students == {"a", "Qwen/Qwen3-8B"}
    assert served["Qwen/Qwen3-8B"].model == "folder"
    served, students = parse_models(ServerOptions(["a"], students=["b=c"]))
    assert list(served) == ["a", "b"] and students == {"b"}
    with pytest.raises(
        RecipeError, match="two models are named a; give one of them another name with NAME=MODEL"
    ):
        parse_models(ServerOptions(["a=x", "a=y"]))


def test_a_type_of_numbers_that_there_is_not_is_refused():
    with pytest.raises(RecipeError, match="--dtype float16: write one of auto, float32, bfloat16"):
        parse_models(ServerOptions(["a"], dtype="float16"))
    with pytest.raises(RecipeError, match="--device tpu: write one of auto, cpu, cuda"):
        parse_models(ServerOptions(["a"], device="tpu"))


def test_which_addresses_are_of_this_machine_alone():
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "box", "127.0.0.1.example")))
