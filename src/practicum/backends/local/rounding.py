"""Round the linear maps of a model once instead of at every decoded token.

A student with `dtype: bfloat16` learns in float32 and multiplies in bfloat16. Autocast rounds a
weight each time it is used, and moves 6 bytes for each 2-byte weight. This costs little in a pass
over thousands of tokens, but takes most of the time in a decode step of a few tokens.
"""

import torch
from torch import Tensor

from practicum.backends.local.language_model import LanguageModel, find_decoder


@torch.no_grad()
def round_linear_maps(language_model: LanguageModel) -> dict[str, Tensor]:
    """Return bfloat16 copies of the weights that autocast would round at each use, by name.

    With them as an overlay the model computes the same bits: autocast rounds the operands of linear
    maps, but not embeddings and norms. The result is empty for a model that needs no rounding.
    """
    if not language_model.autocast:
        return {}
    names = {parameter: name for name, parameter in language_model.model.named_parameters()}
    maps = (
        layer
        for layer in find_decoder(language_model.model).modules()
        if isinstance(layer, torch.nn.Linear)
    )
    return {
        names[weight]: weight.to(torch.bfloat16)
        for layer in maps
        for weight in layer.parameters(recurse=False)
        if weight.dtype == torch.float32
    }
