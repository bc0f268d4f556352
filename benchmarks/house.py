"""The house in numbers: repeated lines, lengths, names, docstrings, comments, rooms and levels, without running anything.

    python -m benchmarks house [--names] [--record]

Each measure has a bound that `tests/test_house.py` holds; `--record` writes both into docs/architecture.md. `--names` lists the
functions that do not begin with a verb and the values that are called by grammar, with the files that they stand in.
"""

import argparse
import ast
import io
import re
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.measuring import table

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "practicum"
PAGE = ROOT / "docs" / "architecture.md"
BLOCK = 5
"""So many lines that stand in another file too are a repetition."""


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text))


DEICTICS = _words(
    "said found mine theirs ours one other own whole held told known kept now here home given asked begun written answered shown "
    "drawn taken left wanted done its rest near gone lost spent won learned heard seen each some"
)
"""Names that point at a value and do not say what it is."""

VAGUE = _words("data value item info res")
"""Names that say nothing where they live longer than a few lines."""

FEW_LINES = 5

OPENINGS = re.compile(r"^(What|Who|Whose|Whether|Where|How|Which)\b")
"""Words that begin a question, which a docstring answers."""

VERBS = _words(
    """
    abandon accept accepts adapt add admit advance aggregate align allow announce append apply arrange ask assemble assert assign
    attach attend audit backward balance begin bind blend blot bootstrap bound bring build cache calibrate call cancel cap cast
    change check choose clamp clear clip close collect combine compare compile complete compose compress compute concatenate
    configure connect consume contain contains construct continue convert converse copy correct count cover create cut decide decode
    define delete describe detach detect determine differentiate digest discard disconnect distill divide do download draw drop
    embed emit empty encode end enforce enter escape estimate evaluate evict examine exceed exchange excerpt exclude execute expand
    expire explain export extend extract fail fetch fill filter find finish fit fits fix flatten flush follow follows forget format
    forward gather generate get give grade group guard handle hash hear hide hold host identify ignore import include increase infer
    init insert inspect install interleave invalidate invert is has can needs supports should was matches join judge keep kill lay
    lead leave limit link list listen load locate lock log look loop lower mark mask match materialize measure merge meter mix mock
    modulate move multiply name narrow needs normalize note notify number observe offer open order override pack pad parse part
    pass patch pause pick place plan plot point poll pool pop predict prepare prepend pretrain print probe process produce project
    propose protect prune publish pull push put queue quote race raise rank rate reach read rebuild recall receive recognize
    recompute record recover reduce refill refresh refuse register reject release reload remember remove rename render repair
    repeat replace replay report reproduce request require resample reset reshape resolve respond restart restore restrict resume
    retrieve retry return reverse rewrite rotate round route run sample save say scale scan schedule score scrub search seed see
    select send separate serialize serve set shift shorten show shuffle shut simulate skip sleep smooth solve sort split spread
    stack start step stop store strip submit subscribe subtract suggest sum summarize supervise suppress surround suspend swap sync
    take tell terminate test tidy tie time tokenize touch trace track train transform translate trim truncate try turn unload unlock
    unpack update upload use validate verify visit wait walk warn watch weigh wrap write yield zip
    """
)
CONVERSIONS = ("to_", "from_", "as_", "of")
LENGTHS = {"functions": 80, "files": 500}


@dataclass(frozen=True, slots=True)
class Measure:
    """One number about the source, with the bound that it is held to and whether the bound is the least or the most."""

    name: str
    value: float
    bound: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        """Return whether the number is within its bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def main() -> None:
    """Print the table, and on request the names behind it."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--names", action="store_true", help="list the names behind the shares")
    made.add_argument(
        "--record", action="store_true", help="write the table into docs/architecture.md"
    )
    options = made.parse_args()
    print(table(["measure", "now", "bound"], rows()))
    if options.record:
        _record()
    if options.names:
        for file, line, name in sorted(nameless_functions() + deictic_names()):
            print(f"{file}:{line} {name}")


def _record() -> None:
    lines = [
        f"| {' | '.join(row)} |" for row in (["measure", "value", "bound"], ["---"] * 3, *rows())
    ]
    block = re.compile(r"(<!-- recorded: house -->\n).*?(<!-- end of recorded -->)", re.DOTALL)
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        block.sub(lambda match: match[1] + "\n".join(lines) + "\n" + match[2], text),
        encoding="utf-8",
    )


def rows() -> list[list[str]]:
    """Return each measure with its value and its bound, as text."""
    return [
        [
            measure.name,
            f"{measure.value:g}",
            f"{'at least' if measure.at_least else 'at most'} {measure.bound:g}",
        ]
        for measure in measures()
    ]


@cache
def measures() -> tuple[Measure, ...]:
    """Return all measures."""
    lines = sum(len(text.splitlines()) for text in sources().values())
    lengths = [length for _, _, length in functions()]
    rooms, levels = count_rooms()
    return (
        Measure("lines repeated in another file, %", round(100 * count_repeated() / lines, 2), 1.0),
        Measure("lines of the longest function", max(lengths), LENGTHS["functions"]),
        Measure(
            "lines of the longest file",
            max(len(text.splitlines()) for text in sources().values()),
            LENGTHS["files"],
        ),
        Measure(
            "names that point and do not say, of 1,000 assigned",
            deictic_share(),
            BOUNDS["deictics"],
        ),
        Measure(
            "docstrings that open with a question's word, %", opening_share(), BOUNDS["openings"]
        ),
        Measure(
            "functions that begin with a verb, %", verb_share(), BOUNDS["verbs"], at_least=True
        ),
        Measure(
            "comment lines of 1,000",
            round(1000 * count_comments() / lines, 1),
            BOUNDS["comments"],
            at_least=True,
        ),
        Measure("rooms", rooms, BOUNDS["rooms"]),
        Measure("levels", levels, BOUNDS["levels"]),
    )


