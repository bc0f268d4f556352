"""Several sets of adapters around one set of weights.

Each set has its own modules, and the weights are stored once.
"""

from practicum.backends.local.adapters import PARTS, add_adapters
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.residency import clone_to
from practicum.models.config import Lora


def add_shared_adapters(
    base: LanguageModel, lora: Lora, seed: int, parts: tuple[str, ...] = PARTS
) -> LanguageModel:
    """Return a model with new trainable adapters that shares the weights of `base`.

    `base` itself does not change.
    """
    adapted = clone_to(base.device, base)
    layers = adapted.model.config.get_text_config().num_hidden_layers
    add_adapters(adapted.model, lora, seed, list(range(layers)), parts)
    for parameter in adapted.trainable_parameters().values():
        parameter.data = parameter.data.float()
    return adapted
