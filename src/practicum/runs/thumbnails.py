"""Small copies of the pictures that a run's texts show, for its page.

They are in the folder `pictures`, in files that are named by the SHA-256 of the picture's own file.
"""

import hashlib
import io
import logging
from collections.abc import Iterable
from pathlib import Path

from practicum.errors import DataError
from practicum.pictures import (
    FOLDER,
    PictureReader,
    identify,
    is_picture,
    is_sound,
    load_bytes,
    open_picture,
)
from practicum.run_dir import prepare_folder, write_bytes
from practicum.types import Rollout

log = logging.getLogger(__name__)

LONGER_SIDE = 160
"""The pixels of a small copy's longer side, at most."""

MOST_COPIES = 5000
"""The number of small copies of a run, because an environment may draw a picture in every turn."""


class Thumbnails:
    """The small copies of one run; each is written when a rollout first has its picture."""

    def __init__(self, run: Path, reader: PictureReader | None) -> None:
        self._folder = run / FOLDER
        self._reader = reader
        self._known = set[int]()

    def write(self, rollouts: Iterable[Rollout]) -> None:
        """Write the new pictures of prompts and of environments' turns."""
        if self._reader is None:
            return
        for rollout in rollouts:
            tokens = {*rollout.prompt_tokens, *rollout.tokens.tolist()}
            for number in sorted(set(filter(is_picture, tokens)) - self._known):
                if len(self._known) == MOST_COPIES:
                    return
                self._known.add(number)
                if len(self._known) == MOST_COPIES:
                    log.info(f"the first {MOST_COPIES} pictures have small copies for the page")
                image = self._reader.find(number)
                # A stored text may have the numbers of an earlier run's pictures.
                if image is not None and not is_sound(image):
                    self._write(number, image)

    def _write(self, number: int, image: str) -> None:
        try:
            content = load_bytes(image)
            path = self._folder / f"{hashlib.sha256(content).hexdigest()}.jpg"
            if identify(content) == number and not path.is_file():
                if not self._folder.is_dir():
                    prepare_folder(self._folder)
                write_bytes(path, _shrink(content))
        except DataError as error:
            log.warning(f"the page shows no copy of a picture: {error}")


def _shrink(content: bytes) -> bytes:
    picture, file = open_picture(content), io.BytesIO()
    picture.thumbnail((LONGER_SIDE, LONGER_SIDE))
    picture.save(file, "JPEG", quality=85)
    return file.getvalue()
