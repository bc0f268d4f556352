"""Which generators of reasoning-gym evaluate a reply as code, and the grammar that each of their replies has to be of.

Evaluators are found by reading the installed package. Scoring is followed from `score_answer` through every name and every
attribute that it mentions, by name alone, so more is followed than can run and never less. Whatever is not plain
computation on the way counts as evaluating: `eval` and its like, and anything imported from a package that is not listed
here as harmless. So a new version cannot bring in an evaluator unnoticed: a generator that evaluates and has no grammar is
refused.
"""

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from practicum.tasks._grammars import Grammar, arithmetic, either, lists, mathematics, written_as

GRAMMARS: dict[str, Grammar] = {
    "binary_matrix": either(lists, written_as(r"[0-9 \n]+")),
    "bitwise_arithmetic": written_as(r"[-+]?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO][0-7]+|[0-9]+)"),
    "countdown": arithmetic,
    "intermediate_integration": mathematics,
    "n_queens": either(lists, written_as(r"[Q_ \n]+")),
    "number_sorting": lists,
    "polynomial_multiplication": mathematics,
    "puzzle24": arithmetic,
    "simple_integration": mathematics,
    "spiral_matrix": either(lists, written_as(r"[-0-9 \n]+")),
    "string_insertion": either(lists, written_as(r"[A-E]+")),
}
"""What a reply has to be, for every generator that evaluates; any other reply scores 0."""

_READ = {"sokoban": {"open"}}
"""What a person has read and found to be no evaluator: sokoban opens puzzles by a path that no reply names."""

_EVALUATING_BUILTINS = frozenset(
    {
        "eval",
        "exec",
        "compile",
        "open",
        "input",
        "breakpoint",
        "__import__",
        "globals",
        "locals",
        "vars",
        "getattr",
    }
)
_HARMLESS_PACKAGES = frozenset(
    {
        *(
            "abc",
            "collections",
            "copy",
            "dataclasses",
            "datetime",
            "decimal",
            "enum",
            "fractions",
            "functools",
        ),
        *("itertools", "json", "logging", "math", "numpy", "random", "re", "string", "typing"),
        # These two have been read: they take moves and trees as data.
        *("magiccube", "zss"),
    }
)
_EVALUATING_ATTRIBUTES = frozenset(
    {
        "load",
        "fromfile",
        "fromregex",
        "genfromtxt",
        "memmap",
        "ctypeslib",
        "f2py",
        "lib",
        "attrgetter",
        "methodcaller",
    }
)


@dataclass
class _Module:
    """What a module of the package defines and imports, by name."""

    functions: dict[str, list[ast.AST]] = field(default_factory=dict)
    """Functions, and methods of its classes, by their own name; a class stands for all of its methods."""
    constants: dict[str, list[ast.AST]] = field(default_factory=dict)
    """What is assigned at the top."""
    inside: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Names from other modules of the package: their module, and their name there."""
    outside: dict[str, str] = field(default_factory=dict)
    """Names from other packages, in full."""


def admit(generator: str, reply: str, answer: str) -> str | None:
    """Return what the package may see of a reply: a sentence of the generator's grammar, or None.

    The generator's own answer is text of the package and not of a model, so it passes whatever it says.
    """
    if generator not in GRAMMARS or reply == answer:
        return reply
    return GRAMMARS[generator](reply)


def unguarded(generator: str, scoring: type) -> set[str]:
    """Return the evaluators of a generator that has no grammar; empty where its replies are safe to score."""
    return set() if generator in GRAMMARS else evaluators(scoring) - _READ.get(generator, set())


def evaluators(scoring: type) -> set[str]:
    """Return what a dataset's `score_answer` can reach that may evaluate a text, such as `eval`; empty where nothing."""
    reached: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [(base.__module__, "score_answer") for base in scoring.__mro__ if base is not object]
    while waiting:
        place = waiting.pop()
        if place in seen or not _is_inside(place[0]):
            continue
        seen.add(place)
        module = _read(place[0])
        for node in [*module.functions.get(place[1], []), *module.constants.get(place[1], [])]:
            for name in _mentioned(node):
                waiting += _leads(place[0], name)
                reached |= _reaches(module, name)
    return reached


def _leads(module: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield where a name that a module mentions may be defined: there, or in a module that it imports from."""
    inside = _read(module).inside
    first, last = name.partition(".")[0], name.rpartition(".")[2]
    if first in inside:
        imported, original = inside[first]
        yield imported, original
        # What was imported may be a module itself: `utils` of `utils.compute_decimal_reward`.
        yield f"{imported}.{original}", last
    for part in (first, last):
        yield module, part
        # A method of an object whose class was imported.
        for imported, _ in inside.values():
            yield imported, part


def _reaches(module: _Module, name: str) -> set[str]:
    first, _, rest = name.partition(".")
    if name == ".score_answer":
        # A dataset looked up in a table scores the reply: which one, only a run would tell.
        return {name}
    if first in module.outside:
        full = ".".join(part for part in (module.outside[first], rest) if part)
        harmless = full.partition(".")[
            0
        ] in _HARMLESS_PACKAGES and not _EVALUATING_ATTRIBUTES & set(full.split("."))
        return set() if harmless else {full}
    shadowed = first in module.functions or first in module.inside or first in module.constants
    if first in _EVALUATING_BUILTINS and not shadowed:
        return {first}
    return set()


def _mentioned(node: ast.AST) -> Iterator[str]:
    """Yield every dotted name in a piece of code, and for `a.b().c` the attribute `.c` alone."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            names = [part.attr]
            inner = part.value
            while isinstance(inner, ast.Attribute):
                names.append(inner.attr)
                inner = inner.value
            names.append(inner.id if isinstance(inner, ast.Name) else "")
            yield ".".join(reversed(names))
        elif isinstance(part, ast.ImportFrom | ast.Import):
            for alias in part.names:
                yield alias.asname or alias.name.partition(".")[0]


def _is_inside(module: str) -> bool:
    return module.partition(".")[0] == "reasoning_gym"


@cache
def _read(module: str) -> _Module:
    """Read a module's definitions and imports, wherever in it they stand; nothing of it runs."""
    read = _Module()
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        # A name within a module, which was asked for as if it were a module.
        spec = None
    if spec is None or spec.origin is None:
        return read
    package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name) and statement.value is not None:
                        read.constants.setdefault(name.id, []).append(statement.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            read.functions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                read.outside[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                if _is_inside(source):
                    read.inside[alias.asname or alias.name] = (source, alias.name)
                else:
                    read.outside[alias.asname or alias.name] = f"{source}.{alias.name}"
    return read
