"""Samplers of a cluster that use vLLM: a double in one process, and the same in a run over Ray."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import curve, rows, toy_recipe, toy_run

from practicum.backends.local import MemoryConfig
from practicum.engines import auto, vllm
from practicum.errors import EngineError, RecipeError
from practicum.models.config import StudentConfig
from practicum.ports.engines import EngineChoice
from practicum.types import SampleRequest, SamplingParams

from .test_engines import install
from .vllm_double import VERSION, VllmServer

pytest.importorskip("ray")
from practicum.backends._sharded.rank_verbs import ModelSettings, ProcessSettings, list_versions
from practicum.backends.ray.processes import ModelProcess
from practicum.backends.ray.references import PackedTensor, WeightsReference

from .ray_session import cluster

assert cluster
PARAMS = SamplingParams(6, 1.0, stop_ids=frozenset({0}))
REQUESTS = [SampleRequest((3, 4, 5), 7), SampleRequest((5, 4), 8)]


@dataclass(frozen=True)
class Weights(WeightsReference):
    """Weights that need no object store."""

    given: Any = None

    def fetch(self) -> dict[str, PackedTensor]:
        return self.given


def start(models: Path, engine: Any) -> ModelProcess:
    settings = ProcessSettings(list_versions(), torch.get_num_threads(), MemoryConfig(), "")
    choice = None if engine is None else pickle.loads(pickle.dumps(EngineChoice(engine, 64)))
    config = StudentConfig(model=str(models / "student"))
    return ModelProcess(settings, ModelSettings(config, None, "student", 0, choice))


def publish(process: ModelProcess, number: int) -> Weights:
    """Return weights that differ from the loaded ones by the number."""
    process.describe()
    model = process._language_model
    assert model is not None
    given = {
        name: PackedTensor.from_tensor(weight + 0.1 * number)
        for name, weight in model.trainable_parameters().items()
    }
    return Weights(number, (), 0, given)


def test_a_sampler_by_an_engine_draws_what_the_local_one_draws(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install(monkeypatch)
    plain, by_engine = start(models, None), start(models, vllm.Config())
    assert by_engine.describe()["decoding"].startswith("vllm 0.32")
    for number in (1, 1, 2):
        weights = publish(plain, 0) if number == 0 else publish(plain, number)
        expected, none = plain.sample(REQUESTS, PARAMS, weights)
        samples, difference = by_engine.sample(REQUESTS, PARAMS, weights)
        assert none is None and difference is not None and difference < 1e-4
        for one, other in zip(expected, samples, strict=True):
            assert one.tokens.equal(other.tokens)
            torch.testing.assert_close(one.policy_logprobs, other.policy_logprobs)
    # A rehearsal, and one transfer for each of the two numbers.
    assert package.made[0].core.loads == 1 + 2


def test_an_engine_that_keeps_its_head_ends_the_run(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, keeps_head=True)
    process = start(models, vllm.Config())
    with pytest.raises(EngineError, match="rehearsal"):
        process.sample(REQUESTS, PARAMS, publish(process, 1))


def test_auto_is_the_local_sampler_on_a_cpu(models: Path, tmp_path: Path) -> None:
    process = start(models, auto.Config())
    facts = process.describe()
    assert facts["decoding"] == start(models, None).describe()["decoding"]
    assert "auto is the local sampler here" in facts["notes"][-1]
    run = toy_run(models, tmp_path, {"rollout.engine": "auto"}).folder
    plain = toy_run(models, tmp_path / "plain").folder
    assert [r["text"] for r in rows(run / "rollouts.jsonl")] == [
        r["text"] for r in rows(plain / "rollouts.jsonl")
    ]
    # Corrected, since another machine would sample by vLLM.
    sampled = {"rollout.engine": "auto", "objective": {"signal": "sampled"}}
    (term,) = toy_recipe(models, sampled).objective.losses
    assert "ratio_truncate" in str(term.correction)


@pytest.mark.parametrize(
    ("engine", "samplers", "words"),
    [
        ({"url": "http://localhost:1", "folder": "/x"}, 2, "set backend.samplers: 1"),
        ({"sleep": True}, 1, "leave sleep out"),
    ],
)
def test_engines_that_samplers_cannot_have(
    engine: dict[str, Any], samplers: int, words: str
) -> None:
    (problem,) = vllm.Config(**engine).list_pool_problems(samplers)
    assert words in problem
    assert auto.Config().list_pool_problems(8) == vllm.Config().list_pool_problems(8) == []


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_over_ray_samples_by_the_engine(models: Path, tmp_path: Path) -> None:
    plain = toy_run(models, tmp_path / "plain").folder
    with VllmServer(models / "student") as server:
        engine = {"type": "vllm", "url": server.url, "folder": str(tmp_path / "weights")}
        changes = {"backend": {"type": "ray"}, "rollout.engine": engine}
        run = toy_run(models, tmp_path / "engine", changes).folder
        shared = changes | {"backend": {"type": "ray", "samplers": 2}}
        with pytest.raises(RecipeError, match=r"write backend\.samplers: 1"):
            toy_run(models, tmp_path / "shared", shared)
    assert [row["tokens"] for row in rows(run / "rollouts.jsonl")] == [
        row["tokens"] for row in rows(plain / "rollouts.jsonl")
    ]
    assert max(curve(run, "canary")) < 1e-4
    assert max(curve(run, "sampler_mismatch")) < 1e-4
    assert f"vllm {VERSION}" in (run / "recipe.json").read_text()
