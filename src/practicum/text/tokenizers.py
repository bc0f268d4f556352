"""Load a model's tokenizer and stop tokens from its settings, without its weights."""

from collections.abc import Mapping
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from practicum.errors import ModelError
from practicum.models.config import ModelConfig
from practicum.models.sources import find_base, find_tokenizer, is_gguf, locate_gguf
from practicum.text.renderer import Renderer, collect_stop_ids

UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
    SafetensorError,
    StrictDataclassError,
)
"""The exceptions that transformers raises on settings and weights that make no sense."""


def load_renderer(config: ModelConfig) -> Renderer:
    """Return a model's tokenizer, chat template and stop tokens; its weights need not exist."""
    assert isinstance(config.model, str), "a model from scratch has no tokenizer of its own"
    source = (
        str(locate_gguf(config.model))
        if is_gguf(config.model)
        else str(Path(config.model).expanduser())
    )
    tokenizer = load_tokenizer(source, config)
    stops = collect_stop_ids(
        tokenizer, [*(load_eos_ids(source) or []), *find_stop_ids(tokenizer, config.stop, source)]
    )
    return Renderer(tokenizer, config.system, config.template, config.thinking, stops)


def load_tokenizer(source: str, config: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model's folder or hub name; raises ModelError if unreadable."""
    try:
        return AutoTokenizer.from_pretrained(
            find_tokenizer(source), trust_remote_code=config.trust_remote_code
        )
    except UNREADABLE as error:
        raise ModelError(
            f"{source}: no tokenizer could be loaded ({shorten_error(error)}); copy tokenizer.json and "
            "tokenizer_config.json"
        ) from error


def load_eos_ids(source: str) -> list[int] | None:
    """Return the stop tokens in generation_config.json, or None if file or entry is missing."""
    try:
        eos = GenerationConfig.from_pretrained(find_base(source)).eos_token_id
    except OSError:
        return None
    return [eos] if isinstance(eos, int) else eos


def find_stop_ids(
    tokenizer: PreTrainedTokenizerBase, names: tuple[str, ...], source: str
) -> frozenset[int]:
    """Return the ids of a recipe's stop tokens; raises ModelError if the vocabulary lacks one."""
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    for name in names:
        if name not in vocabulary:
            raise ModelError(
                f"{source}: stop token {name!r} is not in the vocabulary; write a token, not a text"
            )
    return frozenset(vocabulary[name] for name in names)


def shorten_error(error: BaseException) -> str:
    """Return an error's text on one line, cut after 300 characters; its type if it has no text."""
    text = " ".join(str(error).split())
    return f"{text[:300]}..." if len(text) > 300 else text or type(error).__name__
