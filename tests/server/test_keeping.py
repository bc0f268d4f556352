"""Stored data: checkpoints, across servers too; models in memory; answers; and the state at the server's end."""

import shutil
import threading
import time
from contextvars import Context

import numpy as np
import pytest
import torch

from practicum.backends.local.loading import load
from practicum.errors import ResourceError
from practicum.models.config import ModelConfig
from practicum.server.futures import Futures, ResponseBody
from practicum.server.model_cache import ModelCache
from practicum.server.refusals import HttpRefusal
from practicum.server.requests import CreateSession
from practicum.server.service import IDLE_SECONDS
from practicum.server.worker import ModelJob, Worker

from .client import V1, VerifierFailed, floats, logprobs, serving

pytestmark = pytest.mark.long

DATUM = {"tokens": [1, 2, 3, 4], "target_tokens": [2, 3, 4, 1], "weights": [1.0] * 4}


def losses(client, model, steps):
    found = []
    for _ in range(steps):
        found.append(client.train(model, [DATUM], "cross_entropy").metrics["loss:sum"])
        client.step(model, 0.02)
    return found


def load_into(client, path, number, *, optimizer=True):
    reply = client.post(
        "load_weights",
        session_id=client.session,
        model_seq_id=number,
        path=path,
        optimizer=optimizer,
    )
    return client.wait(reply)["model_id"]


def test_training_goes_on_exactly_where_it_was_saved_on_another_server_too(models, tmp_path):
    with serving(models, tmp_path / "served") as client:
        model = client.model()
        whole = losses(client, model, 2)
        path = client.save(model, "half")
        whole += losses(client, model, 2)
        assert client.post("weights_info", tinker_path=path) == {
            "base_model": "student",
            "optimizer_config": {"type": "adamw"},
            "is_lora": True,
            "lora_rank": 4,
            "train_unembed": False,
            "train_mlp": True,
            "train_attn": True,
        }
    with serving(models, tmp_path / "served") as client:
        assert losses(client, load_into(client, path, 0), 2) == whole[2:]
        assert losses(client, load_into(client, path, 1, optimizer=False), 2) != whole[2:]
        run = path.removeprefix("tinker://").split("/")[0]
        found = client.http.get(f"{V1}/training_runs/{run}").json()
        assert found["base_model"] == "student" and found["user_metadata"] == {
            "renderer_name": "plain"
        }
        assert run in [
            row["training_run_id"]
            for row in client.http.get(f"{V1}/training_runs").json()["training_runs"]
        ]


def test_checkpoints_are_listed_overwritten_when_asked_and_deleted(models, tmp_path):
    with serving(models, tmp_path / "served") as client:
        model = client.model()
        client.save(model, "a")
        with pytest.raises(
            VerifierFailed,
            match=r"there is a checkpoint tinker://.*/weights/a already; give another name or overwrite it",
        ):
            client.save(model, "a")
        losses(client, model, 1)
        path = client.save(model, "a", overwrite=True)
        client.save(model, "a", "save_weights_for_sampler")
        listed = client.http.get(f"{V1}/training_runs/{model}/checkpoints").json()["checkpoints"]
        assert sorted(row["checkpoint_id"] for row in listed) == ["sampler_weights/a", "weights/a"]
        assert all(row["size_bytes"] > 0 for row in listed)
        assert client.http.get(f"{V1}/checkpoints").json()["cursor"]["total_count"] == 2
        assert (
            client.http.delete(f"{V1}/training_runs/{model}/checkpoints/weights/a").status_code
            == 200
        )
        assert (
            client.http.delete(f"{V1}/training_runs/{model}/checkpoints/weights/a").status_code
            == 404
        )
        assert (
            "the run has none of that kind"
            in client.post("weights_info", 404, tinker_path=path)["error"]
        )
        reply = client.post("save_weights", 400, model_id=model, path="../../x")
        assert "is not the address of a checkpoint" in reply["error"]


def test_damaged_files_and_other_weights_are_refused(models, tmp_path):
    copies = tmp_path / "models"
    shutil.copytree(models, copies)
    with serving(copies, tmp_path / "served") as client:
        model = client.model()
        path = client.save(model, "a")
        sampled = client.save(model, "b", "save_weights_for_sampler")
        with pytest.raises(
            VerifierFailed,
            match=r"was saved for sampling; continue training from tinker://.*/weights/",
        ):
            load_into(client, sampled, 1)
    weights = next(
        (tmp_path / "served").glob("*/sampler_weights/b/checkpoints/step-1/student.safetensors")
    )
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    shutil.rmtree(copies / "student")
    shutil.copytree(models / "teacher", copies / "student")
    with serving(copies, tmp_path / "served") as client:
        with pytest.raises(
            VerifierFailed,
            match="was trained over another model than the model that is now served as student",
        ):
            load_into(client, path, 0)
        sampler = client.sampler(0, model_path=sampled)
        with pytest.raises(
            VerifierFailed, match=r"student.safetensors does not match its SHA-256 sum"
        ):
            client.sample([1, 2], sampling_session_id=sampler)


