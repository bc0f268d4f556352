"""Measure the structure of the package: lines, types, papers and import chains.

    python -m benchmarks structure
    python -m benchmarks structure --core practicum.methods practicum.server

Counts protocols and abstract classes, papers named in the core, statements and lines, the files on the longest chain of imports
(imports inside functions included; the files of an import cycle all count). `--core` names the packages that the core leaves out.
The files and functions of a training step are counted by `python -m benchmarks journey`.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import practicum
from benchmarks.measuring import format_table

ROOT = Path(practicum.__file__).parent
PAPER = re.compile(r"\b\d{4}\.\d{5}\b")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--core",
        nargs="+",
        metavar="PACKAGE",
        default=["practicum.methods", "practicum.server"],
        help="packages that are not counted as core",
    )
    options = parser.parse_args()
    sources = read_sources()
    core = {
        name: text
        for name, text in sources.items()
        if not any(name == out or name.startswith(f"{out}.") for out in options.core)
    }
    chain = find_longest_chain(list_imports(sources))
    rows = [
        ["lines", len("".join(sources.values()).splitlines())],
        ["lines of the core", len("".join(core.values()).splitlines())],
        ["statements of the core", sum(map(count_statements, core.values()))],
        ["protocols and abstract classes", sum(map(count_structural_types, sources.values()))],
        ["papers named in the core", len(set(PAPER.findall("".join(core.values()))))],
        ["files on the longest import chain", len(chain)],
    ]
    print(format_table(["measure", "value"], [[name, f"{value:,}"] for name, value in rows]))


def read_sources() -> dict[str, str]:
    """Return the text of every module of the package, by its name."""
    sources = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        sources[".".join(part for part in parts if part != "__init__")] = path.read_text("utf-8")
    return sources


def count_statements(text: str) -> int:
    """Return the statements of a module, without docstrings."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    is_text = [
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in nodes
    ]
    return len(nodes) - sum(is_text)


def count_structural_types(text: str) -> int:
    """Return the classes of a module that are protocols or abstract."""
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    bases = [{ast.unparse(base).partition("[")[0] for base in node.bases} for node in classes]
    return sum(bool(names & {"Protocol", "ABC"}) for names in bases)


def list_imports(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the modules that each module imports, also inside functions and not for types alone."""
    imports = {}
    for name, text in sources.items():
        imported = set(_find_imported(ast.parse(text), sources))
        imports[name] = imported - {name}
    return imports


def _find_imported(tree: ast.AST, sources: Mapping[str, str]) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from (name for name in (inner, node.module) if name in sources)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in sources)
        else:
            yield from _find_imported(node, sources)


def find_longest_chain(imports: Mapping[str, set[str]]) -> list[str]:
    """Return the modules on the longest chain of imports; those of a cycle stand together."""
    groups = _find_cycles(imports)
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    best: dict[int, list[str]] = {}
    # The groups come with the imported ones first.
    for number, group in enumerate(groups):
        below = {group_of[name] for member in group for name in imports[member]} - {number}
        longest = max((best[lower] for lower in below), key=len, default=[])
        best[number] = [*group, *longest]
    return max(best.values(), key=len)


def _find_cycles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected groups of modules, imported ones first (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for imported in sorted(imports[name]):
            if imported not in index:
                visit(imported)
                low[name] = min(low[name], low[imported])
            elif imported in stack:
                low[name] = min(low[name], index[imported])
        if low[name] == index[name]:
            place = stack.index(name)
            groups.append(stack[place:])
            del stack[place:]

    sys.setrecursionlimit(10_000)
    for name in sorted(imports):
        if name not in index:
            visit(name)
    return groups


if __name__ == "__main__":
    main()