BOUNDS = {
    "deictics": 0.0,
    "openings": 0.0,
    "verbs": 80.0,
    "comments": 15.0,
    "rooms": 24,
    "levels": 12,
}


@cache
def sources() -> dict[str, str]:
    """Return the text of every file of the package by its path."""
    return {
        str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8")
        for path in sorted(SOURCE.rglob("*.py"))
    }


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of every file by its path."""
    return {file: ast.parse(text) for file, text in sources().items()}


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Yield every function with its file and its length in lines."""
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield file, node, (node.end_lineno or node.lineno) - node.lineno + 1


def count_repeated() -> int:
    """Count the lines that stand in a block of five or more that another file has too, imports left out."""
    places: dict[tuple[str, ...], set[str]] = defaultdict(set)
    codes = {file: list(_code_lines(file)) for file in sources()}
    for file, code in codes.items():
        for start in range(len(code) - BLOCK + 1):
            places[tuple(line for _, line in code[start : start + BLOCK])].add(file)
    repeated = {
        (file, number)
        for file, code in codes.items()
        for start in range(len(code) - BLOCK + 1)
        if len(places[tuple(line for _, line in code[start : start + BLOCK])]) > 1
        for number, _ in code[start : start + BLOCK]
    }
    return len(repeated)


def _code_lines(file: str) -> Iterator[tuple[int, str]]:
    """Yield the lines with code that are no imports, without their indentation."""
    imports = {
        number
        for node in ast.walk(trees()[file])
        if isinstance(node, ast.Import | ast.ImportFrom)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    for number, line in enumerate(sources()[file].splitlines(), start=1):
        if number not in imports and line.strip():
            yield number, line.strip()


def assigned_names() -> Iterator[tuple[str, int, str, int]]:
    """Yield the names that are assigned in functions, and their arguments: file, line, name, and lines until the last use."""
    for file, function, _ in functions():
        lives: dict[str, list[int]] = defaultdict(list)
        stored: dict[str, int] = {}
        arguments = function.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            stored[argument.arg] = argument.lineno
        for node in ast.walk(function):
            if isinstance(node, ast.Name):
                lives[node.id].append(node.lineno)
                if isinstance(node.ctx, ast.Store):
                    stored.setdefault(node.id, node.lineno)
        for name, line in stored.items():
            yield file, line, name, max(lives[name], default=line) - line


def deictic_names() -> list[tuple[str, int, str]]:
    """Return the names that point, and the vague ones that live longer than a few lines."""
    return [
        (file, line, name)
        for file, line, name, life in assigned_names()
        if name.strip("_") in DEICTICS or (name in VAGUE and life > FEW_LINES)
    ]


def deictic_share() -> float:
    """Return how many of 1,000 assigned names point."""
    return round(1000 * len(deictic_names()) / sum(1 for _ in assigned_names()), 1)


def opening_share() -> float:
    """Return the percentage of docstrings that open with a question's word."""
    nodes = (node for tree in trees().values() for node in ast.walk(tree))
    texts = [
        text
        for node in nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
    ]
    return round(100 * sum(bool(OPENINGS.match(text)) for text in texts) / len(texts), 1)


def named_functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Return the functions whose name is to be a verb: no properties, operators, conversions, context managers and mathematics."""
    return [
        (file, node)
        for file, node, _ in functions()
        if not file.startswith(("functional", "statistics")) and _acts(node)
    ]


def _acts(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = {
        name.id
        for decorator in node.decorator_list
        for name in ast.walk(decorator)
        if isinstance(name, ast.Name)
    }
    attributes = {
        name.attr
        for decorator in node.decorator_list
        for name in ast.walk(decorator)
        if isinstance(name, ast.Attribute)
    }
    exempt = {"property", "cached_property", "contextmanager", "asynccontextmanager", "overload"}
    return not (
        node.name.startswith("__")
        or (decorators | attributes) & exempt
        or node.name.startswith(CONVERSIONS)
    )


def nameless_functions() -> list[tuple[str, int, str]]:
    """Return the functions that do not begin with a verb."""
    return [
        (file, node.lineno, node.name)
        for file, node in named_functions()
        if not _begins_with_verb(node.name)
    ]


def _begins_with_verb(name: str) -> bool:
    return name.strip("_").split("_")[0] in VERBS


def verb_share() -> float:
    """Return the percentage of functions that begin with a verb."""
    return round(100 * (1 - len(nameless_functions()) / len(named_functions())), 1)


def count_comments() -> int:
    """Count the lines that hold a comment, instructions to tools left out."""
    tools = ("# type:", "# noqa", "# fmt", "# pyright")
    tokens = (
        token
        for text in sources().values()
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )
    return sum(
        token.type == tokenize.COMMENT and not token.string.startswith(tools) for token in tokens
    )


def count_rooms() -> tuple[int, int]:
    """Return the number of rooms, which are the folders of the package, and of levels in the contract of the linter."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "importlinter"
    ]["contracts"]
    folders = [path for path in SOURCE.iterdir() if (path / "__init__.py").is_file()]
    return len(folders), len(contracts[0]["layers"])


def most_frequent(count: int = 40) -> list[tuple[str, int]]:
    """Return the most frequent first words of functions that are not verbs."""
    return Counter(
        name.strip("_").split("_")[0] for _, _, name in nameless_functions()
    ).most_common(count)


if __name__ == "__main__":
    main()
