"""Several sets of adapters around one set of weights: each has modules of its own, and the weights are held once."""

from practicum.backends.local.adapters import PARTS, add_adapters
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.residency import copy_on
from practicum.models.config import Lora


def adapted(base: LanguageModel, lora: Lora, seed: int, parts: tuple[str, ...] = PARTS) -> LanguageModel:
    """A model whose adapters learn, around the very weights of `base`, which stays as it is."""
    own = copy_on(base.device, base)
    layers = own.model.config.get_text_config().num_hidden_layers
    add_adapters(own.model, lora, seed, list(range(layers)), parts)
    for parameter in own.trainable().values():
        parameter.data = parameter.data.float()
    return own
