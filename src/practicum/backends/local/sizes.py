"""Measure a model's dimensions from its modules, which may have no weights (the meta device)."""

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from transformers import PreTrainedModel

from practicum.backends.local.adapters import find_expert_parameters, is_adapter
from practicum.backends.local.language_model import LanguageModel, find_decoder, find_layers
from practicum.costs import ModelDims, TrainableDims


def measure_dims(language_model: LanguageModel) -> ModelDims:
    """Measure a model's dimensions for FLOP counts.

    For a mixture of experts, only count the entries that one token is multiplied with.
    """
    model = language_model.model
    config = model.config.get_text_config()
    described = config.to_dict()
    heads = config.num_attention_heads
    body, adapters = _count_active(model, _list_matrices(model))
    return ModelDims(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        body=body,
        vocabulary=language_model.vocab_size,
        width=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=described.get("num_key_value_heads") or heads,
        head_dim=described.get("head_dim") or config.hidden_size // heads,
        adapters=adapters,
    )


def measure_trainable(language_model: LanguageModel) -> TrainableDims:
    """Measure the trainable part of a model: the parameters that require a gradient."""
    model = language_model.model
    trainable = ((name, weight) for name, weight in _list_matrices(model) if weight.requires_grad)
    body, adapters = _count_active(model, trainable)
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Module), "the model was split at its head"
    return TrainableDims(
        parameters=sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
        layers=_count_layers_passed(model),
        body=body,
        adapters=adapters,
        head=any(weight.requires_grad for weight in head.parameters()),
    )


def _list_matrices(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the body's weight matrices: weights with two or more axes, except embeddings."""
    embeddings = {
        id(weight)
        for module in find_decoder(model).modules()
        if isinstance(module, torch.nn.Embedding)
        for weight in module.parameters()
    }
    for name, weight in find_decoder(model).named_parameters():
        if weight.ndim >= 2 and id(weight) not in embeddings:
            yield name, weight


def _count_active(
    model: PreTrainedModel, matrices: Iterable[tuple[str, torch.nn.Parameter]]
) -> tuple[int, int]:
    """Count the entries that one token is multiplied with: in the weights and in their adapters.

    For weights that hold several experts, count the entries of the experts that a token is routed
    to.
    """
    config = model.config.get_text_config()
    name = "num_experts_per_tok"
    used = config.to_dict().get(config.attribute_map.get(name, name))
    counts = {id(weight): count for weight, count in find_expert_parameters(model)}
    active: Counter[bool] = Counter()
    for name, weight in matrices:
        entries = weight.numel()
        if used is not None and id(weight) in counts:
            entries = entries * used // counts[id(weight)]
        active[is_adapter(name)] += entries
    return active[False], active[True]


def _count_layers_passed(model: PreTrainedModel) -> int:
    """Count the last layers that the gradient passes: all layers if the embedding is trainable."""
    layers = find_layers(model)
    if layers is None or any(
        weight.requires_grad for weight in model.get_input_embeddings().parameters()
    ):
        return model.config.get_text_config().num_hidden_layers
    trains = [any(weight.requires_grad for weight in layer.parameters()) for layer in layers]
    return len(layers) - trains.index(True) if True in trains else 0
