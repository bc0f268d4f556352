"""The generators of reasoning-gym that evaluate a reply as code, and the grammars of their replies.

The installed package is read to find evaluators. Starting at `score_answer`, the search follows
each name and each attribute only by name, so it covers at least all code that can run. Anything
found that is not plain computation counts as evaluating: `eval` and similar functions, and any
import from a package that is not listed as harmless. So a new version cannot add an evaluator
unnoticed: a generator that evaluates and has no grammar is refused.
"""

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path

from practicum.grading.grammars import (
    Grammar,
    match_pattern,
    read_arithmetic,
    read_list,
    read_mathematics,
    try_both,
)

_INTEGER = r"[-+]?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO][0-7]+|[0-9]+)"
GRAMMARS: dict[str, Grammar] = {
    "binary_matrix": try_both(read_list, match_pattern(r"[0-9 \n]+")),
    "bitwise_arithmetic": match_pattern(_INTEGER),
    "countdown": read_arithmetic,
    "intermediate_integration": read_mathematics,
    "n_queens": try_both(read_list, match_pattern(r"[Q_ \n]+")),
    "number_sorting": read_list,
    "polynomial_multiplication": read_mathematics,
    "puzzle24": read_arithmetic,
    "simple_integration": read_mathematics,
    "spiral_matrix": try_both(read_list, match_pattern(r"[-0-9 \n]+")),
    "string_insertion": try_both(read_list, match_pattern(r"[A-E]+")),
}
"""The grammar of replies for each generator that evaluates; any other reply scores 0."""

_REVIEWED = {"sokoban": {"open"}}
"""Uses that a person has found harmless: sokoban opens puzzles by a path that no reply names."""

_EVALUATING_BUILTINS = frozenset(
    {
        *("eval", "exec", "compile", "open", "input", "breakpoint", "__import__", "globals"),
        *("locals", "vars", "getattr"),
    }
)
_HARMLESS_PACKAGES = frozenset(
    {
        *("abc", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions"),
        *("functools", "itertools", "json", "logging", "math", "numpy", "random", "re", "string"),
        "typing",
        # A person has read these two: they take moves and trees as data.
        *("magiccube", "zss"),
    }
)
_EVALUATING_ATTRIBUTES = frozenset(
    {
        *("load", "fromfile", "fromregex", "genfromtxt", "memmap", "ctypeslib", "f2py", "lib"),
        *("attrgetter", "methodcaller"),
    }
)


@dataclass
class _Module:
    """The definitions and imports of a module of the package, by name."""

    functions: dict[str, list[ast.AST]] = field(default_factory=dict)
    """Functions and methods by their own name; a class stands for all of its methods."""
    constants: dict[str, list[ast.AST]] = field(default_factory=dict)
    """The assignments at the top of the module."""
    inside: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Names from other modules of the package: their module, and their name in it."""
    outside: dict[str, str] = field(default_factory=dict)
    """Names from other packages, in full."""


def admit(generator: str, reply: str, answer: str) -> str | None:
    """Return the part of a reply that the package may see: a sentence of the grammar, or None.

    The generator's own answer passes unchanged, because it is text of the package, not of a model.
    """
    if generator not in GRAMMARS or reply == answer:
        return reply
    return GRAMMARS[generator](reply)


def find_unguarded(generator: str, scoring: type) -> set[str]:
    """Return the evaluators of a generator without a grammar; empty if scoring is safe."""
    if generator in GRAMMARS:
        return set()
    return find_evaluators(scoring) - _REVIEWED.get(generator, set())


def find_evaluators(scoring: type) -> set[str]:
    """Return the names that a dataset's `score_answer` can reach and that may evaluate a text."""
    evaluators: set[str] = set()
    visited: set[tuple[str, str]] = set()
    waiting = [(base.__module__, "score_answer") for base in scoring.__mro__ if base is not object]
    while waiting:
        definition = waiting.pop()
        path, name = definition
        if definition in visited or not _is_inside(path):
            continue
        visited.add(definition)
        module = _read(path)
        # Only by name: a name may be defined several times, and any of the definitions may run.
        for node in [*module.functions.get(name, []), *module.constants.get(name, [])]:
            for mentioned in _list_names(node):
                waiting += _find_definitions(path, mentioned)
                evaluators |= _find_evaluator(module, mentioned)
    return evaluators


def _find_definitions(module: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the places that may define a name: the module, and the modules it imports from."""
    inside = _read(module).inside
    first, last = name.partition(".")[0], name.rpartition(".")[2]
    if first in inside:
        imported, original = inside[first]
        yield imported, original
        # The import may be a module itself: `utils` of `utils.compute_decimal_reward`.
        yield f"{imported}.{original}", last
    for part in (first, last):
        yield module, part
        # It may also be a method of an imported class.
        for imported, _ in inside.values():
            yield imported, part


def _find_evaluator(module: _Module, name: str) -> set[str]:
    first, _, attribute = name.partition(".")
    if name == ".score_answer":
        # A dataset from a table scores the reply: only a run would tell which.
        return {name}
    if first in module.outside:
        full = ".".join(part for part in (module.outside[first], attribute) if part)
        parts = full.split(".")
        is_harmless = parts[0] in _HARMLESS_PACKAGES and not _EVALUATING_ATTRIBUTES & set(parts)
        return set() if is_harmless else {full}
    is_shadowed = first in module.functions or first in module.inside or first in module.constants
    return {first} if first in _EVALUATING_BUILTINS and not is_shadowed else set()


def _list_names(node: ast.AST) -> Iterator[str]:
    """Yield each dotted name in a piece of code; of `a.b().c` only the attribute, as `.c`."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            names = []
            inner: ast.expr = part
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
    """Return a module's definitions and imports at any level of it, without running it."""
    definitions = _Module()
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        # Callers also try names within a module as if they were modules.
        spec = None
    if spec is None or spec.origin is None:
        return definitions
    package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for name in chain.from_iterable(map(ast.walk, targets)):
                if isinstance(name, ast.Name) and statement.value is not None:
                    definitions.constants.setdefault(name.id, []).append(statement.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            definitions.functions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                definitions.outside[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                name = alias.asname or alias.name
                if _is_inside(source):
                    definitions.inside[name] = (source, alias.name)
                else:
                    definitions.outside[name] = f"{source}.{alias.name}"
    return definitions
