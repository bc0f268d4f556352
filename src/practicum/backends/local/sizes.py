"""What a model costs, read from its modules; they may be on the meta device, without weights."""

from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedModel

from practicum.backends.local.adapters import is_adapter, weights_of_experts
from practicum.backends.local.language_model import LanguageModel, find_body, find_layers
from practicum.costs import ModelDims, TrainableDims


def measure_dims(language_model: LanguageModel) -> ModelDims:
    """The sizes of a model; of a mixture of experts, the share of the experts' entries that one token goes through."""
    model = language_model.model
    config = model.config.get_text_config()
    described = config.to_dict()
    heads = config.num_attention_heads
    matrices = dict(_matrices(model))
    active = _active(model)
    return ModelDims(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        body=sum(active(weight) for name, weight in matrices.items() if not is_adapter(name)),
        vocabulary=language_model.vocab_size,
        width=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=described.get("num_key_value_heads") or heads,
        head_dim=described.get("head_dim") or config.hidden_size // heads,
        adapters=sum(active(weight) for name, weight in matrices.items() if is_adapter(name)),
    )


def measure_trainable(language_model: LanguageModel) -> TrainableDims:
    """Which part of a model learns, by its parameters that require a gradient."""
    model = language_model.model
    active = _active(model)
    moving = {name: weight for name, weight in _matrices(model) if weight.requires_grad}
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Module), "the model was split at its head"
    return TrainableDims(
        parameters=sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
        layers=_layers_passed(model),
        body=sum(active(weight) for name, weight in moving.items() if not is_adapter(name)),
        adapters=sum(active(weight) for name, weight in moving.items() if is_adapter(name)),
        head=any(weight.requires_grad for weight in head.parameters()),
    )


def _matrices(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The weights of the body that multiply: those of two axes or more that are no embedding."""
    embeddings = {
        id(weight)
        for module in find_body(model).modules()
        if isinstance(module, torch.nn.Embedding)
        for weight in module.parameters()
    }
    for name, weight in find_body(model).named_parameters():
        if weight.ndim >= 2 and id(weight) not in embeddings:
            yield name, weight


def _active(model: PreTrainedModel) -> Callable[[torch.nn.Parameter], int]:
    """Return the function that counts a weight's entries that one token is multiplied with.

    Of what holds something for each of several experts these are the entries of the experts that a token goes to.
    """
    config = model.config.get_text_config()
    name = "num_experts_per_tok"
    chosen = config.to_dict().get(config.attribute_map.get(name, name))
    shares = (
        {}
        if chosen is None
        else {id(weight): (chosen, count) for weight, count in weights_of_experts(model)}
    )

    def count_active(weight: torch.nn.Parameter) -> int:
        part, whole = shares.get(id(weight), (1, 1))
        return weight.numel() * part // whole

    return count_active


def _layers_passed(model: PreTrainedModel) -> int:
    """Through how many of the last layers the gradient goes: all of them where the embedding learns."""
    layers = find_layers(model)
    if layers is None or any(
        weight.requires_grad for weight in model.get_input_embeddings().parameters()
    ):
        return model.config.get_text_config().num_hidden_layers
    learns = [any(weight.requires_grad for weight in layer.parameters()) for layer in layers]
    return len(layers) - learns.index(True) if True in learns else 0
