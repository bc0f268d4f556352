"""Models on paper: every size and every operation, but no numbers and no memory.

The modules are the real ones over tensors without data (torch's fake tensors), so a forward and a backward pass can be gone
through in order to see which tensors would be alive when.
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
from transformers import AutoConfig, AutoModelForCausalLM

from practicum.backends.local.graph import activation_checkpointing
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.loading import LoadedModel, check_config, set_trainable
from practicum.backends.local.packing import enable_packing, hidden_states
from practicum.costs import Footprint, Line
from practicum.errors import ModelError
from practicum.models.config import ModelConfig, StudentConfig
from practicum.models.sources import locate
from practicum.text import Renderer, stop_ids
from practicum.text.tokenizers import load_tokenizer
from practicum.types import ScoreRequest

SHORT, LONG = 32, 96
"""Two lengths of a text; what lies between them grows with the tokens, and the rest does not."""

TINY_VOCABULARY = 64
"""A vocabulary that takes no room."""


def load_weightless(config: ModelConfig, scratch_folder: Path | None = None) -> LoadedModel:
    """Return the model with its tokenizer and without its weights; what learns of it is what a student's settings say."""
    source = locate(config, scratch_folder)
    key = config.model_dump_json(), source
    if key not in _READ:
        _READ[key] = _load_on_paper(config, source)
    return _READ[key]


_READ: dict[tuple[str, str], LoadedModel] = {}
"""Models that were read already; they take no room, and nothing about them changes."""


def _load_on_paper(config: ModelConfig, source: str) -> LoadedModel:
    check_config(source, config)
    tokenizer = load_tokenizer(source, config)
    vocabulary = max(tokenizer.get_vocab().values(), default=-1) + 1
    stops = stop_ids(tokenizer, None)
    renderer = Renderer(tokenizer, config.system, config.template, config.thinking, stops)
    return LoadedModel(_on_paper(config, source, vocabulary), renderer, source)


def _on_paper(
    config: ModelConfig, source: str, vocabulary: int, layers: int | None = None
) -> LanguageModel:
    """The modules without weights; with `layers`, as if there were so many, and hardly any vocabulary."""
    described = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    if layers is not None:
        _shorten(described.get_text_config(), layers)
    device = "cuda" if torch.cuda.is_available() and config.device != "cpu" else "cpu"
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                described,
                dtype=torch.bfloat16 if config.dtype == "bfloat16" else torch.float32,
                trust_remote_code=config.trust_remote_code,
            )
            model.requires_grad_(False)
            if isinstance(config, StudentConfig):
                set_trainable(model, config, 0, source)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device=device).tie_weights()
            whole = LanguageModel(model, vocabulary, autocast=config.dtype == "bfloat16")
            return enable_packing(whole, whole.window or whole.context_length)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ModelError(
            f"{source}: its sizes cannot be read without its weights ({str(error)[:200]})"
        ) from error


def footprint_of(
    config: ModelConfig, source: str, layers: int = 1, recompute: bool = False
) -> Footprint:
    """What passes take of a model whose gradient goes through so many layers; the gradient of its embedding is left out.

    One and two layers are gone through on paper, at two lengths; every further layer takes what the second adds.
    """
    key = config.model_dump_json(), source, layers, recompute
    if key not in _BYTES:
        _BYTES[key] = _footprint_of(config, source, layers, recompute)
    return _BYTES[key]


_BYTES: dict[tuple[str, str, int, bool], Footprint] = {}
"""What was gone through already."""


def _footprint_of(config: ModelConfig, source: str, layers: int, recompute: bool) -> Footprint:
    one, two = (_lines(_shortened(config, count), source, count, recompute) for count in (1, 2))
    kept, update = (
        Line(
            max(a.fixed + (layers - 1) * (b.fixed - a.fixed), 0),
            a.each + (layers - 1) * (b.each - a.each),
        )
        for a, b in zip(one[1:], two[1:], strict=True)
    )
    return Footprint(two[0], kept, update)


def _lines(config: ModelConfig, source: str, layers: int, recompute: bool) -> list[Line]:
    language_model = _on_paper(config, source, TINY_VOCABULARY, layers)
    learns = any(weight.requires_grad for weight in language_model.model.parameters())
    dropout = isinstance(config, StudentConfig) and config.dropout
    pairs = [
        _passes(language_model, tokens, learns, recompute, dropout) for tokens in (SHORT, LONG)
    ]
    return [_line(short, long) for short, long in zip(*pairs, strict=True)]


def _shortened(config: ModelConfig, layers: int) -> ModelConfig:
    """The settings for a model of which all of so many layers learn, where only the last ones were to."""
    learns_above = isinstance(config, StudentConfig) and config.trainable_layers is not None
    return config.model_copy(update={"trainable_layers": layers}) if learns_above else config


def _shorten(described: Any, layers: int) -> None:
    """Let a model's settings have so many layers."""
    described.num_hidden_layers, described.vocab_size, described.pad_token_id = (
        layers,
        TINY_VOCABULARY,
        None,
    )
    if described.to_dict().get("layer_types"):
        described.layer_types = described.layer_types[:layers]


def _line(short: int, long: int) -> Line:
    each = (long - short) // (LONG - SHORT)
    return Line(max(short - each * SHORT, 0), each)


def _passes(
    language_model: LanguageModel, tokens: int, learns: bool, recompute: bool, dropout: bool
) -> tuple[int, int, int]:
    """Peak bytes of a forward pass, bytes its graph keeps, and the peak of the second forward and backward pass."""
    model = language_model.model
    mode = _mode_of(model)
    text = [ScoreRequest((0,), (0,) * tokens)]

    def learn() -> int:
        states = hidden_states(language_model, text)
        kept = live.now
        states.backward(torch.zeros_like(states))
        return kept

    with mode, _LiveBytes(model.parameters()) as live:
        with torch.no_grad():
            hidden_states(language_model, text)
        forward, kept, update = live.peak, 0, live.peak
        if learns:
            model.train(dropout)
            with activation_checkpointing(language_model, recompute):
                kept = learn()  # makes the gradients, which are there from then on
                before = live.restart()
                learn()
            update = live.peak - before
            model.eval()
            for weight in model.parameters():
                weight.grad = None
    return forward, kept, update


def _mode_of(model: torch.nn.Module) -> FakeTensorMode:
    """The mode in which the model's tensors were made."""
    weight: Any = next(model.parameters())
    return (weight.data if hasattr(weight.data, "fake_mode") else weight).fake_mode


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are made within the block and still there."""

    def __init__(self, known: Iterator[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, object] = {
            storage._cdata: storage for storage in (t.untyped_storage() for t in known)
        }

    def restart(self) -> int:
        """Let the peak begin at what is there now, which is returned."""
        self.peak = self.now
        return self.now

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Do the operation and note what it made."""
        if func is torch.ops.aten._grouped_mm.default:
            out = _grouped_product(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def gone(_: object) -> None:
            self._known.pop(key, None)
            self.now -= size

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def _grouped_product(rows: Tensor, weights: Tensor, *others: Any, **named: Any) -> Tensor:
    """Do the product of rows with the weights of experts; on paper torch knows it of bfloat16 alone, of which it has the shape."""
    product = torch.ops.aten._grouped_mm.default(
        rows.bfloat16(), weights.bfloat16(), *others, **named
    )
    return product.to(rows.dtype)
