"""Sounds in prompts: reading a file to samples, and writing samples as a file."""

# Without torch, as `practicum.pictures`.

import io
import wave
from typing import TYPE_CHECKING, Any

from practicum.errors import DataError

if TYPE_CHECKING:
    import numpy as np

RATE = 16_000
"""Samples per second, as all families of models that are read take them."""

SHORTEST, LONGEST = 0.1, 30.0
"""Seconds. A shorter sound may have no token, and Whisper's encoder reads windows of 30."""


def open_sound(content: bytes) -> "np.ndarray":
    """Return a sound's samples from -1 to 1, its channels averaged.

    DataError if the file is damaged, of another rate or format, or too short or long.
    """
    is_wave = content[:4] == b"RIFF" and content[8:12] == b"WAVE"
    samples, rate = _read_wave(content) if is_wave else _read_other(content)
    if rate != RATE:
        raise DataError(
            f"the sound has {rate} samples per second, and {RATE} are read; convert it, for example "
            f"with ffmpeg -i IN -ar {RATE} OUT.wav"
        )
    if not SHORTEST <= len(samples) / RATE <= LONGEST:
        raise DataError(
            f"the sound has {len(samples) / RATE:.2f} seconds, and {SHORTEST} to {LONGEST:g} are read; "
            "cut it"
        )
    return samples


def _read_wave(content: bytes) -> "tuple[np.ndarray, int]":
    """Return the samples of a WAV file, and how many there are per second."""
    import numpy as np

    try:
        with wave.open(io.BytesIO(content)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            frames, count = file.readframes(file.getnframes()), file.getnframes()
    except (wave.Error, EOFError) as error:
        raise DataError(f"the sound is damaged, or no PCM ({error}); save it again") from None
    if width not in (2, 4) or len(frames) != count * width * channels:
        reason = (
            f"has {8 * width} bits" if width not in (2, 4) else "is damaged, its end is missing"
        )
        raise DataError(f"the sound {reason}; save it with 16 bits")
    samples = np.frombuffer(frames, f"<i{width}").reshape(-1, channels).mean(axis=1)
    return (samples / 2 ** (8 * width - 1)).astype(np.float32), rate


def _read_other(content: bytes) -> "tuple[np.ndarray, int]":
    """Return the samples of a file of another format, with the package soundfile."""
    try:
        import soundfile  # type: ignore[import-not-found]
    except ImportError:
        raise DataError(
            "the file is no WAV; convert it, or install the package soundfile"
        ) from None
    try:
        samples, rate = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise DataError(f"the file is no sound that is read ({error}); save it as WAV") from None
    return samples.mean(axis=1), rate


def write_sound(samples: Any, rate: int = RATE) -> bytes:
    """Return samples from -1 to 1 as a WAV file of 16 bits; ValueError for other samples."""
    import numpy as np

    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or not (abs(values) <= 1).all():
        raise ValueError("a sample is not within -1 to 1")
    if rate not in range(1, 1_000_000):
        raise ValueError(f"{rate!r} is no number of samples per second")
    pulses = np.round(values * 32767).astype("<i2")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(pulses.tobytes())
    return buffer.getvalue()
