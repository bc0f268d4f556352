"""Square a spoken digit: it sounds as two tones in noise, and the sound is all that the student gets.

The privileged field `transcript` writes the digit for a teacher that reads text.
"""

from typing import Literal

import numpy as np
from pydantic import Field

from practicum.core.randomness import seed_of
from practicum.pictures import AUDIO, encode_bytes
from practicum.ports import Task, TaskConfig, TaskContext
from practicum.rows import PromptSet
from practicum.sounds import RATE, write_sound
from practicum.types import Message, Prompt

LOW, HIGH = (500, 700, 1000), (1500, 2200, 3200, 4600)
"""Frequencies in Hz: a digit is a pair of them, as on the keys of a telephone."""

SECONDS = 0.2
"""The length of a digit."""


class Config(TaskConfig):
    """The noise of the sounds, and the numbers of questions."""

    type: Literal["spoken"] = "spoken"
    noise: float = Field(
        default=0.1,
        ge=0,
        le=0.5,
        description="standard deviation of the noise; the amplitude of a tone is 0.1 to 0.2",
    )
    silent: bool = Field(default=False, description="silence instead of the sounds, as a control")
    train_size: int = Field(default=512, ge=1, description="sounds to train on")
    heldout_size: int = Field(default=128, ge=0, description="other sounds of the same digits")


def build(config: Config, context: TaskContext) -> Task:
    """Draw the sounds."""
    sizes = {"train": config.train_size, "heldout": config.heldout_size}
    train, heldout = (
        [_build_prompt(config, f"{part}-{number}", context.seed) for number in range(size)]
        for part, size in sizes.items()
    )
    return PromptSet(train, heldout)


def _build_prompt(config: Config, name: str, seed: int) -> Prompt:
    draw = np.random.default_rng(seed_of(seed, "spoken", name))
    digit = int(draw.integers(10))
    samples = _say(digit, config.noise, draw)
    sound = encode_bytes(write_sound(0 * samples if config.silent else samples), "audio")
    return Prompt(
        name,
        (Message("user", f"{AUDIO}=", images=(sound,)),),
        answer=str(digit**2),
        privileged={"transcript": str(digit)},
    )


def _say(digit: int, noise: float, draw: np.random.Generator) -> np.ndarray:
    """Return the samples of a digit, with a pitch, loudness and phases of its own."""
    times = np.arange(round(SECONDS * RATE)) / RATE
    sound = noise * draw.standard_normal(len(times))
    pitch = draw.uniform(0.97, 1.03)
    for frequency in (LOW[digit % 3], HIGH[digit // 3]):
        phase = draw.uniform(0, 2 * np.pi)
        sound += draw.uniform(0.1, 0.2) * np.sin(2 * np.pi * pitch * frequency * times + phase)
    return sound.clip(-1, 1)
