"""Short sounds as files and as `data:` URLs."""

import numpy as np

from practicum.pictures import encode_bytes
from practicum.sounds import RATE, write_sound


def make_sound(seed: int, seconds: float = 0.2, rate: int = RATE) -> bytes:
    """Return a WAV file of noise that grows louder or quieter in steps."""
    draw = np.random.default_rng(seed)
    loudness = np.repeat(draw.uniform(0, 0.5, 10), round(seconds * rate) // 10)
    return write_sound(loudness * draw.uniform(-1, 1, len(loudness)), rate)


def write_sound_url(seed: int, seconds: float = 0.2) -> str:
    """Return a sound as a `data:` URL."""
    return encode_bytes(make_sound(seed, seconds), "audio")
