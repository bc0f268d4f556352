"""Text of users and models made safe to show: nothing in it moves the cursor, hides, or reverses what is read."""

import unicodedata

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def printable(text: str) -> str:
    """The text on one line, each control, format and direction character written as its code point."""
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if character == "\n":
        return "\\n"
    if character == "\t":
        return " "
    return f"\\u{{{ord(character):x}}}" if unicodedata.category(character) in _HIDDEN else character
