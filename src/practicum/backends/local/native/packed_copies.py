"""Keep the packed copies of frozen weights between the decode batches of a model.

A student that trains its last layers, and a teacher that samples in every step, would pack the
same weights for every batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from practicum.backends.local.language_model import LanguageModel

MAX_BYTES = 2**30
"""The maximum number of bytes of kept packed weights per model; other weights are packed again."""

Packed = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class PackJob:
    """Weights that are packed together in panels of columns, and the function that packs them."""

    sources: Sequence[Tensor]
    panel: int
    pack: Callable[[], Packed]


@dataclass(frozen=True, slots=True)
class _Kept:
    """Packed weights; their sources stay referenced, so no other tensor can get their addresses."""

    sources: Sequence[Tensor]
    packed: Packed


Key = tuple[int, tuple[tuple[int, int], ...]]
"""The panel, and the address and version of each source; in-place changes increase versions."""

_kept_of: WeakKeyDictionary[torch.nn.Module, dict[Key, _Kept]] = WeakKeyDictionary()


def pack_weights(
    language_model: LanguageModel,
    overlay: Mapping[str, Tensor],
    jobs: Sequence[PackJob],
    max_bytes: int = MAX_BYTES,
) -> list[Packed]:
    """Return the packed weights of each job; packed frozen weights are kept for the next call.

    Trained weights, overlay weights and merged adapters are never kept, and a weight that was
    changed or moved is packed again. A model without trained weights keeps nothing before its
    second call: most teachers sample once, in their evaluation.
    """
    model = language_model.model
    is_teacher = not any(weight.requires_grad for weight in model.parameters())
    frozen = {
        weight.data_ptr()
        for name, weight in model.named_parameters()
        if not weight.requires_grad and name not in overlay
    }
    is_first, before = is_teacher and model not in _kept_of, _kept_of.get(model, {})
    entries: dict[Key, _Kept] = {}
    results: list[Packed] = []
    room = 0 if is_first else max_bytes
    for job in jobs:
        places = tuple((source.data_ptr(), source._version) for source in job.sources)
        key = job.panel, places
        packed = before[key].packed if key in before else job.pack()
        results.append(packed)
        size = sum(tensor.nbytes for tensor in packed.values())
        if size <= room and all(address in frozen for address, _ in places):
            entries[key] = _Kept(job.sources, packed)
            room -= size
    _kept_of[model] = entries
    return results
