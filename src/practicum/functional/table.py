"""Tables of functions with their facts: each entry is defined next to its function."""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from practicum.foreign import find_published, is_external, load_object


class NamedEntry(Protocol):
    """An entry knows its name."""

    @property
    def name(self) -> str:
        """The name that recipes use."""
        ...


Entry = TypeVar("Entry", bound=NamedEntry)
Facts = ParamSpec("Facts")
Function = TypeVar("Function", bound=Callable[..., Any])
Number = int | float | str


class Table(dict[str, Entry], Generic[Entry, Facts]):
    """Entries of one kind by name, in the order of their definition.

    A name such as `package.module:entry` is an entry of another package. The name of a module is
    the `entry` of this module, and a single word may be published by a package in the entry points
    `practicum.<group>`. Such an entry is loaded at each access and never stored.
    """

    def __init__(
        self, kind: Callable[Concatenate[str, Callable[..., Any], Facts], Entry], group: str = ""
    ) -> None:
        super().__init__()
        self._kind = kind
        self._group = group
        self._registered: set[str] = set()

    def enter(self, *facts: Facts.args, **named: Facts.kwargs) -> Callable[[Function], Function]:
        """Decorate a function to enter it with facts, under its name without outer underscores."""

        def entered(function: Function) -> Function:
            return self.enter_as(function.__name__.strip("_"), *facts, **named)(function)

        return entered

    def enter_as(
        self, name: str, *facts: Facts.args, **named: Facts.kwargs
    ) -> Callable[[Function], Function]:
        """Return a decorator that enters a function with its facts under a name."""

        def entered(function: Function) -> Function:
            self[name] = self._kind(name, function, *facts, **named)
            return function

        return entered

    def register(self, entry: Entry) -> None:
        """Add a user-defined entry, or replace an entry of the same name that was added before.

        Raise ValueError if the name is not a single word or belongs to a built-in entry.
        """
        kind, name = type(entry).__name__, entry.name
        if not name.isidentifier():
            raise ValueError(f"a {kind} is registered under a word; {name!r} is none")
        if name in self and name not in self._registered:
            raise ValueError(f"{kind} {name!r} is one of practicum's; give yours another name")
        self._registered.add(name)
        self[name] = entry

    def list_names(self) -> list[str]:
        """Return the names of all entries. Published entries of other packages come last."""
        return [*self, *sorted(self._published.keys() - self.keys())]

    @property
    def _published(self) -> dict[str, str]:
        return find_published(self._group) if self._group else {}

    def __missing__(self, name: str) -> Entry:
        """Return the entry of another package.

        Raise KeyError for an unknown word, ValueError if the module has no such entry.
        """
        kind = self._kind
        assert isinstance(kind, type)
        if not is_external(name):
            name = self._published[name]
        loaded = load_object(name)
        entry: Any = vars(loaded).get("entry") if isinstance(loaded, ModuleType) else loaded
        if isinstance(entry, kind):
            return entry
        example = f"practicum.functional.{kind.__name__}(...)"
        if isinstance(loaded, ModuleType):
            keys = [key for key, member in vars(loaded).items() if isinstance(member, kind)]
            hint = f"name one of {', '.join(f'{name}:{key}' for key in keys)}, or " if keys else ""
            raise ValueError(
                f"module {name!r} has no {kind.__name__} named 'entry'; {hint}write entry = "
                f"{example} in it"
            )
        raise ValueError(
            f"{name!r} is a {type(entry).__name__} and no {kind.__name__}; put it into "
            f"entry = {example}, and name that"
        )


@functools.cache
def defaults_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the parameters of a function that have a default, in order, each with its default."""
    parameters = inspect.signature(function).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.default is not inspect.Parameter.empty
    }
