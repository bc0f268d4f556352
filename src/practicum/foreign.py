"""User-defined Python code: objects by the name `package.module:entry`, and their errors in one
line.

The same rule applies to every part of a recipe. The module is before the colon, and a name in this
module after it. Without a colon, the longest prefix that is a module is the module.
"""

import difflib
import functools
import hashlib
import importlib.util
import inspect
import operator
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

_PATH = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_NAME = re.compile(rf"{_PATH}(?::{_PATH})?")


def suggest_name(name: str, candidates: Iterable[str]) -> str:
    """Return a clause for an error text: the closest known name, if any is close, and all names."""
    names = sorted(candidates)
    matches = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {matches[0]!r}? " if matches else ""
    return f"{hint}known: {', '.join(names)}"


def is_external(name: str) -> bool:
    """Return True if the name has the form of an object in a module."""
    return ("." in name or ":" in name) and _NAME.fullmatch(name) is not None


def load_object(name: str) -> Any:
    """Import and return the object of a name, or a module if the name is a module's.

    Raise ValueError, in one line, if a module is missing or fails while it is imported, or if it
    has no such attribute.
    """
    dotted, _, inner = name.partition(":")
    module, attributes = _import_longest(dotted)
    if module is None or (inner and attributes):
        raise ValueError(_explain_missing_module(dotted))
    attributes += inner.split(".") if inner else []
    loaded: Any = module
    for attribute in attributes:
        try:
            loaded = operator.attrgetter(attribute)(loaded)
        except AttributeError:
            raise ValueError(_explain_missing_attribute(loaded, attribute)) from None
    return loaded


@functools.cache
def find_published(group: str) -> dict[str, str]:
    """Return the objects that installed packages publish in the entry points `practicum.<group>`.

    The result maps each published word to a dotted name; nothing is imported.
    """
    # Imported here: it takes as long as the rest of this module, and most commands need no names.
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=f"practicum.{group}")}


def explain_missing(name: str) -> str:
    """Explain why the module of an object's name cannot be imported; empty if it can be found.

    Nothing is imported: only the first part of the name is looked for.
    """
    dotted = name.partition(":")[0]
    top = dotted.partition(".")[0]
    is_known = top in sys.modules or importlib.util.find_spec(top) is not None
    return "" if is_known else _explain_missing_module(dotted)


def name_object(entry: Any) -> str:
    """Return the text of an object in a recipe: `module:name` of a function or of an object's class."""
    if isinstance(entry, str):
        return entry
    is_named = inspect.isroutine(entry) or inspect.isclass(entry)
    named = entry if is_named else type(entry)
    return f"{named.__module__}:{named.__qualname__}"


def digest_code(entry: Any) -> str | None:
    """Return a digest of the source of a function or of an object's class; None without source."""
    is_named = inspect.isroutine(entry) or inspect.isclass(entry)
    named = entry if is_named else type(entry)
    # In a notebook, Python only finds the source of a class's methods.
    methods = filter(inspect.isfunction, vars(named).values()) if inspect.isclass(named) else ()
    sources = []
    for part in (named, *methods):
        with suppress(OSError, TypeError):
            sources.append(inspect.getsource(part))
    return hashlib.sha256("\n".join(sources).encode()).hexdigest()[:12] if sources else None


def takes_arguments(entry: Any, *names: str) -> bool:
    """Return True if an object can be called with these arguments in this order."""
    if not callable(entry):
        return False
    try:
        signature = inspect.signature(entry)
        signature.bind(*names)
    except TypeError:
        return False
    except ValueError:
        # A function in C without a signature: the first call shows whether it works.
        return True
    places = list(signature.parameters)[: len(names)]
    # `(answer, prompt)` is the order of a verifier.
    return not any(
        name in names and names.index(name) != place for place, name in enumerate(places)
    )


def try_foreign(where: str, trial: Callable[[], object]) -> None:
    """Raise ValueError, in one line, if foreign code fails on a minimal example."""
    try:
        trial()
    except ValueError:
        # The code refused its arguments.
        raise
    except Exception as error:
        # It may raise anything; failing now is better than in the first step.
        raise ValueError(f"{where} fails on one token: {describe_error(error)}") from error


def is_foreign(part: object) -> bool:
    """Return True if the code of a function, or of an object's class, is of another package."""
    owner = part if inspect.isroutine(part) or inspect.isclass(part) else type(part)
    return owner.__module__.partition(".")[0] != "practicum"


def describe_error(error: BaseException, file: str | None = None) -> str:
    """Return an error of foreign code in one line: its type, its text, and where it was raised.

    The location is the innermost frame in `file`, if the error passed through it.
    """
    text = " ".join(str(error).split())
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename != __file__
    ]
    frames = [frame for frame in frames if frame.filename == file] or frames
    # The text of a syntax error already contains its location.
    if not frames or isinstance(error, SyntaxError):
        return line
    return f"{line} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


def _import_longest(dotted: str) -> tuple[ModuleType | None, list[str]]:
    """Import a dotted name's longest prefix that is a module; return it and the remaining parts."""
    module, parts = None, dotted.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        try:
            module = importlib.import_module(name)
        except Exception as error:
            # A user's module may raise anything. Only if the module itself is missing is the rest
            # of the name an attribute.
            if isinstance(error, ModuleNotFoundError) and error.name == name:
                return module, parts[end - 1 :]
            raise ValueError(
                f"module {name!r} fails when it is imported: {describe_error(error)}"
            ) from error
    return module, []


def _explain_missing_module(dotted: str) -> str:
    """Explain where a module was searched for and how to make it importable."""
    named = [
        folder
        for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if folder and not folder.startswith((sys.prefix, sys.base_prefix))
    ]
    top, cwd = dotted.partition(".")[0], Path.cwd()
    lies_here = (cwd / top).is_dir() or (cwd / f"{top}.py").is_file()
    folder, hint = "FOLDER", "if it lies in FOLDER"
    if lies_here and {"", str(cwd)}.isdisjoint(sys.path):
        folder, hint = str(cwd), f"{cwd} has {top!r} and is not searched"
    return (
        f"no module {dotted!r} in {', '.join(['the installed packages', *named])}; {hint}: write "
        f"PYTHONPATH={folder} before the command, or pip install -e {folder}"
    )


def _explain_missing_attribute(owner: Any, attribute: str) -> str:
    """List the names of a module or class, closest match first."""
    if not isinstance(owner, ModuleType):
        return f"{owner!r:.80} has no {attribute!r}"
    names = [*list_own_names(owner), *_list_submodules(owner)]
    hint = f"; {suggest_name(attribute, names)}" if names else ""
    return f"module {owner.__name__!r} has no {attribute!r}{hint}"


def _list_submodules(module: ModuleType) -> list[str]:
    """Return the public modules in a package; none for a module."""
    spec = module.__spec__
    folders = spec.submodule_search_locations if spec else None
    inner_modules = pkgutil.iter_modules(folders) if folders else ()
    return [inner.name for inner in inner_modules if not inner.name.startswith("_")]


def list_own_names(module: ModuleType) -> list[str]:
    """Return the public names that a module defines itself."""
    return [
        name
        for name, member in vars(module).items()
        if not name.startswith("_")
        and not isinstance(member, ModuleType)
        and not (isinstance(member, type | FunctionType) and member.__module__ != module.__name__)
    ]
