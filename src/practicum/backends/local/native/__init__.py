"""Compile the decode step of Llama-like models, attention and reverse KL into one program.

It supports float32 weights on x86 processors.

The program is compiled on first use. Without a C compiler, and for other models, texts are decoded
through transformers' modules.
"""

from torch.distributed.tensor import DTensor

from practicum.backends.local.language_model import Decoding, LanguageModel
from practicum.backends.local.llama_weights import LlamaWeights, find_llama_weights
from practicum.backends.local.native.library import NativeLibrary, load_library
from practicum.backends.local.native.loss import NativeReverseKL
from practicum.backends.local.native.step import NativeStep

__all__ = [
    "NativeReverseKL",
    "NativeStep",
    "load_library",
    "name_decoding",
    "name_ways",
    "open_attention",
    "open_kernel",
    "open_native",
]


def name_decoding(language_model: LanguageModel) -> str:
    """Name how a model decodes, for a run's identity: tokens may differ between implementations."""
    if language_model.decoding is not Decoding.NATIVE:
        return language_model.decoding.value
    library = load_library()
    return Decoding.TORCH.value if library is None else library.name


def name_ways(engine: str, decoding: str) -> str:
    """Name how a student samples with an engine and how it learns, for a run's identity.

    `decoding` is how the student would decode here, which determines how its loss is computed; see
    `open_kernel`.
    """
    return f"{engine} (learns by {decoding})"


def open_native(language_model: LanguageModel) -> tuple[NativeLibrary, LlamaWeights] | None:
    """Return the program and the model's current weights; None if it cannot run this model."""
    library = load_library() if language_model.decoding is Decoding.NATIVE else None
    weights = find_llama_weights(language_model.model) if library else None
    # The step reads addresses, and a shard only has addresses of its own rows.
    is_sharded = weights is not None and isinstance(weights.embedding, DTensor)
    return None if library is None or weights is None or is_sharded else (library, weights)


def open_kernel(language_model: LanguageModel) -> NativeReverseKL | None:
    """Return the kernel of a student's loss; None if the student does not decode with the program.

    The name of the student's decoding in a run's identity therefore also determines how its loss is
    computed.
    """
    library = open_attention(language_model)
    return None if library is None else NativeReverseKL(library)


def open_attention(language_model: LanguageModel) -> NativeLibrary | None:
    """Return the program for the attention of whole texts, on the same condition as `open_kernel`."""
    return load_library() if language_model.decoding is Decoding.NATIVE else None
