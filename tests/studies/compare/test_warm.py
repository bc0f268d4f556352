"""Runs that are forked by a warm process: the bytes of cold runs, and a crash that affects no other run."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy import JOURNALS, environment, make_model, rows, toy_data

from practicum.recipe import load_recipe, resolve_recipe
from practicum.runs.warm import WarmStarter
from practicum.studies.compare.run_jobs import RunJob, open_starter, start_run


@pytest.fixture
def starter() -> Iterator[WarmStarter]:
    starter = WarmStarter(environment())
    yield starter
    starter.close()


@pytest.mark.long
def test_a_crash_ends_neither_the_other_runs_nor_the_next(
    starter: WarmStarter, tmp_path: Path
) -> None:
    waiting = starter.start(["check", "smoke/toy"], tmp_path / "first.log")
    crashed = starter.start(["check", "smoke/toy"], tmp_path / "second.log")
    os.kill(crashed.pid, signal.SIGSEGV)
    assert crashed.wait() == -signal.SIGSEGV
    assert waiting.wait() == 0 and "no mistakes found" in (tmp_path / "first.log").read_text()
    wrong = starter.start(["run", "nowhere.yaml"], tmp_path / "third.log")
    assert wrong.wait() == 2 and wrong.poll() == 2
    assert "error: no recipe 'nowhere.yaml'" in (tmp_path / "third.log").read_text()
    ended = starter.start(["check", "smoke/toy"], tmp_path / "fourth.log")
    ended.kill()
    assert ended.wait() == -signal.SIGKILL
    # The process that starts runs may die, too: the next run has a new one.
    assert starter._process is not None
    starter._process.kill()
    again = starter.start(["check", "smoke/toy"], tmp_path / "fifth.log")
    assert again.wait() == 0


@pytest.mark.slow
def test_a_warm_run_writes_the_bytes_of_a_cold_one(tmp_path: Path) -> None:
    """Check the first run, the second, which inherits changes of the first, and a new Python."""
    make_model(tmp_path / "teacher", seed=2, pretrain=20)
    scratch = {"hidden_size": 16, "layers": 1, "heads": 2, "pretrain": {"steps": 5}}
    changes = {"student.model": scratch, "evaluation": {"prompts": 4, "every": 2}}
    recipe = tmp_path / "toy.yaml"
    recipe.write_text(json.dumps(toy_data(tmp_path, changes)))
    resolved = resolve_recipe(load_recipe(recipe, ["name=seed-0"]))
    jobs = [RunJob(arm, 0, resolved, tmp_path / "runs") for arm in ("first", "second", "cold")]
    with open_starter() as starter:
        assert starter is not None
        for job in jobs[:2]:
            assert start_run(job, starter).wait() == 0, job.log_path.read_text()
    assert start_run(jobs[2], None).wait() == 0
    first, second, cold = (job.folder for job in jobs)
    for warm in (first, second):
        for name in (*JOURNALS, "summary.json", "before.json", "after.json"):
            assert (warm / name).read_bytes() == (cold / name).read_bytes(), name
        for path in cold.glob("**/*.safetensors"):
            assert (warm / path.relative_to(cold)).read_bytes() == path.read_bytes(), path
    assert rows(cold / "metrics.jsonl")
