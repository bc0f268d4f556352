"""Grammars of the replies that a verifier evaluates as code: only a sentence of its grammar reaches the verifier.

Each grammar is a function of the reply. It returns the sentence written anew from its tokens, or None where the reply is
no sentence. No grammar knows attributes, subscripts, keywords, assignments, or names of more than one letter that are not
listed here, so that a sentence has nothing to call but a mathematical function.
"""

import re
from collections.abc import Callable

Grammar = Callable[[str], str | None]

LONGEST = 20_000
"""Characters of a reply; a longer one is no sentence."""
DEEPEST = 50
"""Brackets within brackets, signs before signs, powers of powers."""

_FUNCTIONS = frozenset(
    {
        *("sqrt", "exp", "log", "ln", "Abs", "erf", "Integral"),
        *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "asec", "acsc"),
        *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    }
)
_CONSTANTS = frozenset({"pi"})
_CLOSING = {"[": "]", "(": ")"}
_EXPRESSION = re.compile(
    r"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)|(?P<name>[A-Za-z]+)|(?P<sign>\*\*|[-+*/(),])|[ \t]+"
)
_LIST = re.compile(
    r"(?P<number>[-+]?[0-9]+(?:\.[0-9]+)?)|(?P<text>'[^'\"\\\n]*'|\"[^'\"\\\n]*\")|(?P<sign>[\[\](),])|[ \t\r\n]+"
)


class _NoSentence(Exception):
    """The reply is not of the grammar."""


class _Tokens:
    """The tokens of a reply, read one by one from the left; `level` counts the parts within parts."""

    def __init__(self, pattern: re.Pattern[str], reply: str) -> None:
        self.texts: list[str] = []
        self.level = 0
        self._kinds: list[str] = []
        self._next = 0
        position = 0
        while position < len(reply):
            match = pattern.match(reply, position)
            if match is None or len(reply) > LONGEST:
                raise _NoSentence
            position = match.end()
            if match.lastgroup is not None:
                self.texts.append(match.group())
                self._kinds.append(match.lastgroup)

    @property
    def kind(self) -> str:
        """The kind of the next token: `number`, `name`, `text`, or what a sign says; nothing at the end."""
        if self._next == len(self.texts):
            return ""
        kind = self._kinds[self._next]
        return self.texts[self._next] if kind == "sign" else kind

    def take(self, *kinds: str) -> str:
        """Return the next token and go on; raise _NoSentence where it is of another kind."""
        if self.kind not in kinds:
            raise _NoSentence
        self._next += 1
        return self.texts[self._next - 1]

    def enter(self) -> None:
        """Begin a part within a part; raise _NoSentence where that is too deep."""
        self.level += 1
        if self.level > DEEPEST:
            raise _NoSentence


def arithmetic(reply: str) -> str | None:
    """Read numbers, `+ - * / **` and round brackets: `10*(8 - 5) - 6`."""
    return _sentence(_EXPRESSION, reply, lambda tokens: _expression(tokens, names=False))


def mathematics(reply: str) -> str | None:
    """Read arithmetic with variables of one letter, `pi`, and calls of known functions: `x*sin(3*x)/3 + C`."""
    return _sentence(_EXPRESSION, reply, lambda tokens: _expression(tokens, names=True))


def lists(reply: str) -> str | None:
    """Read a number, a quoted text, or a list of such in square or round brackets: `[['Q', '_'], ['_', 'Q']]`."""
    return _sentence(_LIST, reply, _item)


def written_as(pattern: str) -> Grammar:
    """Return the grammar of texts that match a pattern as a whole, and are left as they are."""
    whole = re.compile(pattern)
    return lambda reply: reply if len(reply) <= LONGEST and whole.fullmatch(reply) else None


def either(first: Grammar, second: Grammar) -> Grammar:
    """Return the grammar of what is a sentence of one or else of the other."""

    def read(reply: str) -> str | None:
        sentence = first(reply)
        return second(reply) if sentence is None else sentence

    return read


def _sentence(pattern: re.Pattern[str], reply: str, rule: Callable[[_Tokens], None]) -> str | None:
    try:
        tokens = _Tokens(pattern, reply)
        rule(tokens)
    except _NoSentence:
        return None
    return None if tokens.kind else " ".join(tokens.texts)


def _expression(tokens: _Tokens, names: bool) -> None:
    """Read sums and products alike: which of the two binds its numbers first makes no difference to what is a sentence."""
    _signed(tokens, names)
    while tokens.kind in ("+", "-", "*", "/"):
        tokens.take("+", "-", "*", "/")
        _signed(tokens, names)


def _signed(tokens: _Tokens, names: bool) -> None:
    """Read a sign and what it stands before, or a power: `-x**-2`."""
    tokens.enter()
    if tokens.kind in ("+", "-"):
        tokens.take("+", "-")
        _signed(tokens, names)
    else:
        _atom(tokens, names)
        if tokens.kind == "**":
            tokens.take("**")
            _signed(tokens, names)
    tokens.level -= 1


def _atom(tokens: _Tokens, names: bool) -> None:
    if tokens.kind == "number":
        tokens.take("number")
        return
    if tokens.kind == "name" and names:
        name = tokens.take("name")
        if len(name) == 1 or name in _CONSTANTS:
            return
        if name not in _FUNCTIONS:
            raise _NoSentence
        _bracketed(tokens, names, several=True)
        return
    _bracketed(tokens, names, several=False)


def _bracketed(tokens: _Tokens, names: bool, several: bool) -> None:
    tokens.take("(")
    _expression(tokens, names)
    while several and tokens.kind == ",":
        tokens.take(",")
        _expression(tokens, names)
    tokens.take(")")


def _item(tokens: _Tokens) -> None:
    start = tokens.take("number", "text", "[", "(")
    if start not in _CLOSING:
        return
    closing = _CLOSING[start]
    tokens.enter()
    while tokens.kind != closing:
        _item(tokens)
        if tokens.kind != closing:
            tokens.take(",")
    tokens.level -= 1
    tokens.take(closing)
