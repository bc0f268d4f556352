"""The real verifiers package: its agents record traces of this student, which learns from them. `make peers` runs this file
in an environment that has verifiers.
"""

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import recording
import torch
from toy import make_model, rows, toy_recipe, toy_run

from practicum.backends.local.loading import load
from practicum.backends.local.residency import build_scorer
from practicum.models.config import ScorerConfig
from practicum.runs.trace_file import score_traces
from practicum.types import SampleRequest, SamplingParams

vf: Any = pytest.importorskip(
    "verifiers.v1", reason="run by `make peers`, where verifiers is installed"
)

pytestmark = pytest.mark.slow

PROMPTS = ("abc", "cab", "dd")
RESULTS: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def record() -> Iterator[None]:
    yield from recording.record("verifiers", version("verifiers"), RESULTS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "student", seed=1)
    make_model(folder / "teacher", seed=2, pretrain=60)
    return folder


class _Engine(BaseHTTPRequestHandler):
    """The engine that a training client of verifiers asks for tokens: the student, sampled in this process."""

    sampler: Any
    stops: frozenset[int]

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "student", "max_model_len": 256}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        params = SamplingParams(12, stop_ids=self.stops)
        (sample,) = self.sampler.sample([SampleRequest(tuple(asked["token_ids"]), 7)], params)
        numbers = zip(sample.tokens.tolist(), sample.sampling_logprobs.tolist(), strict=True)
        content = [{"token": f"token_id:{token}", "logprob": value} for token, value in numbers]
        choice = {
            "index": 0,
            "token_ids": sample.tokens.tolist(),
            "finish_reason": sample.stop_reason,
        }
        self._answer({"request_id": "r", "choices": [{**choice, "logprobs": {"content": content}}]})

    def _answer(self, data: Any) -> None:
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def traces(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the traces of an agent of verifiers that uses the student as its model."""
    config = ScorerConfig(model=str(models / "student"))
    loaded = load(config)
    _Engine.sampler = build_scorer(loaded, config, 8, 128)
    _Engine.stops = frozenset(loaded.renderer.stop_ids)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["PRACTICUM_PEER_KEY"] = "none"

    class Task(vf.Task):
        @vf.reward
        async def begins(self, trace: Any) -> float:
            return float((trace.assistant_messages[-1].content or "").startswith("a"))

    async def run() -> list[Any]:
        from verifiers.v1.harnesses.null.harness import NullHarnessConfig

        client = vf.TrainClientConfig(
            base_url=f"http://127.0.0.1:{server.server_port}/v1",
            api_key_var="PRACTICUM_PEER_KEY",
            renderer_model_name=str(models / "student"),
        )
        settings = vf.AgentConfig(
            model="student",
            harness=NullHarnessConfig(id="null"),
            runtime=vf.SubprocessConfig(),
            client=client,
        )
        async with vf.make_agent(settings) as agent:
            tasks = [
                Task(vf.TaskData(idx=number, prompt=prompt))
                for number, prompt in enumerate(PROMPTS)
            ]
            return [await agent.run(task) for task in tasks]

    recorded = asyncio.run(run())
    server.shutdown()
    path = tmp_path_factory.mktemp("traces") / "traces.jsonl"
    path.write_text("".join(trace.model_dump_json(exclude_none=True) + "\n" for trace in recorded))
    return path


def test_a_student_learns_from_traces_of_verifiers(
    models: Path, traces: Path, tmp_path: Path
) -> None:
    changes = {
        "task": {"type": "traces", "path": str(traces)},
        "rollout.source": f"traces({traces})",
        "rollout.n": 1,
        "rollout.max_new_tokens": 16,
        "train.steps": 1,
        "train.prompts_per_step": 3,
        "evaluation.prompts": 0,
    }
    recorded = [vf.Trace.model_validate_json(line) for line in traces.read_text().splitlines()]
    learned = {
        row["prompt"]: row
        for row in rows(toy_run(models, tmp_path, changes).folder / "rollouts.jsonl")
    }
    for number, trace in enumerate(recorded):
        (branch,) = trace.branches
        row = learned[str(number)]
        assert row["prompt_tokens"] + row["tokens"] == branch.token_ids
        assert row["loss_mask"] == branch.sampled_mask[len(row["prompt_tokens"]) :]
        assert row["reward"] == trace.reward
        # Sampled by the same weights, so the trainer's own numbers equal the trace.
        sampled = branch.logprobs[len(row["prompt_tokens"]) :]
        assert torch.allclose(
            torch.tensor(row["sampling_logprobs"]), torch.tensor(sampled), atol=1e-6
        )
    RESULTS["traces"] = {
        "conversations": len(recorded),
        "tokens": sum(len(row["tokens"]) for row in learned.values()),
    }
    recipe = toy_recipe(models, changes)
    scored = score_traces(recipe, tmp_path / "scored.jsonl")
    again = [
        vf.Trace.model_validate_json(line)
        for line in (tmp_path / "scored.jsonl").read_text().splitlines()
    ]
    assert scored.answers == len(again)
    for before, after in zip(recorded, again, strict=True):
        (old,), (new,) = before.branches, after.branches
        assert old.reference_logprobs is None
        assert new.reference_logprobs is not None and len(new.reference_logprobs) == len(
            old.token_ids
        )
        assert (new.token_ids, new.logprobs) == (old.token_ids, old.logprobs)
    RESULTS["scored"] = {"tokens": scored.tokens, "mean log-probability": round(scored.logprob, 4)}


@pytest.mark.parametrize("harness", [None, "echo_taskset"])
def test_the_live_student_speaks_through_harnesses_of_verifiers(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harness: str | None
) -> None:
    """Check that our chat loop sends one turn and a harness of the library two, and that the journal has the sent tokens."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    task = {"type": "verifiers", "taskset": "echo_taskset", "train_size": 3, "heldout_size": 1}
    changes = {
        "task": {**task, "harness": harness},
        "rollout.n": 4,
        "rollout.max_new_tokens": 32,
        "rollout.episodes": {"at_once": 16, "seconds": 120},
        "train.steps": 2,
        "train.prompts_per_step": 3,
        "evaluation.prompts": 0,
    }
    learned = rows(toy_run(models, tmp_path, changes).folder / "rollouts.jsonl")
    ended = [row for row in learned if row["stop_reason"] == "stop"]
    assert ended and {row["reward"] for row in ended} <= {0.0, 1.0}
    turns = {sum(turn["role"] == "assistant" for turn in row["turns"]) for row in ended}
    assert turns == ({1} if harness is None else {2})
    RESULTS[f"live, {harness or 'chat loop'}"] = {
        "conversations": len(learned),
        "ended": len(ended),
        "went on from another text": sum(
            "continues a different text" in row.get("notes", {}).get("error", "") for row in learned
        ),
    }
