"""Several sets of adapters around one set of weights: each has modules of its own, and the weights are held once."""

from practicum.backends.local.adapters import PARTS, add_adapters
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.residency import clone_to
from practicum.models.config import Lora


def add_shared_adapters(
    base: LanguageModel, lora: Lora, seed: int, parts: tuple[str, ...] = PARTS
) -> LanguageModel:
    """A model whose adapters learn, around the very weights of `base`, which stays as it is."""
    own = clone_to(base.device, base)
    layers = own.model.config.get_text_config().num_hidden_layers
    add_adapters(own.model, lora, seed, list(range(layers)), parts)
    for parameter in own.trainable_parameters().values():
        parameter.data = parameter.data.float()
    return own
