"""A from-scratch model that reads pictures learns from them before the run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from practicum.backends.local.loading import add_pictures, load
from practicum.backends.local.packing import compute_hidden_states
from practicum.backends.local.scratch import prepare_scratch_folder
from practicum.models.config import ModelConfig, PretrainConfig, ScratchConfig
from practicum.ports import Task, TaskContext
from practicum.prompts import Prompt
from practicum.rows import PromptSet
from practicum.tasks.shapes import Config, build
from practicum.types import ScoreRequest


@pytest.fixture(scope="module")
def task() -> Task:
    """Return four questions with the same text and other answers."""
    prompts = build(Config(train_size=60, heldout_size=0), TaskContext(0, Path())).train_prompts()
    by_answer = {prompt.answer: prompt for prompt in prompts if prompt.domain == "left?"}
    return PromptSet(train=list(by_answer.values())[:4], heldout=[])


def compute_loss(folder: Path, prompts: list[Prompt]) -> float:
    """Return the mean cross-entropy of the answers."""
    loaded = add_pictures(load(ModelConfig(model=str(folder))))
    requests = [
        ScoreRequest(
            loaded.renderer.render(prompt.messages),
            tuple(loaded.renderer.encode(prompt.answer or "")),
        )
        for prompt in prompts
    ]
    with torch.no_grad():
        states = compute_hidden_states(loaded.language_model, requests)
        logprobs = loaded.language_model.head().logprobs(states)
    tokens = torch.tensor([token for request in requests for token in request.tokens])
    return -logprobs.gather(1, tokens[:, None]).mean().item()


def build_folder(folder: Path, task: Task, **settings: Any) -> Path:
    config = ScratchConfig(
        architecture="llava", pretrain=PretrainConfig(batch=4, learning_rate=0.001, **settings)
    )
    return prepare_scratch_folder(folder, config, task)


@pytest.mark.long
def test_pretraining_reads_the_pictures(task: Task, tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "model", task, steps=400)
    prompts = list(task.train_prompts())
    # With each other's pictures the same questions have wrong answers.
    shuffled = [
        replace(prompt, messages=prompts[number - 1].messages)
        for number, prompt in enumerate(prompts)
    ]
    assert 5 * compute_loss(folder, prompts) < compute_loss(folder, shuffled)


def test_the_same_settings_give_the_same_bytes(task: Task, tmp_path: Path) -> None:
    folders = [build_folder(tmp_path / name, task, steps=2) for name in "ab"]
    first, again = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert first == again
