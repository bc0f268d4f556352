"""Build weightless models: all sizes and operations of a model, without numbers or memory.

The modules are the real modules over tensors without storage (torch's fake tensors). A forward and
a backward pass over them shows which tensors would be alive at each time.
"""

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from practicum.backends.local.graph import activation_checkpointing
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.loading import (
    LoadedModel,
    add_pictures,
    check_config,
    fix_length,
    set_trainable,
)
from practicum.backends.local.packing import compute_hidden_states, enable_packing
from practicum.backends.local.pictures import choose_class
from practicum.backends.local.precision import DTYPES, choose_dtype
from practicum.costs import Footprint, Line
from practicum.errors import ModelError
from practicum.models.config import ModelConfig, StudentConfig
from practicum.models.sources import find_base, locate
from practicum.text import Renderer, collect_stop_ids
from practicum.text.tokenizers import load_tokenizer
from practicum.types import ScoreRequest

LONG = 2048
"""The longest measured text, in tokens; half of it separates cost per token from fixed cost.

A shorter text needs less memory than casting a layer's weights, so the peak would be in another
place.
"""

TINY_VOCABULARY = 64
"""A vocabulary small enough to take no memory."""


def load_weightless(
    config: ModelConfig, scratch_folder: Path | None = None, *, pictures: bool = False
) -> LoadedModel:
    """Return the model with its tokenizer and without weights; `pictures` if it reads some.

    A student's settings determine which weights are trainable.
    """
    source = locate(config, scratch_folder, needs_weights=False)
    key = _name_sizes(config), source, pictures
    if key not in _MODELS:
        loaded = _load_weightless(config, source)
        _MODELS[key] = add_pictures(loaded) if pictures else loaded
    return _MODELS[key]


_MODELS: dict[tuple[str, str, bool], LoadedModel] = {}
"""The models loaded so far; they take no memory and never change."""


def _name_sizes(config: ModelConfig) -> str:
    """Return the settings without those that change no size of a weightless model."""
    return config.model_dump_json(exclude={"residency", "quantization"})


def _load_weightless(config: ModelConfig, source: str) -> LoadedModel:
    tokenizer = load_tokenizer(source, config, check_config(source, config))
    vocabulary = max(tokenizer.get_vocab().values(), default=-1) + 1
    stops = collect_stop_ids(tokenizer, None)
    renderer = Renderer(tokenizer, config.system, config.template, config.thinking, stops)
    return LoadedModel(build_weightless(config, source, vocabulary), renderer, source)


def build_weightless(
    config: ModelConfig,
    source: str,
    vocabulary: int,
    layers: int | None = None,
    *,
    on_meta: bool = False,
) -> LanguageModel:
    """Build the modules without weights; with `layers`, this many layers and a tiny vocabulary.

    Its tensors are fake ones, or with `on_meta` on torch's meta device, where code for a GPU takes the GPU's path.
    """
    described = AutoConfig.from_pretrained(
        find_base(source), trust_remote_code=config.trust_remote_code
    )
    if layers is not None:
        _set_layer_count(described.get_text_config(), layers)
    device = "cuda" if torch.cuda.is_available() and config.device != "cpu" else "cpu"
    dtype = choose_dtype(config, source, device)
    try:
        with torch.device("meta"):
            model: Any = choose_class(described.model_type).from_config(
                described,
                dtype=DTYPES[dtype],
                trust_remote_code=config.trust_remote_code,
            )
            model.requires_grad_(False)
            if isinstance(config, StudentConfig):
                set_trainable(model, config, 0, source)
        if on_meta:
            return LanguageModel(model, vocabulary, autocast=dtype == "bfloat16")
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device=device).tie_weights()
            language_model = LanguageModel(model, vocabulary, autocast=dtype == "bfloat16")
            language_model = fix_length(language_model, config)
            # Packing cannot be tried without numbers: assume that it works.
            longest = language_model.window or language_model.context_length
            return enable_packing(language_model, longest)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ModelError(
            f"{source}: its sizes cannot be read without its weights ({str(error)[:200]})"
        ) from error


def measure_footprint(
    config: ModelConfig, source: str, layers: int = 1, recompute: bool = False
) -> Footprint:
    """Measure the memory of a model's passes with a gradient in the last `layers` layers.

    Models of one and of two layers run at two text lengths; every further layer costs as much as
    the second one adds. The gradient of the embedding is not included.
    """
    key = _name_sizes(config), source, layers, recompute
    if key not in _FOOTPRINTS:
        single, double = (_measure_lines(config, source, count, recompute) for count in (1, 2))
        graph, update = (
            Line(
                max(one_layer.fixed + (layers - 1) * (two_layers.fixed - one_layer.fixed), 0),
                one_layer.each + (layers - 1) * max(two_layers.each - one_layer.each, 0),
            )
            for one_layer, two_layers in zip(single[1:], double[1:], strict=True)
        )
        _FOOTPRINTS[key] = Footprint(double[0], graph, update)
    return _FOOTPRINTS[key]


