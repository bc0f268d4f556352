"""Align two tokenizations of one text by the bytes that their tokens stand for.

A span is the smallest stretch that starts and ends at a boundary of both tokenizations. Boundaries
are counted in bytes, so a boundary within a character counts if both have it. A token without
bytes, such as a leading space that its tokenizer drops, belongs to the span before it, or to the
first span if it is the first token.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from practicum.errors import VocabularyError
from practicum.text.renderer import read_byte_alphabet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
REPLACEMENT = "\ufffd"
"""The letter that decoders write for bytes that are no character."""

_CROSSING = re.compile(rb"[^ ] ")
_READABLE = frozenset({"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"})


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of student and teacher that stand for the same bytes."""

    student: slice
    teacher: slice

    @property
    def is_single(self) -> bool:
        """Return True if it is one token of each."""
        sides = (self.student, self.teacher)
        return all(side.stop - side.start == 1 for side in sides)

    def shift(self, student: int, teacher: int) -> "Span":
        """Return the span that many tokens later on each side."""
        return Span(
            slice(self.student.start + student, self.student.stop + student),
            slice(self.teacher.start + teacher, self.teacher.stop + teacher),
        )


def align_tokens(student: Sequence[bytes], teacher: Sequence[bytes]) -> list[Span]:
    """Return the spans of two tokenizations of the same bytes; none if there are no bytes."""
    ends = [list(accumulate(map(len, tokens))) for tokens in (student, teacher)]
    assert ends[0][-1:] == ends[1][-1:] or not any((*student, *teacher)), "the bytes are the same"
    # Ends and not pairs of tokens: a text has few of them, and a set finds the common ones at once.
    shared = sorted(set(ends[0]).intersection(ends[1]) - {0})
    spans, start = [], (0, 0)
    for end in shared:
        # To the right of equal ends, so that tokens without bytes stay with the span before them.
        stop = bisect_right(ends[0], end), bisect_right(ends[1], end)
        spans.append(Span(slice(start[0], stop[0]), slice(start[1], stop[1])))
        start = stop
    return spans


