"""vLLM as the student's engine, against doubles that sample as the local backend: the same run, and every refusal."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy import curve, rows, toy_recipe, toy_run

from practicum.engine_service import engine_requests
from practicum.engine_service.engine_process import ProcessEngine
from practicum.engine_service.engine_settings import Config
from practicum.engine_service.engine_trainer import build_canary, choose_tolerance
from practicum.errors import CapabilityError, EngineError, RecipeError
from practicum.types import SampleRequest, SamplingParams, ScoreRequest

from .vllm_double import VERSION, VllmServer, fake_package

SAMPLED = {"objective": {"signal": "sampled", "divergence": "reverse_kl"}}


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the double of the package `vllm`."""
    return install(monkeypatch)


def install(monkeypatch: pytest.MonkeyPatch, **faults: bool) -> Any:
    double = fake_package(**faults)
    monkeypatch.setitem(__import__("sys").modules, "vllm", double)
    return double


@pytest.fixture
def server(models: Path) -> Iterator[VllmServer]:
    with VllmServer(models / "student") as serving:
        yield serving


def at(server: VllmServer, folder: Path, **changes: Any) -> dict[str, Any]:
    engine = {"type": "vllm", "url": server.url, "folder": str(folder / "weights"), **changes}
    return {"rollout.engine": {**engine, "retry_seconds": 0.0}}


def texts(run: Path) -> list[Any]:
    return [(row["prompt"], row["sample"], row["text"]) for row in rows(run / "rollouts.jsonl")]


def test_a_run_by_the_engine_is_that_of_the_local_sampler(
    models: Path, tmp_path: Path, package: Any
) -> None:
    plain = toy_run(models, tmp_path / "plain").folder
    run = toy_run(models, tmp_path / "engine", {"rollout.engine": "vllm"}).folder
    assert texts(run) == texts(plain)
    assert curve(run, "loss") == pytest.approx(curve(plain, "loss"), abs=1e-5)
    assert max(curve(run, "sampler_mismatch")) < 1e-4
    assert max(curve(run, "canary")) < 1e-4
    (engine,) = package.made
    # A rehearsal, the weights before each of 4 steps, and none for the disabled evaluation.
    assert engine.core.loads == 1 + 4 and engine.ended


def test_a_run_by_a_server_is_that_of_the_local_sampler(
    models: Path, tmp_path: Path, server: VllmServer
) -> None:
    plain = toy_run(models, tmp_path / "plain").folder
    run = toy_run(models, tmp_path / "engine", at(server, tmp_path)).folder
    assert texts(run) == texts(plain)
    assert max(curve(run, "canary")) < 1e-4
    assert list((tmp_path / "weights").iterdir()) == []
    swap = ["/pause", "/collective_rpc", "/resume", "/inference/v1/generate"]
    first = server.asked.index("/pause")
    assert server.asked[first : first + 4] == swap


def test_rollouts_ahead_of_training_are_sampled_with_the_weights_of_their_version(
    models: Path, tmp_path: Path, package: Any
) -> None:
    ahead = {"rollout.max_staleness": 1}
    plain = toy_run(models, tmp_path / "plain", ahead).folder
    run = toy_run(models, tmp_path / "engine", {**ahead, "rollout.engine": "vllm"}).folder
    assert texts(run) == texts(plain)


def test_adapters_are_handed_over_merged(models: Path, tmp_path: Path, package: Any) -> None:
    lora = {"student.lora": {"rank": 2}, "optimizer.learning_rate": 0.05}
    plain = toy_run(models, tmp_path / "plain", lora).folder
    run = toy_run(models, tmp_path / "engine", {**lora, "rollout.engine": "vllm"}).folder
    assert texts(run) == texts(plain)
    assert max(curve(run, "canary")) < 1e-4


