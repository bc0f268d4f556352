"""Measure the source without running it: repetition, lengths, names, docstrings, comments, size and imports.

Names and docstrings are measured in the package, benchmarks, laboratory and examples; everything else only in the package.

    python -m benchmarks house [--names] [--record]

`tests/test_house.py` bounds each measure. `--record` writes the table into docs/architecture.md. `--names` lists the places behind
the shares: functions without a verb, vague names, docstrings that begin with a question word, classes and modules with one name.
"""

import argparse
import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.measuring import format_table
from benchmarks.structure import measure_structure

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "practicum"
TOOLS = ("benchmarks", "laboratory", "examples")
"""Folders outside the package; their names and docstrings have the same bounds."""
TESTS = ROOT / "tests"
PAGE = ROOT / "docs" / "architecture.md"
BLOCK = 5
"""The number of lines that make a repetition when another file has them too."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Place = tuple[str, int, str]
"""A file, a line, and the name or text at that line."""


BUDGET = {
    "lines": 107_800,
    "lines of the core": 96_800,
    "statements of the core": 47_500,
    "protocols and abstract classes": 30,
    "papers named in the core": 107,
    "files on the longest import chain": 44,
    "files in import cycles": 0,
}
"""The bounds of `benchmarks.structure`."""

TOLERANCE = 0.05
"""The share by which a recorded number may differ from the measured one before the table is out of date."""


def _split_words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text))


DEICTICS = _split_words(
    """
    said found mine theirs ours one other others own whole held told known kept now here home
    given asked begun written answered shown drawn taken left wanted done its rest near gone
    lost spent won learned heard seen each some
    """
)
"""Names that refer to a value without describing it."""

VAGUE = _split_words("data value item info res")
"""Names that say nothing where they live longer than `FEW_LINES`."""

IMPOSED = {
    ("forward_backward", "data"),
    ("call_binop", "left"),
    ("wrap_str_format", "value"),
    ("_attend_with_layout", "value"),
}
"""Functions and arguments that the protocols of Tinker, jinja and transformers name."""

FEW_LINES = 5
OPENINGS = re.compile(r"(What|Who|Whose|Whether|Where|How|Which)\b")
"""Words that begin a question, which a docstring answers."""

VERBS = _split_words(
    """
    abandon accept accepts adapt add admit advance aggregate align allow analyse anchor announce
    append apply arrange ask assemble assert assign attach attend audit average backward balance
    begin bend bind blend blot bootstrap bound break bring build cache calibrate call can cancel cap
    cast change check choose clamp classify clear clip clone close collect combine compact
    compare compile complete compose compress compute concatenate configure connect construct
    consume contain contains continue converse convert copy correct count cover create cut
    decide decode define delete depends derive describe detach detect determine die
    differentiate digest discard disconnect distil distill divide do double download downsample
    draw dress drop embed emit empty enable encode end enforce enter enumerate escape estimate evaluate
    evict examine exceed excerpt exchange exclude execute expand expire explain exponentiate
    export extend extract fail fetch fill filter find fingerprint finish fit fits fix flatten
    flush follow follows forget format forward fuse gather generate get give grade group guard
    halve handle has hash hear hide hold host identify ignore imitate import include increase
    index infer init inject insert inspect install interleave interpolate intersect invalidate
    invert is join judge keep kill lay lead leave limit link list listen load locate lock log
    look loop lower make map mark mask match matches materialize measure merge meter minimize
    mix mock modulate move multiply name narrow needs normalize note notify number observe offer
    on open order override pack pad parse part pass patch pause peek permute pick place plan
    play plot point poll pool pop predict prefill prepack prepare prepend pretrain print probe
    process produce project propose protect provoke prune publish pull push put queue quote race raise
    rank rate reach read rebuild recall receive recognize recommend recompute record recover
    redact reduce refill refresh refuse register reject release reload remember remove rename
    render reopen reorder repair repeat replace replay report reproduce request require resample
    reset reshape resolve respond restart restore restrict resume retrieve retry return reverse
    rewrite rotate round route run sample save say scale scan schedule score scrub search see
    seed select send separate serialize serve set shift shorten should show shuffle shut
    simulate skip sleep smooth soak solve sort speculate split spread stack start step stop store
    strip submit subscribe subtract suggest sum summarize supervise supports suppress surround
    suspend swap switch sync tabulate take tell terminate test tidy tie time tokenize touch
    trace track train transform translate trim truncate try turn unload unlock unpack update
    upload use validate verify visit wait walk warn was watch weigh widen wrap write yield zip
    """
)
CONVERSIONS = re.compile(r"(to|from|as)_|of($|_)")
"""Names of conversions, which are called after their result."""

NOUNS = {
    "property",
    "cached_property",
    "contextmanager",
    "asynccontextmanager",
    "overload",
    "setter",
}
"""Decorators of functions that are read as values, or that repeat a name."""

ENTRY = "main"
"""The function that a command begins with."""

PLUGIN_FIELDS = {"Config"}
"""Classes that every plug-in has under one name."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the package, parsed once; `nodes` are all of its syntax tree."""

    path: str
    lines: tuple[str, ...]
    nodes: tuple[ast.AST, ...]
    comments: frozenset[int]
    code: frozenset[int]

    @property
    def functions(self) -> Iterator[Function]:
        """Yield all functions and methods."""
        return (node for node in self.nodes if isinstance(node, Function))


