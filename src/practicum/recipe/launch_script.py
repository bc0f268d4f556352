"""Read the arguments of verl from a launch script in bash, without running it.

Known are assignments, arrays, `${NAME:-default}`, `$(( ... ))`, quotes and comments. A value that
only the shell can compute, and everything inside `if`, loops and functions, is reported and not
used.
"""

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from practicum.errors import RecipeError

ENTRY = re.compile(r"(.*\.|.*/)?main_ppo(\.py)?")
"""The module or file of verl's trainer, in the command that starts it."""
LEADING = ("then", "else", "elif", "do")
OPENING = ("if", "for", "while", "until", "case", "select", "function", "{")
CLOSING = ("fi", "done", "esac", "}")
DECLARING = ("export", "declare", "local", "readonly", "typeset")
HOME = "~"
LONGEST_SUM = 200
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
DEEPEST = 8

_PARAMETER = r"\$\{(?:[^{}]|\$\{[^{}]*\})*\}|\$[A-Za-z_]\w*|\$[@*#?0-9]"
_SUM = r"\$\(\((?:[^()]|\([^()]*\))*\)\)"
_COMMAND = r"\$\([^()]*\)|`[^`]*`"
_EXPANSION = re.compile(f"(?P<sum>{_SUM})|(?P<command>{_COMMAND})|(?P<parameter>{_PARAMETER})")
_TOKEN = re.compile(
    rf"""(?P<space>[ \t]+|\\\r?\n)
    |(?P<operator>\r?\n|[;()|&<>])
    |(?P<single>'[^']*')
    |(?P<double>"(?:[^"\\]|\\.|\n)*")
    |(?P<expansion>{_SUM}|{_COMMAND}|{_PARAMETER})
    |(?P<escape>\\.)
    |(?P<plain>[^\s;()|&<>'"$\\`]+|\$|\S)""",
    re.VERBOSE | re.DOTALL,
)
_DEFAULT = re.compile(r"([A-Za-z_]\w*|[0-9])(?::?[-=](.*))?", re.DOTALL)
_ARRAY = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)


class _Unknown(Exception):
    """A value that only the shell knows."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a word; `kind` is the group of `_TOKEN` that it has."""

    kind: str
    text: str


Word = tuple[_Piece, ...]


@dataclass(slots=True)
class LaunchScript:
    """The arguments of verl's trainer in a script, and a line for each thing that is not taken."""

    arguments: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict, init=False)
    _arrays: dict[str, list[str]] = field(default_factory=dict, init=False)
    _started: int = field(default=0, init=False)

    def run_line(self, words: list[Word], array: list[Word] | None) -> None:
        """Follow one command: its words, and the elements of the array that it assigns, if any."""
        while words and _write(words[0]) in DECLARING:
            words = words[1:]
        while words and (match := _ASSIGNMENT.fullmatch(_write(words[0]))):
            name, adds = match[1], bool(match[2])
            if array is not None and len(words) == 1:
                before = self._arrays.get(name, []) if adds else []
                self._arrays[name] = [*before, *self._expand_words(array)]
                return
            self._assign(name, words[0], adds)
            words = words[1:]
        expanded = self._expand_words(words)
        place = next((n for n, word in enumerate(expanded) if ENTRY.fullmatch(word)), None)
        if place is None:
            return
        self._started += 1
        if self._started > 1:
            self.notes.append("the script starts verl several times; its first command is taken")
            return
        for word in expanded[place + 1 :]:
            self._take(word)

    def _assign(self, name: str, word: Word, adds: bool) -> None:
        """Set a name to the text after its first `=`."""
        try:
            value = self._expand(word).partition("=")[2]
        except _Unknown:
            self._names.pop(name, None)
            return
        self._names[name] = self._names.get(name, "") + value if adds else value

    def _take(self, argument: str) -> None:
        key, sign, text = argument.lstrip("+").partition("=")
        if sign and re.fullmatch(r"[A-Za-z_][\w.@/-]*", key):
            self.arguments[key] = text
        else:
            self.notes.append(f"not taken: {argument}")

    def _expand_words(self, words: list[Word]) -> list[str]:
        """Return the words with the elements of arrays in place of these; unknown ones are noted."""
        expanded: list[str] = []
        for word in words:
            text = _write(word).strip('"')
            if array := _ARRAY.fullmatch(text):
                expanded += self._arrays.get(array[1], [])
            elif text not in ("$@", "$*", "${@}"):
                try:
                    expanded.append(self._expand(word))
                except _Unknown as unknown:
                    self.notes.append(
                        f"not taken: {text}, since only the shell can compute {unknown}"
                    )
        return expanded

    def _expand(self, word: Word) -> str:
        """Return the text of a word; _Unknown if it has a value that only the shell can compute."""
        texts = []
        for piece in word:
            if piece.kind == "single":
                texts.append(piece.text[1:-1])
            elif piece.kind == "double":
                # A backslash keeps its meaning only before these.
                parts = re.split(r'\\(["$`\\\n])', piece.text[1:-1])
                texts += [
                    part if number % 2 else self._expand_text(part)
                    for number, part in enumerate(parts)
                ]
            elif piece.kind == "escape":
                texts.append(piece.text[1:])
            else:
                texts.append(self._expand_text(piece.text))
        return "".join(texts)

    def _expand_text(self, text: str, depth: int = 0) -> str:
        if depth > DEEPEST:
            raise _Unknown(text[:60])
        return _EXPANSION.sub(lambda match: self._expand_one(match, depth), text)

    def _expand_one(self, match: re.Match[str], depth: int) -> str:
        if match["command"]:
            raise _Unknown(match[0][:60])
        if match["sum"]:
            return str(self._compute(match[0], depth))
        name = match[0].removeprefix("$").removeprefix("{").removesuffix("}")
        parameter = _DEFAULT.fullmatch(name)
        if parameter is None and "." in name:
            return match[0]  # a reference of Hydra, such as ${data.seed}
        if parameter is not None and parameter[1] in self._names:
            return self._names[parameter[1]]
        if parameter is not None and parameter[2] is not None:
            return self._expand_text(parameter[2], depth + 1)
        if name == "HOME":
            return HOME
        raise _Unknown(match[0][:60])

    def _compute(self, text: str, depth: int) -> int:
        """Return the value of `$(( ... ))` over whole numbers."""
        inner = self._expand_text(text[3:-2], depth + 1)
        inner = re.sub(r"[A-Za-z_]\w*", lambda match: self._names.get(match[0], match[0]), inner)
        try:
            return _evaluate(ast.parse(inner[:LONGEST_SUM].strip(), mode="eval").body)
        except (SyntaxError, ArithmeticError, LookupError, TypeError):
            raise _Unknown(text[:60]) from None