@pytest.mark.long
def test_a_resumed_run_is_that_of_an_uninterrupted_one(
    models: Path, tmp_path: Path, package: Any
) -> None:
    engine = {"rollout.engine": "vllm"}
    whole = toy_run(models, tmp_path / "whole", engine).folder
    half = toy_run(models, tmp_path / "half", {**engine, "train.steps": 2}).folder
    toy_run(models, tmp_path / "half", engine, resume=True)
    assert (half / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert (half / "rollouts.jsonl").read_bytes() == (whole / "rollouts.jsonl").read_bytes()


def test_a_head_that_stays_old_stops_the_run_before_anything_is_learned(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, keeps_head=True)
    with pytest.raises(EngineError, match=r"rehearsal .* differ by 0\.\d+ nats") as caught:
        toy_run(models, tmp_path, {"rollout.engine": "vllm"})
    assert caught.value.exit_code == 11
    assert not (tmp_path / "toy" / "metrics.jsonl").read_bytes()


def test_a_servers_head_that_stays_old_is_found_although_it_begins_equal(
    models: Path, tmp_path: Path
) -> None:
    with (
        VllmServer(models / "student", keeps_head=True) as server,
        pytest.raises(EngineError, match="does not sample with the student's weights"),
    ):
        toy_run(models, tmp_path, at(server, tmp_path))


def test_a_server_that_lost_the_weights_gets_them_again(
    models: Path, tmp_path: Path, server: VllmServer, caplog: pytest.LogCaptureFixture
) -> None:
    from practicum.runs.assembly import assemble_run

    built = assemble_run(toy_recipe(models, at(server, tmp_path)), tmp_path)
    sampler = built.backend.build_sampler(built.student)
    params = built.settings.plan(1).sampling
    requests = [SampleRequest(built.parts.renderer.render(built.parts.prompts[0].messages), 3)]
    (before,) = sampler.sample(requests, params)
    server.core.scramble()
    with caplog.at_level("INFO"):
        (after,) = sampler.sample(requests, params)
    assert before.tokens.equal(after.tokens) and "handed over again" in caplog.text
    assert before.sampling_logprobs.equal(after.sampling_logprobs)
    built.close()


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"scale_out": False}, r"refused with 404.*--enable-scale-out"),
        ({"raw": True}, r"log-probabilities before temperature.*processed_logprobs"),
    ],
)
def test_a_server_started_otherwise_is_refused_with_how_to_start_it(
    models: Path, tmp_path: Path, faults: dict[str, bool], message: str
) -> None:
    with (
        VllmServer(models / "student", **faults) as server,
        pytest.raises(EngineError, match=message),
    ):
        toy_run(models, tmp_path, at(server, tmp_path))


def test_no_server_is_one_line(models: Path, tmp_path: Path) -> None:
    engine = {"type": "vllm", "url": "http://127.0.0.1:9", "folder": str(tmp_path)}
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9.*no connection"):
        toy_run(models, tmp_path, {"rollout.engine": {**engine, "retry_seconds": 0.0}})


