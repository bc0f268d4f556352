"""The base models that are served: loaded when first asked for, let go by the least recent use where memory is bounded."""

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

from practicum.errors import ResourceError
from practicum.models.config import ModelConfig
from practicum.models.files import fingerprint
from practicum.models.sources import locate
from practicum.ports.hosting import Hosted
from practicum.runs.assembly import host_model

MIB = 2**20
UNKNOWN_CONTEXT = 2**17
"""Tokens of context of a model whose configuration is not on this machine."""

log = logging.getLogger(__name__)


class ModelCache:
    """Models by the name under which they are served; used on the worker's thread alone.

    `memory` bytes hold the weights of the base models together; `evicted` is told before one of them is let go.
    """

    def __init__(self, served: Mapping[str, ModelConfig], memory: int | None) -> None:
        self.served = dict(served)
        self.evicted: list[Callable[[str], None]] = []
        self._memory = memory
        self._loaded: OrderedDict[str, Hosted] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._fingerprints: dict[str, str] = {}

    @property
    def loaded(self) -> list[str]:
        """What is in memory, the least recently used first."""
        return list(self._loaded)

    def known(self, name: str) -> Hosted | None:
        """The model if it is in memory; asking so does not count as a use."""
        return self._loaded.get(name)

    def get(self, name: str) -> Hosted:
        """The model, loaded if need be; ResourceError where it is larger than the memory of all."""
        if name not in self._loaded:
            self._make_room(self._sizes.get(name, _size_on_disk(self.served[name])))
            log.info(f"loading {name}")
            self._loaded[name] = loaded = host_model(self.served[name])
            self._sizes[name] = size = loaded.size
            if self._memory is not None and size > self._memory:
                del self._loaded[name]
                raise ResourceError(
                    f"{name} takes {size / MIB:.0f} MiB and --memory is {self._memory / MIB:.0f} MiB; raise it or serve "
                    "a smaller model"
                )
            self._make_room(0, keep=name)
        self._loaded.move_to_end(name)
        return self._loaded[name]

    def fits(self, name: str) -> bool:
        """Return whether the model can be had without letting another go."""
        if self._memory is None or name in self._loaded:
            return True
        size = self._sizes.get(name)
        return (
            size is not None
            and sum(self._sizes[other] for other in self._loaded) + size <= self._memory
        )

    @cached_property
    def longest_context(self) -> int:
        """How many tokens the longest text has that one of the models reads, as their folders say."""
        return max(_context(config) for config in self.served.values())

    def fingerprint(self, name: str) -> str:
        """SHA-256 over the files of a model, read once."""
        if name not in self._fingerprints:
            self._fingerprints[name] = fingerprint(self.get(name).source)
        return self._fingerprints[name]

    def _make_room(self, size: int, keep: str | None = None) -> None:
        if self._memory is None:
            return
        while (
            self._loaded and sum(self._sizes[name] for name in self._loaded) + size > self._memory
        ):
            oldest = next(iter(self._loaded))
            if oldest == keep:
                return
            for tell in self.evicted:
                tell(oldest)
            del self._loaded[oldest]
            log.info(f"let go of {oldest}")


def _context(config: ModelConfig) -> int:
    """Return the length of the longest text in tokens, or what few models exceed where no file of this machine tells."""
    settings = Path(locate(config)) / "config.json"
    if not settings.is_file():
        return UNKNOWN_CONTEXT
    described = json.loads(settings.read_bytes())
    return int(
        described.get("text_config", described).get("max_position_embeddings") or UNKNOWN_CONTEXT
    )


def _size_on_disk(config: ModelConfig) -> int:
    """About how large a model will be, where its folder tells."""
    folder = Path(str(config.model))
    return (
        sum(path.stat().st_size for path in folder.glob("*.safetensors")) if folder.is_dir() else 0
    )