def test_what_was_learned_is_saved_when_the_server_closes_and_when_a_session_ends(models, tmp_path):
    with serving(models, tmp_path / "served") as client:
        first = client.model()
        losses(client, first, 2)
        client.http.post(
            f"{V1}/sessions/{client.session}/finish", json={"reason": {"type": "success"}}
        )
        assert (
            "the session has ended"
            in client.post("session_heartbeat", 410, session_id=client.session)["error"]
        )
        client.post("get_info", 404, model_id=first)
        client.session = client.post(
            "create_session", tags=[], user_metadata=None, sdk_version="0"
        )["session_id"]
        second = client.model()
        losses(client, second, 3)
        saved = client.model(number=1)
        losses(client, saved, 1)
        client.save(saved, "by-hand")
    found = sorted(
        str(path.relative_to(tmp_path / "served"))
        for path in (tmp_path / "served").glob("*/weights/*")
    )
    expected = [(first, "closing-2"), (second, "closing-3"), (saved, "by-hand")]
    assert found == sorted(f"{model.replace(':', '.')}/weights/{name}" for model, name in expected)


def test_only_so_much_is_in_memory_and_training_survives_it(models, tmp_path):
    size = sum(path.stat().st_size for path in (models / "student").glob("*.safetensors"))
    with serving(models, tmp_path / "one", memory=int(1.5 * size)) as client:
        model = client.model()
        interrupted = []
        for _ in range(3):
            client.train(model, [DATUM], "cross_entropy")
            client.sample([1, 2], base_model="teacher")
            interrupted.append(client.train(model, [DATUM], "cross_entropy").metrics["loss:sum"])
            client.sample([1, 2], base_model="teacher")
            client.step(model, 0.02)
        reply = client.post("save_weights_for_sampler", model_id=model, sampling_session_seq_id=5)
        snapshot = client.wait(reply)["sampling_session_id"]
        client.sample([1, 2], base_model="teacher")
        scored = client.sample(
            [1, 2, 3], max_tokens=1, sampling_session_id=snapshot, prompt_logprobs=True
        )
        assert client.said.count("let go of student") > 3
    with serving(models, tmp_path / "all") as client:
        model = client.model()
        straight = []
        for _ in range(3):
            client.train(model, [DATUM], "cross_entropy")
            straight.append(client.train(model, [DATUM], "cross_entropy").metrics["loss:sum"])
            client.step(model, 0.02)
        short = {"tokens": [1, 2, 3], "target_tokens": [2, 3, 1], "weights": [0.0] * 3}
        again = client.train(model, [short], "cross_entropy")
    assert interrupted == straight
    assert floats(scored.prompt_logprobs)[1:] == pytest.approx(logprobs(again)[0][:2], abs=1e-5)


def test_the_least_recently_used_model_goes_first_and_one_too_large_is_refused(models):
    config = {name: ModelConfig(model=str(models / "student"), device="cpu") for name in "abc"}
    size = sum(w.numel() * 4 for w in load(config["a"]).language_model.model.parameters())
    gone: list[str] = []
    shelf = ModelCache(config, int(2.5 * size))
    shelf.on_evict.append(gone.append)
    for name in "abac":
        shelf.get(name)
    assert gone == ["b"] and shelf.peek("a") and not shelf.peek("b") and shelf.peek("c")
    with pytest.raises(
        ResourceError,
        match="a takes 0 MiB and --memory is 0 MiB; raise it or serve a smaller model",
    ):
        ModelCache(config, size // 2).get("a")


def test_only_the_newest_snapshots_can_be_sampled_from(models, tmp_path):
    with serving(models, tmp_path / "served") as client:
        model = client.model()
        for number in range(5):
            client.wait(
                client.post(
                    "save_weights_for_sampler", model_id=model, sampling_session_seq_id=number
                )
            )
        client.sample([1], sampling_session_id=f"{client.session}:sample:1")
        asked = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}}
        error = client.post(
            "asample", 410, sampling_session_id=f"{client.session}:sample:0", **asked
        )["error"]
        assert "a model keeps its newest 4 snapshots" in error


