"""Between text and tokens: chat templates, stop tokens, vocabularies, and text safe to show."""

from practicum.text.from_scratch import build_character_tokenizer
from practicum.text.renderer import Renderer, collect_stop_ids
from practicum.text.safe import excerpt, make_printable
from practicum.text.stop_texts import Check, refuse_stop_texts, stop_check
from practicum.text.vocabulary import (
    check_same_vocabulary,
    compare_renderers,
    describe_stop_mismatch,
)

__all__ = [
    "Check",
    "Renderer",
    "build_character_tokenizer",
    "check_same_vocabulary",
    "collect_stop_ids",
    "compare_renderers",
    "describe_stop_mismatch",
    "excerpt",
    "make_printable",
    "refuse_stop_texts",
    "stop_check",
]
