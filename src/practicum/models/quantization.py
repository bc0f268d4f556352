"""The formats with fewer bits for the weights of a frozen model, and their memory."""

from dataclasses import dataclass
from typing import Literal

QuantizationName = Literal["int8", "nf4", "nvfp4"]


@dataclass(frozen=True, slots=True)
class Quantization:
    """A format of weights.

    `stored_bits` are the bits per weight in memory, including scales; None if the format is
    simulated: the values are rounded to the format and stored in as many bits as before.
    `multiple_of` must divide the number of entries of each matrix.
    """

    about: str
    stored_bits: float | None
    multiple_of: int = 1


QUANTIZATIONS: dict[QuantizationName, Quantization] = {
    "int8": Quantization("integers of 8 bits, one scale a row (torchao)", 8.0),
    # A byte for each block of 64, and a float32 for each 256 of these bytes.
    "nf4": Quantization(
        "16 quantiles of a normal distribution, one scale for 64 (torchao)", 4.127, multiple_of=64
    ),
    "nvfp4": Quantization("E2M1 with an E4M3 scale for 16, simulated", None),
}
"""The formats by their names in a recipe."""


def keeps_dtype(name: QuantizationName | None) -> bool:
    """Return True if weights of this format are stored in the model's own dtype."""
    return name is None or QUANTIZATIONS[name].stored_bits is None


def count_weight_bytes(
    parameters: int, linear: int, item_bytes: int, name: QuantizationName | None
) -> int:
    """Return the bytes of a model's weights; `linear` of the weights may have fewer bits."""
    bits = None if name is None else QUANTIZATIONS[name].stored_bits
    # Embeddings, norms and the head keep their bits.
    saved = 0 if bits is None else linear * (8 * item_bytes - bits) / 8
    return parameters * item_bytes - round(saved)
