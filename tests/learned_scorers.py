"""Scorers that learn, and short answers for them to learn from."""

import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from toy import rows, toy_recipe

from practicum.errors import Interrupted
from practicum.ports.scoring import Scorer
from practicum.runs import run
from practicum.runs.assembly import assemble_run
from practicum.types import Message, Prompt, Rollout

GENERATOR = torch.Generator()


def build_scorer(models: Path, folder: Path, **settings: Any) -> Scorer:
    # A discriminator needs the teacher's answers.
    changes = {"rollout.source": "join(teacher)", "rollout.n": 2}
    scorers = {"judge": {"learning_rate": 0.01, **settings}}
    recipe = toy_recipe(models, {**changes, "scorers": scorers})
    return assemble_run(recipe, folder).parts.scorers["judge"]


def stop_and_resume(models: Path, out: Path, changes: dict[str, Any]) -> Path:
    """Do a run that is stopped after its second step and resumed."""
    signals = iter([None, None, signal.SIGINT])
    with suppress(Interrupted):
        run(toy_recipe(models, changes), out=out, stop=lambda: next(signals, None), progress=False)
    assert len(rows(out / "toy" / "metrics.jsonl")) == 2
    return run(toy_recipe(models, changes), out=out, resume=True, progress=False).folder


def write_answer(number: int, token: int, source: Any, reward: float | None = None) -> Rollout:
    """Return an answer of two random tokens and a given one."""
    tokens = torch.randint(0, 4, (3,), generator=GENERATOR)
    tokens[-1] = token
    none = torch.zeros(3)
    return Rollout(
        prompt=Prompt(f"p{number}", (Message("user", "ab"),)),
        prompt_tokens=(1, 2),
        tokens=tokens,
        loss_mask=torch.ones(3, dtype=torch.bool),
        sampling_logprobs=none,
        policy_logprobs=none,
        policy_version=0,
        stop_reason="stop",
        text="",
        reward=reward,
        source=source,
    )