def join_words(spans: Sequence[Span], student: Sequence[bytes]) -> list[Span]:
    """Join spans so that they end where a space begins a new word, or with the text.

    In a vocabulary without a token across such a boundary, the text after the boundary does not
    change the tokens before it.
    """
    joined: list[Span] = []
    before = b" "
    for span in spans:
        text = b"".join(student[span.student])
        # Between two spaces the tokenization may still depend on the text after the last space.
        if joined and (before.endswith(b" ") or not text.startswith(b" ")):
            opened = joined.pop()
            span = Span(
                slice(opened.student.start, span.student.stop),
                slice(opened.teacher.start, span.teacher.stop),
            )
        joined.append(span)
        before = text
    return joined


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes that each token of a vocabulary stands for; control tokens stand for none.

    `drops_first_space` is True if the tokenizer drops a space at the beginning of a text.
    """

    pieces: Mapping[int, bytes]
    drops_first_space: bool

    @classmethod
    def read(cls, tokenizer: "PreTrainedTokenizerBase") -> "TokenBytes":
        """Read the bytes from a byte-level or SentencePiece tokenizer, or one of characters.

        The text of each token is the text that the tokenizer itself decodes. Raises VocabularyError
        for other kinds, because their tokens are not stretches of a text, and if the bytes of a partial
        character contradict the decoded text.
        """
        steps = _list_decoders(tokenizer)
        kinds = {step["type"] for step in steps}
        special = {n for n, token in tokenizer.added_tokens_decoder.items() if token.special}
        names = {n: token for token, n in tokenizer.get_vocab().items() if n not in special}
        pieces = {}
        for number, text in _decode_each(tokenizer, names).items():
            piece = text.encode()
            if REPLACEMENT in text:
                piece = _read_piece(names[number], steps)
                if piece.decode("utf-8", "replace") != text:
                    raise _build_refusal(
                        tokenizer,
                        f"token {number} ({names[number]!a}) is read as {piece!r}, and the "
                        f"tokenizer decodes it as {text!a}",
                    )
            pieces[number] = piece
        strips = any(step["type"] == "Strip" and step["start"] > 0 for step in steps)
        metaspace = any(
            step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"
            for step in steps
        )
        return cls(pieces, drops_first_space="ByteLevel" not in kinds and (strips or metaspace))

    def spell(self, tokens: Sequence[int], *, at_start: bool = False) -> list[bytes]:
        """Return the bytes of each token; `at_start` if they begin a text."""
        spelled = [self.pieces.get(token, b"") for token in tokens]
        if at_start and self.drops_first_space and spelled and spelled[0][:1] == b" ":
            spelled[0] = spelled[0][1:]
        return spelled

    @property
    def crosses_words(self) -> bool:
        """True if a token holds a space after another character, so that words may share tokens."""
        return any(_CROSSING.search(piece) for piece in self.pieces.values())

    def find_byte_tokens(self) -> dict[int, int]:
        """Return the token of each byte that is no character by itself and has a token."""
        return {
            piece[0]: number
            for number, piece in self.pieces.items()
            if len(piece) == 1 and piece[0] >= 0x80
        }


def _list_decoders(tokenizer: "PreTrainedTokenizerBase") -> list[dict[str, Any]]:
    """Return the steps by which a tokenizer joins its tokens to a text."""
    if not tokenizer.is_fast:
        raise _build_refusal(tokenizer, "it has no tokenizer.json")
    backend: Any = tokenizer.backend_tokenizer
    # A decoder is pickled as its part of tokenizer.json, which is much faster to read than all.
    steps = [] if backend.decoder is None else _flatten(json.loads(backend.decoder.__getstate__()))
    unknown = sorted({step["type"] for step in steps} - _READABLE)
    if unknown:
        raise _build_refusal(tokenizer, f"it joins tokens by {', '.join(unknown)}")
    return steps


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flatten(inner)]


def _build_refusal(tokenizer: "PreTrainedTokenizerBase", reason: str) -> VocabularyError:
    return VocabularyError(
        f"{tokenizer.name_or_path or 'a tokenizer'}: its tokens are no stretches of bytes: {reason}; "
        "take a byte-level or a SentencePiece tokenizer"
    )


def _decode_each(tokenizer: "PreTrainedTokenizerBase", names: Mapping[int, str]) -> dict[int, str]:
    """Return the text that a tokenizer decodes each token to, within a text.

    Each token is decoded after an alphanumeric token, because some tokenizers drop a leading space.
    """
    backend: Any = tokenizer.backend_tokenizer
    first = next(
        ([n] for n, name in names.items() if name.isalnum() and backend.decode([n]) == name), []
    )
    start = backend.decode(first)
    pairs = backend.decode_batch([[*first, n] for n in names], skip_special_tokens=False)
    for number, pair in zip(names, pairs, strict=True):
        if not pair.startswith(start):
            raise _build_refusal(
                tokenizer, f"token {number} ({names[number]!a}) changes the text before it"
            )
    return {n: pair.removeprefix(start) for n, pair in zip(names, pairs, strict=True)}


def _read_piece(token: str, steps: Sequence[dict[str, Any]]) -> bytes:
    """Return the bytes of a token by its name, also of a part of a character."""
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        # A letter of no byte is in no token that the tokenizer makes, so the token is its own text.
        alphabet = read_byte_alphabet()
        if all(letter in alphabet for letter in token):
            return bytes(alphabet[letter] for letter in token)
    if "ByteFallback" in kinds and (match := _BYTE.fullmatch(token)):
        return bytes([int(match.group(1), 16)])
    for step in steps:
        if step["type"] == "Replace" and "String" in step["pattern"]:
            token = token.replace(step["pattern"]["String"], step["content"])
        elif step["type"] == "Metaspace":
            token = token.replace(step["replacement"], " ")
    return token.encode("utf-8", "surrogatepass")