@cache
def load_source() -> tuple[SourceFile, ...]:
    """Parse every file of the package."""
    return tuple(_parse(path) for path in sorted(SOURCE.rglob("*.py")))


@cache
def load_tools() -> tuple[SourceFile, ...]:
    """Parse every file of `TOOLS`."""
    paths = [path for folder in TOOLS for path in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(map(_parse, paths))


def count_code() -> int:
    """Count the lines of code of the package and the laboratory, which was a part of it."""
    laboratory = [file for file in load_tools() if file.path.startswith("laboratory")]
    return sum(len(file.code) for file in (*load_source(), *laboratory))


def _parse(path: Path) -> SourceFile:
    text = path.read_text(encoding="utf-8")
    nodes = tuple(ast.walk(ast.parse(text)))
    comments: set[int] = set()
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if not token.string.startswith(("# type:", "# noqa", "# fmt", "# pyright")):
                comments.add(token.start[0])
        elif token.string.strip():
            code.update(range(token.start[0], token.end[0] + 1))
    for node in nodes:
        if isinstance(node, ast.Expr) and _read_text(node):
            code.difference_update(_list_lines(node))
    name = path.relative_to(SOURCE if path.is_relative_to(SOURCE) else ROOT)
    return SourceFile(
        str(name), tuple(text.splitlines()), nodes, frozenset(comments), frozenset(code)
    )


def _read_text(node: ast.Expr) -> str | None:
    """Return the text of a statement that is only a string, such as a docstring."""
    constant = node.value
    return (
        constant.value
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
        else None
    )


def _list_lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


@dataclass(frozen=True, slots=True)
class Measure:
    """One number about the source and its bound, if it has one: the least value if `at_least`, the greatest otherwise."""

    name: str
    value: float
    bound: float | None
    at_least: bool = False

    @property
    def holds(self) -> bool:
        """Return True if the value is within the bound."""
        if self.bound is None:
            return True
        return self.value >= self.bound if self.at_least else self.value <= self.bound


@cache
def measure_house() -> tuple[Measure, ...]:
    """Return all measures of the source."""
    files = load_source()
    lines = sum(len(file.lines) for file in files)
    functions = [function for file in files for function in file.functions]
    return (
        Measure("lines of code, laboratory included", count_code(), None),
        Measure("lines repeated in another file, %", round(100 * count_repeated() / lines, 2), 1.0),
        Measure(
            "lines of the longest function", max(len(_list_lines(node)) for node in functions), 80
        ),
        Measure("lines of the longest file", max(len(file.lines) for file in files), 800),
        Measure("names that point and do not say", len(find_deictic_names()), 0),
        Measure("docstrings that open with a question's word", len(find_asking_docstrings()), 0),
        Measure("classes with another class's name", len(find_repeated_classes()), 0),
        Measure(
            "functions that begin with a verb, %", compute_verb_share(files), 80.0, at_least=True
        ),
        Measure(
            f"the same in {', '.join(TOOLS)}, %",
            compute_verb_share(load_tools()),
            80.0,
            at_least=True,
        ),
        Measure(
            "comment lines of 1,000",
            round(1000 * sum(len(file.comments) for file in files) / lines, 1),
            None,
        ),
        Measure(
            "modules with a test file at the same place, %", compute_mirrored(), 33.0, at_least=True
        ),
        *(
            Measure(f"{name}, also inside functions" if "import" in name else name, number, bound)
            for name, number, bound in _list_structure()
        ),
    )


def compute_mirrored() -> float:
    """Return the share of modules `a/b.py` with a test file `tests/a/test_b.py`, in percent."""
    modules = [Path(file.path) for file in load_source() if not file.path.endswith("__.py")]
    places = (module.with_name(f"test_{module.name.strip('_')}") for module in modules)
    return round(100 * sum((TESTS / place).is_file() for place in places) / len(modules), 1)


def _list_structure() -> Iterator[tuple[str, int, float]]:
    """Yield the measures of structure with their bounds: a budget, which a change that needs more has to raise openly."""
    measures = measure_structure()
    for name, bound in BUDGET.items():
        yield name, measures[name], bound


def count_repeated() -> int:
    """Count the lines in a block of `BLOCK` or more that another file has too, imports left out."""
    places: dict[tuple[str, ...], set[str]] = defaultdict(set)
    blocks: list[tuple[str, list[int], tuple[str, ...]]] = []
    for file in load_source():
        imports = {
            number
            for node in file.nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for number in _list_lines(node)
        }
        code = [
            (number, line.strip())
            for number, line in enumerate(file.lines, start=1)
            if line.strip() and number not in imports
        ]
        for start in range(len(code) - BLOCK + 1):
            numbers, block = zip(*code[start : start + BLOCK], strict=True)
            places[block].add(file.path)
            blocks.append((file.path, list(numbers), block))
    repeated = [
        (path, number)
        for path, numbers, block in blocks
        if len(places[block]) > 1
        for number in numbers
    ]
    return len(set(repeated))


def find_deictic_names() -> list[Place]:
    """Return the names that point, and the vague ones that live longer than `FEW_LINES`."""
    return [
        (file, line, name)
        for file, line, name, life in _yield_assigned_names()
        if name.strip("_") in DEICTICS or (name in VAGUE and life > FEW_LINES)
    ]


def _yield_assigned_names() -> Iterator[tuple[str, int, str, int]]:
    """Yield arguments and names that are assigned in functions: file, line, name, lines to the last use."""
    for file in (*load_source(), *load_tools()):
        for function in file.functions:
            last: dict[str, int] = {}
            first: dict[str, int] = {}
            for node in ast.walk(function):
                if isinstance(node, ast.arg):
                    first.setdefault(node.arg, node.lineno)
                elif isinstance(node, ast.Name):
                    last[node.id] = max(node.lineno, last.get(node.id, 0))
                    if isinstance(node.ctx, ast.Store):
                        first.setdefault(node.id, node.lineno)
            for name, line in first.items():
                if (function.name, name) in IMPOSED:
                    continue
                yield file.path, line, name, last.get(name, line) - line


def find_asking_docstrings() -> list[Place]:
    """Return the docstrings of modules, classes, functions and attributes that open with a question's word."""
    return [place for place in yield_docstrings() if OPENINGS.match(place[2])]


def yield_docstrings() -> Iterator[Place]:
    """Yield the texts of all statements that are only a string."""
    for file in (*load_source(), *load_tools()):
        for node in file.nodes:
            if isinstance(node, ast.Expr) and (text := _read_text(node)):
                yield file.path, node.lineno, text.strip().partition("\n")[0]


def compute_verb_share(files: Sequence[SourceFile]) -> float:
    """Return the percentage of functions with a leading verb, among functions that should have one."""
    acting = sum(1 for _ in _yield_acting_functions(files))
    return round(100 * (1 - len(_list_verbless(files)) / acting), 1)


def _yield_acting_functions(files: Sequence[SourceFile]) -> Iterator[tuple[str, Function]]:
    """Yield the functions that need a verb: no operators, properties, conversions, context managers or mathematics."""
    for file in files:
        if not file.path.startswith(("functional", "statistics")):
            for function in file.functions:
                decorators = {
                    name
                    for decorator in function.decorator_list
                    for name in re.findall(r"\w+", ast.unparse(decorator))
                }
                named = function.name.startswith("__") or CONVERSIONS.match(function.name)
                if not named and not decorators & NOUNS and function.name != ENTRY:
                    yield file.path, function


def find_verbless_functions() -> list[Place]:
    """Return the functions that do not begin with a verb."""
    return _list_verbless((*load_source(), *load_tools()))


def _list_verbless(files: Sequence[SourceFile]) -> list[Place]:
    return [
        (file, function.lineno, function.name)
        for file, function in _yield_acting_functions(files)
        if function.name.strip("_").split("_")[0] not in VERBS
    ]


def find_repeated_classes() -> list[Place]:
    """Return the classes with the name of an earlier class, ignoring a leading underscore."""
    places = [
        (file.path, node.lineno, node.name.strip("_"))
        for file in load_source()
        for node in file.nodes
        if isinstance(node, ast.ClassDef)
    ]
    return _find_repeated(places, allowed=1, exempt=PLUGIN_FIELDS)


def _find_repeated(places: Sequence[Place], allowed: int, exempt: set[str]) -> list[Place]:
    by_name: dict[str, list[Place]] = defaultdict(list)
    for place in places:
        if place[2] not in exempt:
            by_name[place[2]].append(place)
    return [place for group in by_name.values() for place in group[allowed:]]


PLACES: dict[str, Callable[[], list[Place]]] = {
    "no verb": find_verbless_functions,
    "points": find_deictic_names,
    "asks": find_asking_docstrings,
    "class again": find_repeated_classes,
}
"""The places that `--names` lists, by the word that it writes before each."""


def main() -> None:
    """Print the table, and on request the names behind it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--names", action="store_true", help="list the places behind the shares")
    parser.add_argument(
        "--record", action="store_true", help="write the table into docs/architecture.md"
    )
    options = parser.parse_args()
    rows = [
        [measure.name, _format_value(measure), _describe_bound(measure)]
        for measure in measure_house()
    ]
    header = ["measure", "value", "bound"]
    print(format_table(header, rows))
    if options.record:
        _record([header, ["---"] * 3, *rows])
    if options.names:
        for word, find_places in PLACES.items():
            for file, line, text in find_places():
                print(f"{file}:{line} {word}: {text}")


def _format_value(measure: Measure) -> str:
    return f"{measure.value:,g}" if measure.value < 1000 else f"{measure.value:,.0f}"


def find_outdated() -> list[str]:
    """Return the lines of the recorded table that are missing or off by more than `TOLERANCE`."""
    recorded = {
        name: float(number.replace(",", ""))
        for name, number in re.findall(
            r"^\| (.*?) \| ([\d.,]+) \|", _RECORD.findall(PAGE.read_text("utf-8"))[0][1], re.M
        )
    }
    return [
        f"{measure.name}: {recorded.get(measure.name)} is recorded, {_format_value(measure)} is measured"
        for measure in measure_house()
        if abs(recorded.get(measure.name, float("inf")) - measure.value) > TOLERANCE * measure.value
    ]


def _describe_bound(measure: Measure) -> str:
    if measure.bound is None:
        return "none"
    return f"{'at least' if measure.at_least else 'at most'} {measure.bound:,g}"


_RECORD = re.compile(r"(<!-- recorded: house -->\n)(.*?)(<!-- end of recorded -->)", re.DOTALL)


def _record(rows: Sequence[Sequence[str]]) -> None:
    lines = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_RECORD.sub(lambda match: match[1] + lines + match[3], text), encoding="utf-8")


if __name__ == "__main__":
    main()
