"""Sounds come back from their files, and files that cannot be read are refused in one line."""

import io
import sys
import wave
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sound_files import make_sound

from practicum.errors import DataError
from practicum.sounds import RATE, open_sound, write_sound


def write_pcm(data: bytes, width: int, channels: int = 1) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((channels, width, RATE, 0, "NONE", ""))
        file.writeframes(data)
    return buffer.getvalue()


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=9))
def test_samples_survive_a_file(samples: list[float]) -> None:
    samples *= 1600
    np.testing.assert_allclose(open_sound(write_sound(samples)), samples, atol=1e-4)


def test_channels_are_averaged_and_wide_samples_are_scaled() -> None:
    pairs = np.tile(np.array([2**30, 0], dtype="<i4"), 2000)
    np.testing.assert_allclose(open_sound(write_pcm(pairs.tobytes(), 4, 2)), 0.25)


WHOLE = make_sound(0)
BAD = [
    (WHOLE[:-100], "is damaged, its end is missing"),
    (WHOLE[:30], "is damaged, or no PCM"),
    (WHOLE.replace(b"\x10\x00data", b"\x08\x00data"), "has 8 bits; save it with 16 bits"),
    (WHOLE.replace(b"fmt \x10\0\0\0\1", b"fmt \x10\0\0\0\3"), r"no PCM \(unknown format: 3\)"),
    (make_sound(0, rate=8000), "has 8000 samples per second, and 16000 are read; convert it"),
    (make_sound(0, 0.05), "has 0.05 seconds, and 0.1 to 30 are read"),
    (make_sound(0, 31), "has 31.00 seconds"),
    (b"fLaC and more", "the file is no WAV; convert it, or install the package soundfile"),
]


@pytest.mark.parametrize(("content", "reason"), BAD)
def test_a_bad_file_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        open_sound(content)


@pytest.mark.parametrize("samples", [[2.0], [float("nan")], [[0.1]], ["a"]])
def test_other_samples_are_refused(samples: list[float]) -> None:
    with pytest.raises(ValueError, match=r"not within|not convert"):
        write_sound(samples)


@pytest.mark.parametrize("rate", [0, -1, 10**12, "16000"])
def test_other_rates_are_refused(rate: int) -> None:
    with pytest.raises(ValueError, match="is no number of samples per second"):
        write_sound([0.5], rate)


def test_other_formats_are_read_with_soundfile(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(file: io.BytesIO, dtype: str, always_2d: bool) -> tuple[np.ndarray, int]:
        if file.read() == b"OggS":
            return np.full((RATE, 2), [0.5, 0.0], dtype), RATE
        raise RuntimeError("unknown")

    double = SimpleNamespace(read=read, LibsndfileError=RuntimeError)
    monkeypatch.setitem(sys.modules, "soundfile", double)
    np.testing.assert_array_equal(open_sound(b"OggS"), np.full(RATE, 0.25))
    with pytest.raises(DataError, match=r"is no sound that is read \(unknown\); save it as WAV"):
        open_sound(b"text")
