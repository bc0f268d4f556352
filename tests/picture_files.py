"""Small pictures as files and as `data:` URLs."""

import base64
import io
from pathlib import Path

import numpy as np
from PIL import Image


def draw_picture(seed: int, width: int = 56, height: int = 56) -> Image.Image:
    """Return a picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encode_picture(picture: Image.Image, kind: str = "PNG") -> bytes:
    """Return the bytes of a picture's file."""
    buffer = io.BytesIO()
    picture.save(buffer, kind)
    return buffer.getvalue()


def write_url(picture: Image.Image) -> str:
    """Return a picture as a `data:` URL."""
    return f"data:image/png;base64,{base64.b64encode(encode_picture(picture)).decode()}"


def write_file(folder: Path, name: str, seed: int = 0) -> str:
    """Write a picture into a folder and return its path within it."""
    (folder / name).write_bytes(encode_picture(draw_picture(seed)))
    return name
