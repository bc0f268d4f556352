"""Client requests in addition to sampling and training: sessions, lifetimes and copies of checkpoints, and refusals."""

import json
import time

import pytest

from .client import V1, serving

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def client(models, tmp_path_factory):
    with serving(models, tmp_path_factory.mktemp("served")) as client:
        yield client


def checkpoints(client, model):
    listed = client.http.get(f"{V1}/training_runs/{model}/checkpoints").json()["checkpoints"]
    return {row["checkpoint_id"]: row["expires_at"] for row in listed}


def test_a_checkpoint_lives_as_long_as_it_was_given(client):
    model = client.model()
    client.save(model, "stays")
    path = client.save(model, "goes", ttl_seconds=3600)
    sampled = client.save(model, "goes", "save_weights_for_sampler")
    lifetimes = checkpoints(client, model)
    assert lifetimes["weights/stays"] is None and lifetimes["sampler_weights/goes"] is None
    assert lifetimes["weights/goes"] is not None
    url = f"{V1}/training_runs/{model}/checkpoints"
    assert client.http.put(f"{url}/weights/goes/ttl", json={"ttl_seconds": None}).status_code == 200
    assert (
        client.http.put(f"{url}/sampler_weights/goes/ttl", json={"ttl_seconds": 7200}).status_code
        == 200
    )
    lifetimes = checkpoints(client, model)
    assert lifetimes["weights/goes"] is None and lifetimes["sampler_weights/goes"] is not None
    assert client.http.put(f"{url}/weights/none/ttl", json={"ttl_seconds": 7200}).status_code == 404
    short = client.http.put(f"{url}/weights/goes/ttl", json={"ttl_seconds": 60})
    assert (short.status_code, short.json()["error"]) == (
        400,
        "SetLifetime: ttl_seconds: Input should be greater than or equal to 3600",
    )
    folder = client.service._store._root / model.replace(":", ".") / "sampler_weights" / "goes"
    (folder / "expires.json").write_text(json.dumps({"at": "2020-01-01T00:00:00+00:00"}))
    asked = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}}
    assert (
        "there is no checkpoint"
        in client.post("asample", 404, **asked, model_path=sampled)["error"]
    )
    assert not folder.exists()
    assert sorted(checkpoints(client, model)) == ["weights/goes", "weights/stays"]
    assert client.post("weights_info", tinker_path=path)["base_model"] == "student"


def test_a_copy_stays_when_the_original_goes_and_is_made_once(client):
    model = client.model(number=1)
    path = client.save(model, "original")
    body = {"source_path": path, "destination_project_id": "mine"}
    headers = {"x-idempotency-key": "one"}
    copies = [
        client.http.post(f"{V1}/copy_weights", json=body, headers=headers).json()["tinker_path"]
        for _ in range(2)
    ]
    assert copies[0] == copies[1] != path and copies[0].endswith(":train:0/weights/original")
    client.http.delete(f"{V1}/training_runs/{model}/checkpoints/weights/original")
    assert client.post("weights_info", tinker_path=copies[0])["lora_rank"] == 4
    loaded = client.post(
        "load_weights", session_id=client.session, model_seq_id=2, path=copies[0], optimizer=True
    )
    assert client.wait(loaded)["model_id"]
    run = copies[0].removeprefix("tinker://").split("/")[0]
    assert client.http.get(f"{V1}/training_runs/{run}").json()["base_model"] == "student"
    assert "there is no checkpoint" in client.post("copy_weights", 404, source_path=path)["error"]


def test_sessions_are_listed_described_and_found(client):
    names = ["nightly run", "Nightly test", None]
    made = [
        client.post(
            "create_session",
            tags=[],
            user_metadata={"team": "a"} if name else None,
            sdk_version="0",
            display_name=name,
        )["session_id"]
        for name in names
        if not time.sleep(0.002)
    ]
    listed = client.http.get(f"{V1}/sessions", params={"limit": 2, "access_scope": "owned"}).json()[
        "sessions"
    ]
    assert listed == made[:0:-1]
    assert (
        client.http.get(f"{V1}/sessions", params={"offset": 2, "limit": 1}).json()["sessions"]
        == made[:1]
    )
    assert client.http.get(f"{V1}/sessions", params={"offset": "-1"}).status_code == 400
    described = client.http.get(f"{V1}/sessions/{made[0]}").json()
    assert described["display_name"] == "nightly run" and described["user_metadata"] == {
        "team": "a"
    }
    assert client.http.get(f"{V1}/sessions/none").status_code == 404
    found = client.post("sessions/search", display_name="NIGHTLY", owner={"type": "own"}, limit=1)
    assert [row["session_id"] for row in found["sessions"]] == made[1:2]
    cursor = {
        **found["next_cursor"],
        "last_created_at": found["next_cursor"]["last_created_at"].replace("+00:00", "Z"),
    }
    last = client.post("sessions/search", display_name="NIGHTLY", limit=1, cursor=cursor)
    assert [row["session_id"] for row in last["sessions"]] == made[:1] and last[
        "next_cursor"
    ] is None
    assert client.post("sessions/search", user_metadata={"team": "b"})["sessions"] == []
    assert client.post("sessions/search", statuses=[{"type": "cancelled"}])["sessions"] == []
    bad = {"last_created_at": "2026-99-01T00:00:00Z", "last_session_id": "x"}
    assert client.post("sessions/search", 400, cursor=bad)["error"].startswith(
        "SearchSessions: cursor"
    )


REFUSED = [
    ("POST", "save_weights_external", "weights are not saved elsewhere"),
    ("POST", "training_runs/r/checkpoints/weights/a/publish", "publishing is not needed"),
    (
        "DELETE",
        "training_runs/r/checkpoints/weights/a/publish",
        "publishing is not needed",
    ),
    ("PUT", "sessions/s/project", "there are no projects here"),
    ("GET", "sessions/s/trace_export", "no traces are recorded here"),
    ("POST", "billing/usage/events", "nothing is billed here"),
    ("GET", "audit", "no audit log is kept here"),
    ("POST", "create_custom_loss", "use forward_backward_custom"),
]


@pytest.mark.parametrize(("method", "path", "reason"), REFUSED)
def test_what_one_machine_has_no_use_for_is_refused_with_the_reason(client, method, path, reason):
    response = client.http.request(method, f"{V1}/{path}")
    assert response.status_code == 400 and reason in response.json()["error"]


def test_what_there_is_not_is_named(client):
    for method, path in (("GET", "/api/v1/nothing"), ("POST", "/"), ("DELETE", "/api/v1/sessions")):
        response = client.http.request(method, path)
        assert response.status_code == 404
        assert response.json()["error"].startswith(f"this server has no {method} '{path}'")
