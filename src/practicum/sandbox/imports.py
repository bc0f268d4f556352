"""Find what a sandboxed process imports: Python's own folders, and the user's packages by name."""

import ast
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_PARTS = ("lib", "lib32", "lib64", "libexec", "bin", "share", "pyvenv.cfg")
_SYSTEM = ("/lib", "/lib32", "/lib64", "/bin", "/nix/store", "/gnu/store")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime")
_INSTALLED = ("site-packages", "dist-packages")


def list_python_folders(environment: Mapping[str, str]) -> list[str]:
    """Return the folders of this Python, of its installed packages and of this package.

    Folders of PYTHONPATH are not among them, and none that contains the user's home or the working
    folder.
    """
    prefixes = (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)
    roots = (*prefixes, "/usr", "/usr/local")
    paths = [os.path.join(root, part) for root in roots for part in _PARTS]
    paths += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [entry for entry in sys.path if Path(entry).name in _INSTALLED]
    paths += environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    paths += [*_SYSTEM, *_SYSTEM_FILES, str(_PACKAGE)]
    folders = {Path(path).resolve() for path in paths if path and Path(path).is_absolute()}
    private = (Path.home().resolve(), Path.cwd().resolve())
    return sorted(
        str(folder)
        for folder in folders
        if folder.exists() and not any(folder in (place, *place.parents) for place in private)
    )


@cache
def find_places(names: tuple[str, ...], path: tuple[str, ...]) -> Mapping[str, str]:
    """Return the folder or file of each package and module that these modules need.

    What is installed with Python is left out. The source of each other one is read for its imports,
    so that helper modules next to it are found, and no other file there becomes readable.
    """
    folders = [Path(folder) for folder in list_python_folders({}) if folder != str(_PACKAGE)]
    places = {"practicum": str(_PACKAGE)}
    waiting = [name.partition(".")[0] for name in names]
    while waiting:
        top = waiting.pop()
        if top in places or top in sys.stdlib_module_names:
            continue
        place = _locate(top, path)
        if place is None or any(place.is_relative_to(folder) for folder in folders):
            continue
        places[top] = str(place)
        waiting += _list_imports(place)
    return places


def _locate(name: str, path: Sequence[str]) -> Path | None:
    """Return the folder of a package or the file of a module; None if it is not found."""
    spec: ModuleSpec | None = PathFinder.find_spec(name, list(path))
    if spec is None and name not in sys.modules:
        # Editable installations may have their own finders.
        spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ()) or [spec.origin]
    is_file = places[0] is not None and os.path.exists(places[0])
    return Path(str(places[0])).resolve() if is_file else None


def _list_imports(place: Path) -> Iterable[str]:
    """Return the top-level names that the Python files of a package or module import."""
    names: set[str] = set()
    for file in place.rglob("*.py") if place.is_dir() else (place,):
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            # The import itself shows the error, if the file is imported at all.
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return sorted(names)
