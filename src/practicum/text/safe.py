"""Make foreign text safe to show: it moves no cursor, reverses nothing and tells no secret."""

import html
import re
import unicodedata
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

_ESCAPED = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
# By category letters and marks, yet displays draw nothing: a joiner, Hangul and Khmer fillers.
_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}

MAX_EXCERPT_CHARACTERS = 200
"""The most characters of foreign text in a message."""

SECRET_RUN = 8
"""A run of this many letters of a secret is never shown."""

_ESCAPES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (r"\\(?:u([0-9a-f]{4})|.)", "%([0-9a-f]{2})", r"&#?\w{1,8};")
)
"""A letter as JSON, a URL and HTML may escape it."""

MAX_ESCAPE_LEVELS = 2
"""The levels of nested escapes that are resolved in the search for a secret."""


def make_printable(text: str) -> str:
    """Return the text on one line, with control, invisible and direction characters escaped.

    Example: `make_printable("a\\x1b[2J")` is the eight visible characters `a\\x1b[2J`. Markup of a
    display library, such as square brackets, is not changed.
    """
    return "".join(map(_escape, text))


def excerpt(text: str, secret: str | None = None, most: int = MAX_EXCERPT_CHARACTERS) -> str:
    """Return the first `most` characters of foreign text, on one line, printable, without a secret.

    No run of `SECRET_RUN` letters of the secret remains, and no complete shorter secret, in upper
    or lower case and behind the escapes of JSON, URLs and HTML. So a secret does not show even if
    the text was cut within it.
    """
    line = make_printable(" ".join(text[: 8 * most].split()))
    return (blot_secret(line, " ".join(secret.split())) if secret else line)[:most]


def blot_secret(line: str, secret: str) -> str:
    """Return the line with `***` for each stretch that consists of runs of the secret's letters."""
    while True:
        blotted = _blot_once(line, secret)
        # The text before and after a stretch may form another run together with the stars.
        if len(blotted) >= len(line):
            return blotted
        line = blotted


def _blot_once(line: str, secret: str) -> str:
    length = min(len(secret), SECRET_RUN)
    secret = _lower_ascii(secret)
    runs = {secret[start : start + length] for start in range(len(secret) - length + 1)}
    is_hidden = [False] * len(line)
    for letters, edges in _resolve_escapes(line, list(range(len(line) + 1)), MAX_ESCAPE_LEVELS):
        lowered = _lower_ascii(letters)
        for start in range(len(lowered) - length + 1):
            if lowered[start : start + length] in runs:
                first, end = edges[start], edges[start + length]
                is_hidden[first:end] = [True] * (end - first)
    return "".join(
        "***" if hidden else "".join(letter for letter, _ in stretch)
        for hidden, stretch in groupby(zip(line, is_hidden, strict=True), key=itemgetter(1))
    )


def _resolve_escapes(text: str, edges: list[int], levels: int) -> Iterator[tuple[str, list[int]]]:
    """Yield the text, and the text with each kind of escape resolved, up to `levels` deep.

    `edges` are the positions in the line at which each letter begins, and the end of the last one.
    """
    # Resolving shifts letters, so the edges are kept: a run that appears only after resolving is
    # hidden at its position in the original line.
    yield text, edges
    for escape in _ESCAPES if levels else ():
        letters: list[str] = []
        starts: list[int] = []
        end = 0
        for match in escape.finditer(text):
            letter = _resolve_escape(match)
            letters += [text[end : match.start()], letter]
            starts += edges[end : match.start()] + [edges[match.start()]] * len(letter)
            end = match.end()
        if end:
            resolved = "".join([*letters, text[end:]])
            yield from _resolve_escapes(resolved, starts + edges[end:], levels - 1)


def _resolve_escape(match: re.Match[str]) -> str:
    """Return the characters that an escape stands for."""
    code = next(iter(match.groups()), None)
    if code is not None:
        return chr(int(code, 16))
    return match[0][1:] if match[0].startswith("\\") else html.unescape(match[0])


def _lower_ascii(text: str) -> str:
    # `str.lower` may change the number of characters, and positions must stay.
    return "".join(chr(ord(letter) + 32) if "A" <= letter <= "Z" else letter for letter in text)


def _escape(character: str) -> str:
    if character in _SHORT:
        return _SHORT[character]
    if unicodedata.category(character) not in _ESCAPED and character not in _INVISIBLE:
        return character
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
