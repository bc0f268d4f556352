"""Load a model's tokenizer and stop tokens from its settings, without its weights."""

import json
import logging
import tempfile
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from practicum.errors import ModelError
from practicum.models.config import ModelConfig
from practicum.models.sources import find_base, find_tokenizer, is_gguf, locate_gguf
from practicum.text.renderer import Renderer, collect_stop_ids

log = logging.getLogger(__name__)

PICTURE_NAMES = frozenset({"image_token", "boi_token", "eoi_token", "video_token", "audio_token"})
"""The names in tokenizer_config.json of tokens that only a processor of pictures or sounds writes."""

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

LARGEST_GROWTH = 10_000
"""The most letters that a tokenizer's rules may write for one: 300 letters then take 0.2 seconds."""

_CHARACTERS = "".join(map(chr, [*range(0x20, 0xD800), *range(0xE000, 0x10000)]))
"""The characters of the basic plane of Unicode, without halves of pairs."""

_REPETITIONS = tuple(100 * text for text in ("a", "A", "1", " ", "\n", ".", "é", "中", "a1 ", "ab"))
"""Texts that expose regular expressions with catastrophic backtracking."""


def load_renderer(config: ModelConfig) -> Renderer:
    """Load a model's tokenizer, chat template and stop tokens; its weights need not exist."""
    assert isinstance(config.model, str), "a model from scratch has no tokenizer"
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


def load_tokenizer(
    source: str, config: ModelConfig, rows: int | None = None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model's folder or hub name; raises ModelError if unreadable.

    With the `rows` of the model's embedding, leave out picture tokens that have no row.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            find_tokenizer(source), trust_remote_code=config.trust_remote_code
        )
        if rows is not None and isinstance(tokenizer, PreTrainedTokenizerFast):
            tokenizer = _drop_picture_tokens(tokenizer, source, rows)
        _try_out(tokenizer, source)
    except BaseException as error:
        # The library's panics are not in a module that could be imported, and are no Exceptions.
        if not isinstance(error, UNREADABLE) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(
            f"{source}: no tokenizer could be loaded ({shorten_error(error)}); copy tokenizer.json and "
            "tokenizer_config.json"
        ) from error
    return tokenizer


def _drop_picture_tokens(
    tokenizer: PreTrainedTokenizerFast, source: str, rows: int
) -> PreTrainedTokenizerBase:
    """Return a tokenizer without picture tokens beyond the embedding.

    The text-only models of a family with pictures share its tokenizer: gemma-3-1b-it has 262,144
    rows, and `<image_soft_token>` is token 262,144. Other tokens without a row stay, and are refused
    later.
    """
    names = {
        name: str(token)
        for name, token in tokenizer.special_tokens_map.items()
        if name in PICTURE_NAMES
    }
    vocabulary = tokenizer.get_vocab()
    dropped = {token for token in names.values() if vocabulary.get(token, 0) >= rows}
    if not dropped:
        return tokenizer
    log.info(
        "%s: left out %s, which have no row in the embedding", source, ", ".join(sorted(dropped))
    )
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        content, settings = (
            json.loads((Path(folder) / name).read_text(encoding="utf-8"))
            for name in ("tokenizer.json", "tokenizer_config.json")
        )
        content["added_tokens"] = [
            token for token in content["added_tokens"] if token["content"] not in dropped
        ]
        for section in (settings, settings.get("model_specific_special_tokens", {})):
            for name in names.keys() & section.keys():
                if section[name] in dropped:
                    del section[name]
        (Path(folder) / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        reduced = AutoTokenizer.from_pretrained(folder)
    reduced.name_or_path = tokenizer.name_or_path
    return reduced


def _try_out(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Read every character once, and long repetitions; ModelError if rules multiply texts."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return
    backend = tokenizer.backend_tokenizer
    for name, part in (("normalizer", backend.normalizer), ("decoder", backend.decoder)):
        growth = 1 if part is None else _compute_growth(json.loads(part.__getstate__()))
        if growth > LARGEST_GROWTH:
            raise ModelError(
                f"{source}: the {name} in tokenizer.json can make a text more than {LARGEST_GROWTH:,} "
                "times as long, so its work would have no bound; copy tokenizer.json again from where "
                "the model is published"
            )
    if backend.normalizer is not None:
        # A broken table of characters panics at a character that leads out of the table.
        backend.normalizer.normalize_str(_CHARACTERS)
    for text in _REPETITIONS:
        # A pattern such as (a+)+b tries all ways to split a repetition, and panics after too many.
        backend.encode(text, add_special_tokens=False)


def _compute_growth(part: Any) -> int:
    """Return how many times as long rules can make a text, if each works on the result of the last."""
    if not isinstance(part, dict):
        return 1
    pattern = part.get("pattern")
    # A regular expression may match one letter.
    shortest = len(pattern.get("String", "a")) if isinstance(pattern, dict) else 1
    content = part.get("content", "") if part.get("type") == "Replace" else part.get("prepend", "")
    growth = max(1, -(-len(content) // max(shortest, 1)))
    for member in chain.from_iterable(part.get(key, ()) for key in ("normalizers", "decoders")):
        growth *= _compute_growth(member)
        if growth > LARGEST_GROWTH:
            break
    return growth


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