def test_too_many_waiting_requests_are_told_to_come_again(models, tmp_path):
    with serving(models, tmp_path / "served", max_open=2) as client:
        client.service._worker.submit(
            ModelJob(
                None, lambda items: [time.sleep(0.3) or ResponseBody(b"{}", "application/json")]
            )
        )
        replies = [client.ask([1, 2], base_model="teacher") for _ in range(2)]
        body = {
            "prompt": {"chunks": [{"tokens": [1]}]},
            "sampling_params": {},
            "base_model": "teacher",
        }
        refused = client.http.post(f"{V1}/asample", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"] == "2 requests are waiting; ask again later"
        for reply in replies:
            client.wait(reply)
        client.sample([1, 2], base_model="teacher")


def test_a_waiting_request_can_be_cancelled(models, tmp_path):
    with serving(models, tmp_path / "served") as client:
        client.service._worker.submit(
            ModelJob(
                None, lambda items: [time.sleep(0.3) or ResponseBody(b"{}", "application/json")]
            )
        )
        reply = client.ask([1, 2], base_model="teacher")
        client.post("cancel_future", request_id=reply["request_id"])
        with pytest.raises(VerifierFailed, match="the request was cancelled"):
            client.wait(reply)


def finished(worker, body):
    return worker.submit(ModelJob(None, lambda items: [ResponseBody(body, "")]))


def test_old_answers_make_room_for_new_ones_and_are_then_gone():
    worker = Worker(lambda error: ResponseBody(str(error).encode(), ""))
    futures = Futures(max_bytes=10)
    for name in "abcd":
        futures.open(name, lambda: finished(worker, b"12345"))
        futures.get(name).result(5)
    with pytest.raises(HttpRefusal, match="the answer to a is no longer kept; ask again") as gone:
        futures.get("a")
    assert gone.value.status == 410
    assert futures.get("d").result().body == b"12345"
    worker.close(5.0)


def test_a_batch_holds_what_is_alike_and_a_failure_reaches_all_of_it():
    batches: list[list[int]] = []

    def run(items):
        batches.append(list(items))
        if 13 in items:
            raise ValueError("no")
        return [ResponseBody(str(item).encode(), "") for item in items]

    worker = Worker(lambda error: ResponseBody(type(error).__name__.encode(), ""))
    held = worker.submit(ModelJob(None, lambda items: [time.sleep(0.1) or ResponseBody(b"", "")]))
    jobs = [
        worker.submit(ModelJob(number, run, key))
        for number, key in ((1, "x"), (2, "y"), (3, "x"), (13, "y"))
    ]
    assert held.result(5).body == b""
    assert [job.result(5).body for job in jobs] == [b"1", b"ValueError", b"3", b"ValueError"]
    assert batches == [[1, 3], [2, 13]]
    waiting = worker.submit(
        ModelJob(None, lambda items: [time.sleep(0.2) or ResponseBody(b"", "")])
    )
    time.sleep(0.05)
    late = worker.submit(ModelJob(1, run, "x"))
    assert worker.close(5.0)
    assert waiting.done() and late.cancelled()
    assert worker.submit(ModelJob(1, run, "x")).cancelled()


def test_numbers_that_are_not_finite_never_reach_the_weights(models, tmp_path):
    with serving(models, tmp_path / "served") as client:
        model = client.model()
        before = client.train(model, [DATUM], "cross_entropy", forward_only=True).metrics[
            "loss:sum"
        ]
        huge = {**DATUM, "weights": [3e38] * 4}
        with pytest.raises(VerifierFailed, match=r"not a number|not finite"):
            client.train(model, [huge], "cross_entropy")
        assert client.step(model)["metrics"]["grad_norm"] == 0.0
        assert (
            client.train(model, [DATUM], "cross_entropy", forward_only=True).metrics["loss:sum"]
            == before
        )
    assert np.isfinite(before) and torch.isfinite(torch.tensor(before))


def test_a_snapshot_that_still_waits_when_its_model_is_unloaded_goes_with_it(models, tmp_path):
    with serving(models, tmp_path) as client:
        model = client.model()
        held, go_on = threading.Event(), threading.Event()

        def hold(items):
            held.set()
            go_on.wait(30)
            return [ResponseBody(b"{}", "application/json")]

        client.service._worker.submit(ModelJob(None, hold))
        assert held.wait(30)
        client.post(
            "save_weights_for_sampler",
            model_id=model,
            seq_id=client.number(model),
            sampling_session_seq_id=7,
        )
        unloading = client.post("unload_model", model_id=model)
        go_on.set()
        client.wait(unloading)
        asked = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}}
        error = client.post(
            "asample", 410, sampling_session_id=f"{client.session}:sample:7", **asked
        )
        assert "there is no sampling session" in error["error"]


def test_a_session_that_was_silent_for_an_hour_is_ended_and_the_console_hears_of_it(
    models, tmp_path
):
    with serving(models, tmp_path) as client:
        client.service._sessions[client.session].last_seen -= IDLE_SECONDS + 1
        body = CreateSession(tags=[], user_metadata=None, sdk_version="0")
        Context().run(client.service.create_session, body)  # as an HTTP server may do it
        assert client.said == [f"session {client.session} was silent for an hour and is ended"]
        client.post("session_heartbeat", 410, session_id=client.session)
