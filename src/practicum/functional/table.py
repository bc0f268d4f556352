"""Tables of functions with their facts: each entry is defined next to its function."""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

Entry = TypeVar("Entry")
Facts = ParamSpec("Facts")
Function = TypeVar("Function", bound=Callable[..., Any])
Number = int | float | str


class Table(dict[str, Entry], Generic[Entry, Facts]):
    """Entries of one kind by name, in the order of their definition.

    A name with dots is a module of another package, whose `entry` is loaded at the first access.
    """

    def __init__(self, kind: Callable[Concatenate[str, Callable[..., Any], Facts], Entry]) -> None:
        super().__init__()
        self._kind = kind

    def enter(self, *facts: Facts.args, **named: Facts.kwargs) -> Callable[[Function], Function]:
        """Return a decorator that enters a function with its facts, under its name without outer
        underscores.
        """

        def entered(function: Function) -> Function:
            name = function.__name__.strip("_")
            self[name] = self._kind(name, function, *facts, **named)
            return function

        return entered

    def __missing__(self, name: str) -> Entry:
        """Return the entry of another package's module.

        Raise KeyError for a name without dots, ValueError if there is no such entry.
        """
        kind = self._kind
        assert isinstance(kind, type)
        if "." not in name or not all(part.isidentifier() for part in name.split(".")):
            raise KeyError(name)
        try:
            entry: Any = vars(importlib.import_module(name)).get("entry")
        except ImportError as error:
            raise ValueError(
                f"no module {name!r} to load a {kind.__name__} from ({error})"
            ) from error
        if not isinstance(entry, kind):
            raise ValueError(
                f"module {name!r} has no {kind.__name__};"
                f" write entry = practicum.functional.{kind.__name__}(...) in it"
            )
        return entry


@functools.cache
def defaults_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the parameters of a function that have a default, in order, each with its default."""
    parameters = inspect.signature(function).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.default is not inspect.Parameter.empty
    }
