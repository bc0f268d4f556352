"""Foreign text made safe to show: nothing in it moves the cursor, hides, reverses what is read, or tells a secret."""

import html
import re
import unicodedata
from collections.abc import Iterator
from itertools import pairwise

_ESCAPED = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
# Letters and marks by category, but nothing is drawn for them: a joiner, Hangul and Khmer fillers.
_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}

SHOWN = 200
"""Characters of foreign text in a message."""

SECRET_RUN = 8
"""So many letters of a secret in a row are never shown."""

_ESCAPES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (r"\\(?:u([0-9a-f]{4})|.)", "%([0-9a-f]{2})", r"&#?\w{1,8};")
)
"""A letter as JSON, a URL and HTML may write it."""

ESCAPED_AT_MOST = 2
"""So many times over a secret is looked for behind escapes."""


def make_printable(text: str) -> str:
    """The text on one line, each control, invisible and direction character written as its escape.

    Example: `printable("a\\x1b[2J")` is the eight visible characters `a\\x1b[2J`. Markup of a display library, such as
    square brackets, is not its business.
    """
    return "".join(_shown(character) for character in text)


def excerpt(text: str, secret: str | None = None, most: int = SHOWN) -> str:
    """Return the beginning of foreign text as a message shows it: on one line, printable, without the secret, shortened.

    Of a secret no run of `SECRET_RUN` letters is left, and a shorter one not as a whole, in either case of its letters and however
    JSON, a URL or HTML escapes them. So it does not matter where the text was cut, or who cut it.
    """
    line = make_printable(" ".join(text[: 8 * most].split()))
    return (without_secret(line, " ".join(secret.split())) if secret else line)[:most]


def without_secret(line: str, secret: str) -> str:
    """Return the line with `***` for each stretch that is made of runs of the secret's letters."""
    while True:
        blotted = _blotted(line, secret)
        # What stood on both sides of a stretch may be a run together with the stars between.
        if len(blotted) >= len(line):
            return blotted
        line = blotted


def _blotted(line: str, secret: str) -> str:
    run = min(len(secret), SECRET_RUN)
    secret = _small(secret)
    runs = {secret[start : start + run] for start in range(len(secret) - run + 1)}
    hidden = [False] * len(line)
    for letters, edges in _readings(line, list(range(len(line) + 1)), ESCAPED_AT_MOST):
        small = _small(letters)
        for start in range(len(small) - run + 1):
            if small[start : start + run] in runs:
                first, end = edges[start], edges[start + run]
                hidden[first:end] = [True] * (end - first)
    cuts = [
        0,
        *(place for place in range(1, len(line)) if hidden[place] != hidden[place - 1]),
        len(line),
    ]
    return "".join(
        "***" if hidden[start] else line[start:end] for start, end in pairwise(cuts) if start < end
    )


def _readings(text: str, edges: list[int], times: int) -> Iterator[tuple[str, list[int]]]:
    """Yield the text as it stands and with one kind of escapes after another resolved, so many times at most.

    `edges` are where in the line each letter begins, and where the last one ends.
    """
    yield text, edges
    for escape in _ESCAPES if times else ():
        letters: list[str] = []
        begins: list[int] = []
        place = 0
        for match in escape.finditer(text):
            letter = _letter(match)
            letters += [text[place : match.start()], letter]
            begins += edges[place : match.start()] + [edges[match.start()]] * len(letter)
            place = match.end()
        if place:
            yield from _readings(
                "".join([*letters, text[place:]]), begins + edges[place:], times - 1
            )


def _letter(match: re.Match[str]) -> str:
    """Return what an escape stands for."""
    code = next(iter(match.groups()), None)
    if code is not None:
        return chr(int(code, 16))
    return match[0][1:] if match[0].startswith("\\") else html.unescape(match[0])


def _small(text: str) -> str:
    """Return the text in small letters, of which there are as many."""
    return "".join(chr(ord(letter) + 32) if "A" <= letter <= "Z" else letter for letter in text)


def _shown(character: str) -> str:
    if character in _SHORT:
        return _SHORT[character]
    if unicodedata.category(character) not in _ESCAPED and character not in _INVISIBLE:
        return character
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
