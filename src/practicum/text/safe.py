"""Text of users and models made safe to show: nothing in it moves the cursor, hides, or reverses what is read."""

import unicodedata

_ESCAPED = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
# Letters and marks by category, but nothing is drawn for them: a joiner, Hangul and Khmer fillers.
_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str) -> str:
    """The text on one line, each control, invisible and direction character written as its escape.

    Example: `printable("a\\x1b[2J")` is the eight visible characters `a\\x1b[2J`. Markup of a display library, such as
    square brackets, is not its business.
    """
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if character in _SHORT:
        return _SHORT[character]
    if unicodedata.category(character) not in _ESCAPED and character not in _INVISIBLE:
        return character
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
