"""Answers that student and teacher of the toy pair write together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from toy import toy_recipe

from practicum.objective import Full
from practicum.rollouts import (
    RolloutBatch,
    RolloutWriters,
    SourceChoice,
    collect_rollouts,
)
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.types import Rollout, SamplingParams, ScoreRequest

Write = Callable[..., list[Rollout]]


@pytest.fixture(scope="package")
def built(models: Path, tmp_path_factory: pytest.TempPathFactory) -> RunComponents:
    return assemble_run(toy_recipe(models), tmp_path_factory.mktemp("models"))


@pytest.fixture
def write(built: RunComponents) -> Write:
    """Write two answers to each of six prompts from a source."""

    def collect(source: str, seed: int = 0, **params: Any) -> list[Rollout]:
        parts = built.parts
        writers = RolloutWriters(
            built.trainer.build_sampling_client(), parts.teacher, parts.renderer, task=parts.task
        )
        settings = {"max_new_tokens": 8, "stop_ids": parts.renderer.stop_ids, **params}
        return collect_rollouts(
            RolloutBatch(parts.prompts[:6], 2, seed, 3),
            TypeAdapter(SourceChoice).validate_python(source),
            writers,
            SamplingParams(**settings),
        )

    return collect


@pytest.fixture
def both(built: RunComponents) -> Callable[[Rollout], tuple[Any, Any]]:
    """Return a function to the student's and the teacher's own distributions at a rollout's tokens, [T, V]."""

    def score(rollout: Rollout) -> tuple[Any, Any]:
        request = ScoreRequest(rollout.prompt_tokens, tuple(rollout.tokens.tolist()))
        (student,) = built.trainer.build_sampling_client().score([request], Full())
        (teacher,) = built.parts.teacher.score([rollout], Full())
        return tuple(side.head.logprobs(side.hidden).double().cpu() for side in (student, teacher))

    return score
