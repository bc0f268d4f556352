"""Remove config settings that transformers' cache uses and the model itself does not read.

`LlamaConfig` has no `sliding_window`, and `LlamaModel` sees the whole text. A `sliding_window` in
its config.json still gives it a cache that forgets, so the model would sample from a different
distribution than it scores and trains.
"""

import inspect
import logging

from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

CACHE_SETTINGS = ("layer_types", "sliding_window", "attention_chunk_size", "kv_sharing_modes")
"""The settings from which transformers chooses the cache of each layer."""


def drop_unused_settings(model: PreTrainedModel, source: str) -> None:
    """Remove cache settings that no class of the config declares, and log their names.

    Only transformers' own classes declare all settings that their models read.
    """
    config = model.config.get_text_config()
    if not type(config).__module__.startswith("transformers."):
        return
    described = config.to_dict()
    for name in CACHE_SETTINGS:
        if described.get(name) is not None and not _knows(type(config), name):
            setattr(config, name, None)
            log.info(
                f"{source}: config.json sets {name}, which {type(model).__name__} does not read; "
                "it is left out"
            )


def _knows(kind: type[PreTrainedConfig], name: str) -> bool:
    """Return True if a class declares a setting; some are computed properties, not fields."""
    classes = kind.__mro__[: kind.__mro__.index(PreTrainedConfig)]
    return any(name in inspect.getsource(part) for part in classes)
