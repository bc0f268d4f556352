"""The pipeline rStar-Math: two rounds of search, where the second asks the process model of the first."""

import json
from pathlib import Path
from typing import Any

import pytest

from practicum.methods.rstar.search import Config as Search
from practicum.runs.pipeline import run
from tests.runs.test_teams import SHORT, loaded

pytestmark = pytest.mark.long

NAME = "pipelines/rstar-math"


def read_metrics(folder: Path, stage: str) -> list[dict[str, Any]]:
    lines = (folder / "stages" / stage / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_first_round_asks_the_verifier_and_the_second_the_process_model() -> None:
    first, second = loaded(NAME).build_recipes().values()
    assert isinstance(first.rollout.source, Search)
    assert isinstance(second.rollout.source, Search)
    assert (first.rollout.source.scorer, second.rollout.source.scorer) == (None, "steps")


def test_the_second_round_begins_with_the_process_model_of_the_first(tmp_path: Path) -> None:
    more = ["student.model.pretrain.steps=150", "train.prompts_per_step=8"]
    result = run(NAME, [*SHORT, *more, "train.steps=2"], out=tmp_path)
    assert [stage["steps"] for stage in result.summary["stages"]] == [2, 2]
    first, second = (read_metrics(result.folder, stage) for stage in ("01-round_1", "02-round_2"))
    assert first[0]["scorer-steps/score"] == 0.5, "a new model prefers no step"
    assert first[-1]["scorer-steps/pairs"] > 0
    assert second[0]["scorer-steps/score"] != 0.5
