"""Pictures and sounds in prompts: where they lie, whether they can be read, and the tokens that stand for them.

A message names its pictures as texts, a path or a `data:` URL, and `<image>` marks their places. A sound
is a path behind `audio:`, or a `data:` URL of audio, and `<audio>` marks its place.
"""

# Without torch, as `practicum.prompts`.

import base64
import binascii
import hashlib
import io
import re
import struct
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import error as ZlibError

from practicum.errors import DataError, suggest_install
from practicum.prompts import Message
from practicum.sounds import open_sound

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE = "<image>"
"""The place of a picture in a message's text, as LLaMA-Factory and ms-swift write it."""

AUDIO = "<audio>"
"""The place of a sound."""

SOUND = "audio:"
"""The text before a sound's path, which tells it from a picture's."""

MOST_PIXELS = 1 << 25
"""The pixels of the largest picture, 8K; a small file may unpack to more than memory holds."""

MOST_BYTES = 1 << 26

FOLDER = "pictures"
"""The folder of a run with small copies of its pictures."""

FIRST_PICTURE = 1 << 52
"""The least id of a picture's tokens. JSON readers hold ids below 2**53 exactly."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""The formats that are read; pillow runs programs for some further formats."""

_DATA_URL = re.compile(r"data:(image|audio)/[\w.+-]+;base64,")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PictureReader:
    """Turns a picture or a sound, as `mark` says, into the tokens that one model reads in its place.

    `place` is the text that the model's chat template writes for a picture, and the placeholders among
    the tokens have the id that `identify` gives. `find` returns the picture of an id, None if no
    renderer of this process has read it.
    """

    place: str
    read: Callable[[str], tuple[int, ...]]
    find: Callable[[int], str | None]
    mark: str = IMAGE


def is_sound(image: str) -> bool:
    """Return True if a message's medium is a sound."""
    return image.startswith((SOUND, "data:audio/"))


def get_mark(image: str) -> str:
    """Return the text that marks the place of a medium."""
    return AUDIO if is_sound(image) else IMAGE


def is_picture(token: Any) -> Any:
    """Return True for the id of a picture's placeholder, or a mask for a tensor of ids."""
    return token >= FIRST_PICTURE


def fill_pictures(tokens: Any) -> Any:
    """Return a tensor of ids with token 0 in place of pictures, to index a vocabulary with.

    The pictures of an environment have no log-probability, and the number at them is not used.
    """
    return tokens.masked_fill(is_picture(tokens), 0)


def identify(content: bytes) -> int:
    """Return the token that stands for a picture: 48 bits of the SHA-256 of its file.

    Tokens of two pictures differ, so prompts with the same text and other pictures do too (as the
    pad values of SGLang).
    """
    return identify_digest(hashlib.sha256(content).hexdigest())


def identify_digest(sha256: str) -> int:
    """Return the token that stands for a picture with this SHA-256, in hexadecimal."""
    return FIRST_PICTURE | int(sha256[:12], 16)


def list_ids(messages: Iterable[Message]) -> list[int]:
    """Return the tokens that stand for the pictures of messages, which identify their files."""
    return [identify(load_bytes(image)) for message in messages for image in message.images]


def encode_bytes(content: bytes, mime: str = "image") -> str:
    """Return a file as a `data:` URL of a picture, or of a sound with `audio`."""
    return f"data:{mime}/any;base64,{base64.b64encode(content).decode()}"


def load_bytes(image: str) -> bytes:
    """Return the bytes of a medium's file; DataError if it is missing, remote or too large."""
    kind, mime = ("sound", "audio") if is_sound(image) else ("picture", "image")
    image = image.removeprefix(SOUND)
    match = _DATA_URL.match(image)
    # The end of a path tells more than its start.
    name = image[:60] if match else image[-200:]
    if match is None and (scheme := _SCHEME.match(image)):
        raise DataError(
            f"{kind} {name!r}: {scheme[0]} is not read, only files and "
            f"data:{mime}/...;base64, texts; download the {kind} and give its path"
        )
    try:
        if match is not None:
            content = base64.b64decode(image[match.end() :], validate=True)
        else:
            path = Path(image)
            content = b"" if path.stat().st_size > MOST_BYTES else path.read_bytes()
    except (OSError, ValueError) as error:
        reason = "is not base64" if isinstance(error, binascii.Error) else "cannot be read"
        raise DataError(
            f"{kind} {name!r} {reason} ({error}); paths start at the folder of the rows' file"
        ) from None
    if not content or len(content) > MOST_BYTES:
        raise DataError(
            f"{kind} {name!r} is empty or has over {MOST_BYTES >> 20} MiB; save it smaller"
        )
    return content


def open_picture(content: bytes) -> "Image":
    """Return a picture upright and in RGB; DataError if it is damaged, too large or animated."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise DataError(
            f"pictures need the package pillow; {suggest_install('pictures')}"
        ) from error
    limit = f"has over {MOST_PIXELS >> 20} megapixels; save it smaller"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(content), formats=FORMATS)
        if picture.width * picture.height > MOST_PIXELS:
            raise DataError(f"the picture of {picture.width} x {picture.height} pixels {limit}")
        # The second frame of a camera's MPO file is another view, and no motion.
        if picture.format != "MPO" and _has_second_frame(picture):
            raise DataError("the picture is animated; save the frame that is meant")
        return ImageOps.exif_transpose(picture).convert("RGB")
    except Image.DecompressionBombError:
        raise DataError(f"the picture {limit}") from None
    except UnidentifiedImageError:
        kinds = ", ".join(FORMATS)
        raise DataError(f"the file is no picture that is read ({kinds}); convert it") from None
    # Decoders of damaged files raise errors of many kinds.
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, ZlibError) as error:
        raise DataError(
            f"the picture is damaged ({type(error).__name__}: {error}); copy it again"
        ) from None


def _has_second_frame(picture: "Image") -> bool:
    try:
        picture.seek(1)
    except EOFError:
        return False
    return True


def load_picture(image: str) -> tuple[int, Any]:
    """Return the token that stands for a picture or a sound, and its pixels or samples."""
    content = load_bytes(image)
    return identify(content), open_sound(content) if is_sound(image) else open_picture(content)


def hide_places(text: str) -> str:
    """Return a text that stands next to pictures, with its `<image>` no longer places of them."""
    for mark in (IMAGE, AUDIO):
        text = text.replace(mark, f"< {mark[1:]}")
    return text


def list_places(content: str, images: Iterable[str]) -> list[str]:
    """Return the marks in a text next to media, without the marks of a kind that none of them has."""
    return re.findall("|".join({get_mark(image) for image in images}) or "(?!)", content)


def split_text(content: str, images: Sequence[str]) -> list[str]:
    """Return the texts around a message's pictures."""
    marks = [get_mark(image) for image in images]
    assert list_places(content, images) == marks, "rows with other places were rejected"
    return re.split("|".join(set(marks)), content) if images else [content]
