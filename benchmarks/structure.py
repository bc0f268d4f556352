"""Measure the structure of the package: lines, types, papers and import chains.

    python -m benchmarks structure
    python -m benchmarks structure --core practicum.methods practicum.server

Counts protocols and abstract classes, papers named in the core, statements and lines, the files on the longest chain of imports and
the files in cycles of imports. Imports inside functions are included, and the files of a cycle are all a part of a chain.
`--core` names the packages that the core excludes.
The files and functions of a training step are counted by `python -m benchmarks journey`.
"""

import argparse
import ast
import re
from collections.abc import Sequence
from pathlib import Path

import grimp
import networkx

import practicum
from benchmarks.measuring import format_table

ROOT = Path(practicum.__file__).parent
OUTSIDE_CORE = ("practicum.methods", "practicum.server")
"""The packages that the core leaves out."""
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
        default=OUTSIDE_CORE,
        help="packages that are not counted as core",
    )
    options = parser.parse_args()
    rows = [[name, f"{value:,}"] for name, value in measure_structure(options.core).items()]
    print(format_table(["measure", "value"], rows))


def measure_structure(outside: Sequence[str] = OUTSIDE_CORE) -> dict[str, int]:
    """Return the measures by name; `outside` are the packages that are not counted as core."""
    sources = read_sources()
    core = {
        name: text
        for name, text in sources.items()
        if not any(name == package or name.startswith(f"{package}.") for package in outside)
    }
    graph = build_import_graph("practicum")
    return {
        "lines": len("".join(sources.values()).splitlines()),
        "lines of the core": len("".join(core.values()).splitlines()),
        "statements of the core": sum(map(count_statements, core.values())),
        "protocols and abstract classes": sum(map(count_structural_types, sources.values())),
        "papers named in the core": len(set(PAPER.findall("".join(core.values())))),
        "files on the longest import chain": len(find_longest_chain(graph)),
        "files in import cycles": len(find_cycles(graph)),
    }


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


def build_import_graph(package: str) -> networkx.DiGraph:
    """Return the imports of a package's modules, also inside functions, without those for types."""
    imports = grimp.build_graph(package, exclude_type_checking_imports=True, cache_dir=None)
    graph = networkx.DiGraph()
    graph.add_nodes_from(imports.modules)
    graph.add_edges_from(
        (module, imported)
        for module in imports.modules
        for imported in imports.find_modules_directly_imported_by(module)
    )
    return graph


def find_cycles(graph: networkx.DiGraph) -> list[str]:
    """Return the modules that import themselves, through others or not."""
    groups = networkx.strongly_connected_components(graph)
    return sorted(module for group in groups if len(group) > 1 for module in group)


def find_longest_chain(graph: networkx.DiGraph) -> list[str]:
    """Return the modules on the longest chain of imports. All modules of a cycle count."""
    groups = networkx.condensation(graph)
    members = groups.nodes(data="members")
    best: dict[int, list[str]] = {}
    for group in reversed(list(networkx.topological_sort(groups))):
        longest = max((best[lower] for lower in groups.successors(group)), key=len, default=[])
        best[group] = [*sorted(members[group]), *longest]
    return max(best.values(), key=len)


if __name__ == "__main__":
    main()