def read_launch_script(text: str, name: str) -> LaunchScript:
    """Return the arguments with which a script starts verl; RecipeError if it does not."""
    script = LaunchScript()
    depth = 0
    for words, array in _split_commands(text):
        texts = list(map(_write, words))
        while texts and texts[0] in LEADING:
            texts.pop(0)
        first = texts[0] if texts else ""
        depth += first in OPENING
        if not depth:
            script.run_line(words, array)
        elif _ASSIGNMENT.fullmatch(first) or any(map(ENTRY.fullmatch, texts)):
            line = " ".join([*texts, *map(_write, array or ())])
            script.notes.append(f"not followed, since it is in a branch or a loop: {line}")
        depth = max(0, depth - (first in CLOSING))
    if not script.arguments:
        raise RecipeError(
            f"{name}: no command starts verl's main_ppo with arguments such as data.train_files=...; "
            "give the script that does, or its arguments as a YAML list"
        )
    return script


def _evaluate(node: ast.expr) -> int:
    """Return the value of a sum of whole numbers; LookupError or TypeError for anything else."""
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.BinOp(left, sign, right):
            return OPERATORS[type(sign)](_evaluate(left), _evaluate(right))
        case ast.UnaryOp(ast.USub(), operand):
            return -_evaluate(operand)
    raise TypeError


def _write(word: Word) -> str:
    return "".join(piece.text for piece in word)


def _split_commands(text: str) -> Iterator[tuple[list[Word], list[Word] | None]]:
    """Yield the words of each command, and the elements of the array that it assigns, if any."""
    words: list[Word] = []
    array: list[Word] | None = None
    word: list[_Piece] = []
    is_open, position = False, 0
    while position < len(text):
        if not word and text[position] == "#":
            position = text.find("\n", position) if "\n" in text[position:] else len(text)
            continue
        match = _TOKEN.match(text, position)
        assert match is not None and match.lastgroup is not None, "`\\S` takes any character"
        kind, token, position = match.lastgroup, match[0], match.end()
        if kind not in ("space", "operator"):
            word.append(_Piece(kind, token))
            continue
        begins_array = token == "(" and bool(word) and word[-1].text.endswith("=")
        if word:
            (array if is_open and array is not None else words).append(tuple(word))
            word = []
        if begins_array:
            is_open, array = True, []
        elif token == ")" and is_open:
            is_open = False
        elif kind == "operator" and not is_open:
            # A number before a redirection is a file descriptor.
            is_stream = token in "<>" and bool(words) and _write(words[-1]).isdigit()
            yield words[:-1] if is_stream else words, array
            words, array = [], None
    yield words if not word else [*words, tuple(word)], array
