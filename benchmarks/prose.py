"""Count constructions that well-edited English documentation of this field rarely uses.

    python -m benchmarks prose [PATH ...] [--top N] [--rooms]

Reads docstrings, comments and string literals of at least five words in Python, the text of Markdown pages, and the comments and
`about` texts of recipes. Prints the marks per 10,000 words of each path, and the sentences with the most marks. A mark is a
hint: one in a page is no fault, and a high rate makes readers read twice. `tests/test_prose.py` bounds the rates.
"""

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring import format_table

ROOT = Path(__file__).resolve().parents[1]

FEWEST_WORDS = 5
"""The words of a string literal that make it a sentence."""

_UNITS = "step|token|answer|prompt|row|rollout|request|turn|second|teacher|worker|column"
_COUNTED = "nats|bytes|tokens|seconds|rows|answers|operations|flops|numbers|prompts|steps|texts|ms"

MARKS = {
    "a pronoun for a noun": r"(?:those|these) (?:of|that|which|who|whose|are|have|with|from|it|they|in)",
    "that of": r"(?:that|those) of|of which|of whom|of whose|that which",
    "an unnamed person": r"nobody(?:'s)?|somebody(?:'s)?|who(?:m)?ever|whatever",
    "an old adverb": r"anew|besides?|likewise|alone|in vain|so many|as a whole",
    "of its own": r"of (?:its|their|our|one's) own",
    "whose": r"whose|whom",
    "a phrasal verb of motion": r"go(?:es)? on|come(?:s)? back|stay(?:s)? as|give(?:s|n)? back",
    "as it is": r"as (?:it|they) (?:is|are|was|were|stands?)",
    "the other": r"(?:the others?|another one|each other's|the ones?)(?! (?:hand|side|end|two)\b)",
    "stands for is": r"(?:stands?|stood) (?:in|at|on|under|beside|there|where|for what|as)",
    "a clause for a noun": (
        r"(?:of|from|in|by|to|at|with|for|and|or|than|say|says|said|tells?) what"
        r" (?:is|was|it|they|the|a|an|this|that|can|has|have|had)"
    ),
    "none of": r"none of (?:the|its|them)|there (?:is|are|was|were) none",
    "are rather": r"(?:is|are) rather",
    "a superlative of an adjective": r"likeliest|dearest|commonest|surest",
    "told apart": r"(?:told|tell|tells) (?:\w+ )?apart",
    "a text that speaks": r"(?:that|which) spoke|said (?:while|before|about|of)|sa(?:y|ys) the same",
    "to mend": r"mend(?:s|ed|ing)?",
    "a unit with an article": rf"(?:{_COUNTED}) an? (?:{_UNITS})",
    "a missing verb": r"where the \w+ sits|how long a (?:\w+ )?one|to do it again",
}
"""The constructions by class, as regular expressions of whole words."""

COMPILED = {
    name: re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE) for name, pattern in MARKS.items()
}
WORD = re.compile(r"[A-Za-z]+")
CODE = re.compile(r"`[^`]*`|https?://\S+")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text of a file."""

    path: Path
    number: int
    text: str

    @property
    def marks(self) -> list[str]:
        """The marked words of the line."""
        return find_marks(self.text)


def find_marks(text: str) -> list[str]:
    """Return the marked words of a text, without code and addresses."""
    plain = CODE.sub("", text)
    return [match.group(0) for pattern in COMPILED.values() for match in pattern.finditer(plain)]


def read_lines(path: Path) -> list[Line]:
    """Return the text of a file, or of all files of a folder."""
    readers = {".py": read_python, ".md": read_markdown, ".yaml": read_yaml}
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return [
        Line(file, number, text)
        for file in files
        if file.suffix in readers and not any(part.startswith(".") for part in file.parts)
        for number, text in readers[file.suffix](file.read_text("utf-8"))
    ]


def read_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of docstrings and of long literals, then the comments."""
    docstrings, parts = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.add(node.value)
        if isinstance(node, ast.JoinedStr):
            parts |= set(node.values)
        if node in parts:
            continue
        text = _read_literal(node)
        if text is None or (node not in docstrings and len(WORD.findall(text)) < FEWEST_WORDS):
            continue
        first: int = getattr(node, "lineno", 1)
        yield from enumerate(text.splitlines(), start=first)
    if "#" not in source:
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def _read_literal(node: ast.AST) -> str | None:
    """Return the text of a literal, with X for each value in it."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
        return "".join(map(str, parts))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None


def read_markdown(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page without its blocks of code."""
    in_code = False
    for number, line in enumerate(source.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield number, line


def read_yaml(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments of a recipe, and its texts about itself."""
    for number, line in enumerate(source.splitlines(), start=1):
        if "#" in line:
            yield number, line.partition("#")[2]
        if match := re.match(r"\s*about:(.*)|^( {2,}[A-Z].*)", line):
            yield number, (match.group(1) or match.group(2)).partition("#")[0]


def measure_rate(lines: Iterable[Line]) -> tuple[int, int, float]:
    """Return the marks, the words and the marks per 10,000 words."""
    marks = words = 0
    for line in lines:
        marks += len(line.marks)
        words += len(WORD.findall(line.text))
    return marks, words, 10_000 * marks / max(words, 1)


def main() -> None:
    """Print the rate of each path, then the lines with the most marks."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks prose",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--top", type=int, default=10, metavar="N")
    parser.add_argument("--rooms", action="store_true", help="one row per folder of each path")
    arguments = parser.parse_args()
    paths = arguments.paths or [ROOT / name for name in ("src", "docs", "README.md", "tests")]
    if arguments.rooms:
        paths = [
            room for path in paths for room in sorted(path.iterdir()) if room.name != "__pycache__"
        ]
    read = {path: read_lines(path) for path in paths}
    rows = [[str(path), *map(round, measure_rate(lines))] for path, lines in read.items()]
    print(format_table(["path", "marks", "words", "per 10,000"], rows))
    lines = sorted(
        (line for part in read.values() for line in part), key=lambda line: -len(line.marks)
    )
    for line in lines[: arguments.top]:
        if line.marks:
            print(f"{line.path}:{line.number}: {line.text.strip()}   [{', '.join(line.marks)}]")


if __name__ == "__main__":
    main()
