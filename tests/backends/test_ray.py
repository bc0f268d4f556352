"""A run over the processes of a Ray cluster is the run of one process."""

from pathlib import Path
from typing import Any

import pytest
from toy import rows, toy_run

from .ray_session import cluster

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("cluster"),
    # Ray's own threads and sockets, which it closes in its own time.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
assert cluster
SIZES = {"train.prompts_per_step": 12, "evaluation.prompts": 8}


def on_ray(trainers: int = 2, **settings: Any) -> dict[str, Any]:
    return SIZES | {"backend": {"type": "ray", "trainers": trainers, **settings}}


def assert_close_runs(one: Path, other: Path) -> None:
    """Two runs have the same tokens, and metrics within 1e-6."""
    for mine, theirs in zip(
        rows(one / "rollouts.jsonl"), rows(other / "rollouts.jsonl"), strict=True
    ):
        assert mine["tokens"] == theirs["tokens"]
    pairs = zip(rows(one / "metrics.jsonl"), rows(other / "metrics.jsonl"), strict=True)
    for mine, theirs in pairs:
        assert mine.keys() == theirs.keys()
        for name, number in mine.items():
            assert theirs[name] == pytest.approx(number, rel=1e-6, abs=1e-6), name


@pytest.fixture(scope="module")
def single(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_run(models, tmp_path_factory.mktemp("single"), SIZES).folder


@pytest.fixture(scope="module")
def double(models: Path, tmp_path_factory: pytest.TempPathFactory, cluster: None) -> Path:
    return toy_run(models, tmp_path_factory.mktemp("double"), on_ray()).folder


def test_two_trainers_give_the_run_of_one_process(single: Path, double: Path) -> None:
    assert_close_runs(single, double)
