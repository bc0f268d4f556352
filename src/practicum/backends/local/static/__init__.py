"""Decode Llama-like models with one static program, captured as a graph on a CUDA device.

Everything that a step reads or writes is a tensor of fixed shape on the device: tokens, lengths,
random streams, stop tests, pages of keys and values. The device can therefore decode several tokens
without the host.
"""

import torch

from practicum.backends.local.device_limits import find_limits
from practicum.backends.local.language_model import Decoding, LanguageModel
from practicum.backends.local.static.attention import (
    Attention,
    attend_by_flash,
    attend_by_mask,
    can_attend_by_flash,
)
from practicum.backends.local.static.capture import choose_capture
from practicum.backends.local.static.loop import open_static_loop
from practicum.backends.local.static.program import StaticSettings

__all__ = ["StaticSettings", "choose_settings", "list_graphs", "open_static_loop"]

ATTENTION: dict[Decoding, Attention] = {
    Decoding.FLASH_GRAPH: attend_by_flash,
    Decoding.MASKED_GRAPH: attend_by_mask,
}
"""The attention functions of the static program, the fastest first."""


def choose_settings(language_model: LanguageModel) -> StaticSettings | None:
    """Return the settings of a model's static program, or None if it does not decode with one."""
    attend = ATTENTION.get(language_model.decoding)
    if attend is None:
        return None
    device = language_model.device
    most_bytes = find_limits(device).decode_bytes
    return StaticSettings(attend, choose_capture(device), most_bytes=most_bytes)


def list_graphs(language_model: LanguageModel, head_width: int) -> list[Decoding]:
    """Return the static programs that may decode a model, the fastest first."""
    dtype = torch.bfloat16 if language_model.autocast else language_model.model.dtype
    has_flash = can_attend_by_flash(language_model.device, dtype, head_width)
    return [way for way in ATTENTION if has_flash or way is not Decoding.FLASH_GRAPH]
