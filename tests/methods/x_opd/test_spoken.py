"""Spoken digits can be heard, and a student that hears them learns more than one that hears silence."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import said

from practicum.methods.x_opd.spoken import HIGH, LOW, SECONDS, Config, build
from practicum.pictures import load_picture
from practicum.ports import TaskContext
from practicum.recipe import load_recipe
from practicum.runs import run
from practicum.sounds import RATE
from practicum.types import Prompt, Rollout


def hear(prompt: Prompt) -> int:
    """Return the digit of a sound, by the loudest of the frequencies of each kind."""
    samples = load_picture(prompt.messages[0].images[0])[1]
    power = np.abs(np.fft.rfft(samples))

    def measure(frequency: int) -> float:
        return power[round(0.96 * frequency * SECONDS) : round(1.04 * frequency * SECONDS)].max()

    low, high = (max(range(len(kind)), key=lambda n: measure(kind[n])) for kind in (LOW, HIGH))
    return 3 * high + low


@given(st.integers(0, 2**32))
def test_the_transcript_is_what_the_sound_says(seed: int) -> None:
    questions = build(Config(train_size=4, heldout_size=2), TaskContext(seed, Path()))
    for prompt in (*questions.train_prompts(), *questions.heldout_prompts()):
        digit = int(prompt.privileged["transcript"])
        assert hear(prompt) == digit
        assert questions.reward(Rollout.from_text(prompt, str(digit**2))) == 1


def test_silence_has_the_same_questions_and_one_sound() -> None:
    spoken, silent = (
        build(Config(silent=silent, train_size=30), TaskContext(0, Path())).train_prompts()
        for silent in (False, True)
    )
    assert [prompt.privileged for prompt in spoken] == [prompt.privileged for prompt in silent]
    (sound,) = {prompt.messages[0].images[0] for prompt in silent}
    samples = load_picture(sound)[1]
    assert len(samples) == SECONDS * RATE and not samples.any()
    assert len({prompt.messages[0].images[0] for prompt in spoken}) == 30


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_recipe_gains_more_than_with_silence(seed: int, tmp_path: Path) -> None:
    def measure_gain(*changes: str) -> dict[str, float]:
        recipe = load_recipe("papers/x-opd", [f"seed={seed}", *changes])
        return run(recipe, out=tmp_path / str(len(changes)), progress=False).summary["gain"]

    # The intervals do not even overlap.
    assert measure_gain()["low"] > measure_gain("task.silent=true")["high"]


@pytest.mark.long
def test_a_plan_counts_the_tokens_of_sounds(tmp_path: Path) -> None:
    status, text = said(tmp_path, "plan", "papers/x-opd")
    assert status == 0, text
    assert "it fits" in text