def test_without_the_package_the_error_says_what_to_install(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    with pytest.raises(RecipeError, match=r"\.\[vllm\].*rollout\.engine\.url"):
        toy_run(models, tmp_path, {"rollout.engine": "vllm"})


def test_sampled_tokens_are_corrected_unless_the_recipe_says_otherwise(models: Path) -> None:
    engine = {"rollout.engine": "vllm", **SAMPLED}
    corrections = [
        toy_recipe(models, changes).objective.losses[0].correction.name
        for changes in (
            SAMPLED,
            engine,
            {**engine, "objective": {**SAMPLED["objective"], "correction": "none"}},
            {"rollout.engine": "vllm"},
        )
    ]
    assert corrections == ["none", "ratio_truncate", "none", "none"]


def test_the_correction_and_the_engine_stand_in_the_run_folder(
    models: Path, tmp_path: Path, package: Any
) -> None:
    run = toy_run(models, tmp_path, {"rollout.engine": "vllm", **SAMPLED}).folder
    saved = json.loads((run / "recipe.json").read_text())
    assert saved["recipe"]["rollout"]["engine"]["type"] == "vllm"
    assert saved["recipe"]["objective"]["losses"][0]["correction"].startswith("ratio_truncate(")
    plain = toy_run(models, tmp_path / "plain", SAMPLED).folder
    learning = json.loads((plain / "recipe.json").read_text())["identity"]["student/decoding"]
    decoding = f"vllm {VERSION} in process (learns by {learning})"
    assert saved["identity"]["student/decoding"] == decoding


def test_a_run_does_not_resume_with_another_engine(
    models: Path, tmp_path: Path, package: Any
) -> None:
    engine = {"rollout.engine": "vllm"}
    toy_run(models, tmp_path, {**engine, "train.steps": 2})
    with pytest.raises(RecipeError, match=r"rollout\.engine"):
        toy_run(models, tmp_path, resume=True)
    package.__version__ = "0.33.0"
    with pytest.raises(RecipeError, match=r"vllm 0\.32\.0 in process .* vllm 0\.33\.0"):
        toy_run(models, tmp_path, engine, resume=True)
    package.__version__ = VERSION
    # The share of memory it takes does not change a token.
    toy_run(models, tmp_path, {"rollout.engine": {"type": "vllm", "memory": 0.2}}, resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout.engine": {"type": "vllm", "url": "http://localhost:1"}}, "set folder"),
        ({"rollout.engine": {"type": "vllm", "folder": "x"}}, "folder is for vLLM in a server"),
        (
            {"rollout.engine": {"type": "vllm", "sleep": True}, "rollout.max_staleness": 1},
            "leave sleep out",
        ),
        (
            {"rollout.engine": "vllm", "rollout.source": "token_mix(0.5)"},
            r"mix\(other=teacher\)",
        ),
        (
            {
                "rollout.engine": "vllm",
                "student": {"model": "m", "lora": {"rank": 4}},
                "backend": {"type": "tinker", "url": "http://localhost:1"},
            },
            "at a service, which samples itself",
        ),
        ({"rollout.engine": "vlm"}, "vllm"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_when_the_recipe_is_read(
    models: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        toy_recipe(models, changes)


@pytest.mark.long
def test_a_backend_that_would_ignore_the_engine_is_refused(models: Path, tmp_path: Path) -> None:
    changes = {"rollout.engine": "vllm", "backend": {"type": "backends.child"}}
    with pytest.raises(CapabilityError, match="would ignore the engine"):
        toy_run(models, tmp_path, changes)


def test_completions_that_cannot_be_right_are_refused() -> None:
    params = SamplingParams(2, stop_ids=frozenset({1}))
    sample = engine_requests.read_sample([3, 1], [-0.5, -700.0], "stop", params, 5)
    assert sample.stop_reason == "stop" and torch.isfinite(sample.sampling_logprobs).all()
    for wrong, message in {
        ((), (), "length"): "0 tokens",
        ((3, 3, 3), (-1.0,) * 3, "length"): "3 tokens, and 1 to 2",
        ((7,), (-1.0,), "length"): "outside of the 5",
        ((3, 1), (-1.0,), "stop"): "1 log-probabilities for 2",
        (None, (-1.0,), "length"): "without token ids",
        (("3",), (-1.0,), "length"): "without token ids",
        ((3.0,), (-1.0,), "length"): "without token ids",
        ((True,), (-1.0,), "length"): "without token ids",
        ((3,), None, "length"): "0 log-probabilities for 1 tokens",
        ((3,), (None,), "length"): "None as a log-probability",
        ((3,), ("-1",), "length"): "'-1' as a log-probability",
        ((3,), (float("nan"),), "length"): "nan as a log-probability, which is a number up to 0",
        ((3,), (float("-inf"),), "length"): "-inf as a log-probability",
        ((3,), (float("inf"),), "length"): "inf as a log-probability",
        ((3,), (0.5,), "length"): "0.5 as a log-probability",
        ((3,), (-1.0,), "abort"): "ended with 'abort'",
    }.items():
        with pytest.raises(EngineError, match=message):
            engine_requests.read_sample(*wrong, params, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": None}, "no list of log-probabilities for 2 tokens"),
        ({"logprobs": [None, None]}, "None as a log-probability"),
        ({"logprobs": [{3: SimpleNamespace(logprob=-1.0)}]}, "no list of log-probabilities for 2"),
        ({"logprobs": [{3: SimpleNamespace(logprob=-1.0)}, {}]}, "None as a log-probability"),
        ({"logprobs": [{3: SimpleNamespace(logprob=-math.inf)}] * 2}, "-inf as a log-probability"),
        ({"token_ids": None}, "without token ids"),
        ({"token_ids": ["3", "1"]}, "without token ids"),
    ],
)
def test_completions_in_process_that_cannot_be_right_are_refused(
    change: dict[str, Any], message: str
) -> None:
    engine = object.__new__(ProcessEngine)
    engine._vocab_size = 5
    entry = SimpleNamespace(logprob=-1.0)
    fields = {"token_ids": [3, 1], "logprobs": [{3: entry}, {1: entry}], "finish_reason": "stop"}
    params = SamplingParams(2, stop_ids=frozenset({1}))
    assert engine._read_sample(SimpleNamespace(**fields), params).tokens.tolist() == [3, 1]
    with pytest.raises(EngineError, match=message):
        engine._read_sample(SimpleNamespace(**fields | change), params)


def test_tempered_completions_leave_the_policys_log_probabilities_unknown() -> None:
    greedy, tempered = (
        engine_requests.read_sample([3], [-0.5], "length", SamplingParams(1, temperature), 5)
        for temperature in (0.0, 0.7)
    )
    assert greedy.sampling_logprobs.item() == 0 and greedy.policy_logprobs.item() == -0.5
    assert tempered.sampling_logprobs.item() == -0.5 and tempered.policy_logprobs.isnan().all()


def test_the_canary_fits_any_context_and_is_the_same_every_time() -> None:
    for most in (3, 10, 4096):
        canary = build_canary(11, most)
        assert canary == build_canary(11, most) and canary.prompt_tokens and canary.tokens
        assert len(canary.prompt_tokens) + len(canary.tokens) < most
    assert build_canary(11, 4096) == ScoreRequest(canary.prompt_tokens, canary.tokens)


def test_the_tolerance_follows_the_dtype() -> None:
    assert choose_tolerance(None, torch.float32) < choose_tolerance(None, torch.bfloat16)
    assert choose_tolerance(0.05, torch.bfloat16) == 0.05
    assert Config(tolerance=0.05).tolerance == 0.05
