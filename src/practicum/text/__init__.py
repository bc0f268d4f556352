"""Between text and tokens: chat templates, stop tokens, vocabularies, and text safe to show."""

from practicum.text.from_scratch import TOKENIZERS, build_character_tokenizer
from practicum.text.renderer import Renderer, collect_stop_ids
from practicum.text.safe import excerpt, make_printable
from practicum.text.stop_texts import Check, refuse_banned_ids, refuse_stop_texts, stop_check
from practicum.text.vocabulary import (
    VocabularyMap,
    compare_renderers,
    describe_stop_mismatch,
    map_vocabularies,
)

__all__ = [
    "TOKENIZERS",
    "Check",
    "Renderer",
    "VocabularyMap",
    "build_character_tokenizer",
    "collect_stop_ids",
    "compare_renderers",
    "describe_stop_mismatch",
    "excerpt",
    "make_printable",
    "map_vocabularies",
    "refuse_banned_ids",
    "refuse_stop_texts",
    "stop_check",
]
