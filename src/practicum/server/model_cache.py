"""Hold the served base models: loaded on demand, the least recently used evicted."""

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

from practicum.errors import ResourceError
from practicum.models.config import ModelConfig
from practicum.models.digests import compute_fingerprint
from practicum.models.sources import find_base, locate
from practicum.ports.hosting import Hosted
from practicum.runs.opening import host_model

MIB = 2**20
DEFAULT_CONTEXT = 2**17
"""The assumed context length in tokens if a model's configuration is not on this machine."""

log = logging.getLogger(__name__)


class ModelCache:
    """Models by the name under which they are served; used only on the worker's thread.

    `memory` bounds the bytes of all weights. Each callback of `on_evict` runs before a model is
    dropped.
    """

    def __init__(self, served: Mapping[str, ModelConfig], memory: int | None) -> None:
        self.served = dict(served)
        self.on_evict: list[Callable[[str], None]] = []
        self._memory = memory
        self._loaded: OrderedDict[str, Hosted] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._fingerprints: dict[str, str] = {}

    def peek(self, name: str) -> Hosted | None:
        """Return the model if it is in memory, without counting a use."""
        return self._loaded.get(name)

    def get(self, name: str) -> Hosted:
        """Return the model, loaded if necessary; raise ResourceError if it exceeds the memory."""
        if name not in self._loaded:
            # Room is made before loading, by the size on disk until the true size is known.
            self._evict(self._sizes.get(name, _estimate_size(self.served[name])))
            log.info(f"loading {name}")
            self._loaded[name] = loaded = host_model(self.served[name])
            # The true size is known only now: what did not fit after all is evicted afterwards.
            self._sizes[name] = size = loaded.size
            if self._memory is not None and size > self._memory:
                del self._loaded[name]
                raise ResourceError(
                    f"{name} takes {size / MIB:.0f} MiB and --memory is {self._memory / MIB:.0f} "
                    "MiB; raise it or serve a smaller model"
                )
            self._evict(0, keep=name)
        self._loaded.move_to_end(name)
        return self._loaded[name]

    def fits(self, name: str) -> bool:
        """Return True if the model can be loaded without evicting another."""
        if self._memory is None or name in self._loaded:
            return True
        # A size that is not known yet may be too large: such a model is loaded with nothing at work.
        size = self._sizes.get(name)
        return size is not None and self._loaded_bytes + size <= self._memory

    @property
    def _loaded_bytes(self) -> int:
        return sum(self._sizes[name] for name in self._loaded)

    @cached_property
    def longest_context(self) -> int:
        """Return the largest context length of all models in tokens, from their folders."""
        return max(_read_context_length(config) for config in self.served.values())

    def compute_fingerprint(self, name: str) -> str:
        """Return the SHA-256 of the model's files, computed once."""
        if name not in self._fingerprints:
            self._fingerprints[name] = compute_fingerprint(self.get(name).source)
        return self._fingerprints[name]

    def _evict(self, size: int, keep: str | None = None) -> None:
        if self._memory is None:
            return
        while self._loaded and self._loaded_bytes + size > self._memory:
            oldest = next(iter(self._loaded))
            if oldest == keep:
                return
            for notify in self.on_evict:
                notify(oldest)
            del self._loaded[oldest]
            log.info(f"let go of {oldest}")


def _read_context_length(config: ModelConfig) -> int:
    """Return the context length in tokens from the model's configuration file.

    Without the file return a length that few models exceed.
    """
    settings = Path(find_base(locate(config))) / "config.json"
    if not settings.is_file():
        return DEFAULT_CONTEXT
    config_json = json.loads(settings.read_bytes())
    # Models that also read images nest the settings of their text half.
    text_config = config_json.get("text_config", config_json)
    return int(text_config.get("max_position_embeddings") or DEFAULT_CONTEXT)


def _estimate_size(config: ModelConfig) -> int:
    """Return the size of the weight files in bytes, 0 if the model is not a folder."""
    folder = Path(str(config.model))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