_FOOTPRINTS: dict[tuple[str, str, int, bool], Footprint] = {}
"""The footprints measured so far."""


def _measure_lines(config: ModelConfig, source: str, layers: int, recompute: bool) -> list[Line]:
    """Return forward peak, graph and update peak in bytes, as lines over the tokens of a text."""
    # Only the last `layers` are built, so if the last layers are trained, all built layers are
    # trained.
    if isinstance(config, StudentConfig) and config.trainable_layers is not None:
        config = config.model_copy(update={"trainable_layers": layers})
    language_model = build_weightless(config, source, TINY_VOCABULARY, layers)
    dropout = isinstance(config, StudentConfig) and config.dropout
    # The model would not pack a longer text, which would take another path.
    half = min(LONG, (language_model.window or language_model.context_length) - 1) // 2
    short, long = (
        _measure_passes(language_model, tokens, recompute=recompute, dropout=dropout)
        for tokens in (half, 2 * half)
    )
    return [_fit_line(*peaks, half) for peaks in zip(short, long, strict=True)]


def _set_layer_count(described: Any, layers: int) -> None:
    """Set the number of layers and a tiny vocabulary in a model's config."""
    described.num_hidden_layers = layers
    described.vocab_size = TINY_VOCABULARY
    described.pad_token_id = None
    if types := described.to_dict().get("layer_types"):
        # A model of one layer is measured with a second layer of the same type.
        described.layer_types = [*types, *[types[-1]] * layers][:layers]


def _fit_line(short: int, long: int, tokens: int) -> Line:
    """Return the line through the bytes for `tokens` tokens and for twice as many."""
    per_token = (long - short) // tokens
    return Line(max(short - per_token * tokens, 0), per_token)


def _measure_passes(
    language_model: LanguageModel, tokens: int, *, recompute: bool, dropout: bool
) -> tuple[int, int, int]:
    """Return the bytes of a forward pass's peak, of its graph, and of an update's peak."""
    model = language_model.model
    text = [ScoreRequest((0,), (0,) * tokens)]

    def run_update() -> int:
        states = compute_hidden_states(language_model, text)
        graph_bytes = live.total
        states.backward(torch.zeros_like(states))
        return graph_bytes

    with _find_fake_mode(model), LiveBytes(model.parameters()) as live:
        with torch.no_grad():
            compute_hidden_states(language_model, text)
        forward, graph, update = live.peak, 0, live.peak
        if language_model.trainable_parameters():
            model.train(dropout)
            with activation_checkpointing(language_model, recompute):
                # The first update allocates the gradients, which remain; the second update is
                # measured.
                graph = run_update()
                before = live.restart_peak()
                run_update()
            update = live.peak - before
            model.eval()
            for weight in model.parameters():
                weight.grad = None
    return forward, graph, update


def _find_fake_mode(model: torch.nn.Module) -> FakeTensorMode:
    """Return the mode in which the model's tensors were made."""
    weight: Any = next(model.parameters())
    return (weight.data if hasattr(weight.data, "fake_mode") else weight).fake_mode


class LiveBytes(TorchDispatchMode):
    """Count the bytes of all storages that were made within the block and are still alive."""

    def __init__(self, uncounted: Iterator[Tensor]) -> None:
        super().__init__()
        self.total = self.peak = 0
        storages = [tensor.untyped_storage() for tensor in uncounted]
        self._seen_storages: dict[int, object] = {storage._cdata: storage for storage in storages}

    def restart_peak(self) -> int:
        """Reset the peak to the current total, and return the total."""
        self.peak = self.total
        return self.total

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and count the storages that it made."""
        if func is torch.ops.aten._grouped_mm.default:
            func = _multiply_grouped
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count_storage(leaf)
        return out

    def _count_storage(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen_storages:
            return

        def forget(_: object) -> None:
            self._seen_storages.pop(key, None)
            self.total -= size

        # Use a weak reference: the storage must be freed as soon as the model drops it.
        self._seen_storages[key] = weakref.ref(storage, forget)
        self.total += size
        self.peak = max(self.peak, self.total)


def _multiply_grouped(rows: Tensor, weights: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Multiply rows by the weights of experts; torch's fake product only supports bfloat16."""
    product = torch.ops.aten._grouped_mm.default(
        rows.bfloat16(), weights.bfloat16(), *arguments, **options
    )
    return product.to(rows.dtype)
