"""Grammars of the replies that a verifier evaluates as code: only sentences reach the verifier.

A grammar is a function of the reply. It returns the sentence, written again from its tokens, or
None if the reply is no sentence. No grammar knows attributes, subscripts, keywords, assignments, or
names of more than one letter that are not listed in this file, so a sentence can call nothing but a
mathematical function.
"""

import re
from collections.abc import Callable
from functools import partial

Grammar = Callable[[str], str | None]

LONGEST = 20_000
"""The most characters of a reply; a longer one is no sentence."""
DEEPEST = 50
"""The most levels of brackets within brackets, signs before signs, powers of powers."""

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
    r"(?P<number>[-+]?[0-9]+(?:\.[0-9]+)?)|(?P<text>'[^'\"\\\n]*'|\"[^'\"\\\n]*\")"
    r"|(?P<sign>[\[\](),])|[ \t\r\n]+"
)


class _NoSentence(Exception):
    """The reply is not a sentence of the grammar."""


class _GrammarTokens:
    """The tokens of a reply, read from left to right; `level` counts the open levels of nesting."""

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
                text = match.group()
                self.texts.append(text)
                self._kinds.append(text if match.lastgroup == "sign" else match.lastgroup)
        self._kinds.append("")

    @property
    def kind(self) -> str:
        """The next token: `number`, `name`, `text` or the sign itself; empty at the end."""
        return self._kinds[self._next]

    def take(self, *kinds: str) -> str:
        """Consume and return the next token; raise _NoSentence if it is of another kind."""
        if self.kind not in kinds:
            raise _NoSentence
        self._next += 1
        return self.texts[self._next - 1]

    def enter(self) -> None:
        """Open a level of nesting; raise _NoSentence if it is too deep."""
        self.level += 1
        if self.level > DEEPEST:
            raise _NoSentence


def read_arithmetic(reply: str) -> str | None:
    """Read numbers, `+ - * / **` and round brackets: `10*(8 - 5) - 6`."""
    return _read_sentence(_EXPRESSION, reply, partial(_read_expression, has_names=False))


def read_mathematics(reply: str) -> str | None:
    """Read arithmetic with one-letter variables, `pi` and known functions: `x*sin(3*x)/3 + C`."""
    return _read_sentence(_EXPRESSION, reply, partial(_read_expression, has_names=True))


def read_list(reply: str) -> str | None:
    """Read a number, a quoted text, or a list of them in brackets: `[['Q', '_'], ['_', 'Q']]`."""
    return _read_sentence(_LIST, reply, _read_entry)


def match_pattern(pattern: str) -> Grammar:
    """Return the grammar of texts that match the whole pattern; it leaves them unchanged."""
    compiled = re.compile(pattern)
    return lambda reply: reply if len(reply) <= LONGEST and compiled.fullmatch(reply) else None


def try_both(first: Grammar, second: Grammar) -> Grammar:
    """Return the grammar of the sentences of both grammars; the first one has precedence."""

    def read(reply: str) -> str | None:
        sentence = first(reply)
        return second(reply) if sentence is None else sentence

    return read


def _read_sentence(
    pattern: re.Pattern[str], reply: str, rule: Callable[[_GrammarTokens], None]
) -> str | None:
    try:
        tokens = _GrammarTokens(pattern, reply)
        rule(tokens)
    except _NoSentence:
        return None
    # Spaces between the tokens make the verifier split the text exactly where this parser did.
    return None if tokens.kind else " ".join(tokens.texts)


def _read_expression(tokens: _GrammarTokens, has_names: bool) -> None:
    # Sums and products alike: which of them binds first does not decide what is a sentence.
    _read_signed(tokens, has_names)
    while tokens.kind in ("+", "-", "*", "/"):
        tokens.take("+", "-", "*", "/")
        _read_signed(tokens, has_names)


def _read_signed(tokens: _GrammarTokens, has_names: bool) -> None:
    """Read an atom with its sign or its power: `-x**-2`."""
    tokens.enter()
    if tokens.kind in ("+", "-"):
        tokens.take("+", "-")
        _read_signed(tokens, has_names)
    else:
        _read_atom(tokens, has_names)
        if tokens.kind == "**":
            tokens.take("**")
            _read_signed(tokens, has_names)
    tokens.level -= 1


def _read_atom(tokens: _GrammarTokens, has_names: bool) -> None:
    if tokens.kind == "number":
        tokens.take("number")
        return
    takes_several = False
    if tokens.kind == "name" and has_names:
        name = tokens.take("name")
        if len(name) == 1 or name in _CONSTANTS:
            return
        if name not in _FUNCTIONS:
            raise _NoSentence
        takes_several = True
    tokens.take("(")
    _read_expression(tokens, has_names)
    while takes_several and tokens.kind == ",":
        tokens.take(",")
        _read_expression(tokens, has_names)
    tokens.take(")")


def _read_entry(tokens: _GrammarTokens) -> None:
    start = tokens.take("number", "text", "[", "(")
    if start not in _CLOSING:
        return
    closing = _CLOSING[start]
    tokens.enter()
    while tokens.kind != closing:
        _read_entry(tokens)
        if tokens.kind != closing:
            tokens.take(",")
    tokens.level -= 1
    tokens.take(closing)
