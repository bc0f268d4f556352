"""Check shapes wherever a signature or a dataclass names one, and check nothing else while tests run.

The import hook of jaxtyping wraps every function of the package, and each wrapped call binds its arguments again. Nine functions
in ten have no tensor, and wrapping them takes half of the time of the tests. A call of the remaining functions is checked if no
earlier call had arguments and a result of the same types and shapes: checking all of them takes a third of the remaining time.
`make check` sets JAXTYPING_DISABLE=1 and runs without checks.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache, update_wrapper, wraps
from inspect import get_annotations, isclass, isgeneratorfunction, signature
from threading import Lock, get_ident
from types import UnionType
from typing import Any, Union, get_args, get_origin

import jaxtyping
from jaxtyping._import_hook import _JaxtypingLoader
from torch import Tensor


@cache
def check_only_shapes() -> None:
    """Check shapes in all modules of the package that are imported from now on, unless JAXTYPING_DISABLE is set; once."""
    if jaxtyping.config.jaxtyping_disable:
        return
    wrapped = jaxtyping.jaxtyped

    def jaxtyped(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
        wrap = wrapped(typechecker=typechecker)

        def check(definition: Any) -> Any:
            if not names_a_shape(definition):
                return definition
            if not isclass(definition):
                return check_each_once(definition, wrap)
            if is_dataclass(definition):
                definition.__init__ = check_each_once(definition.__init__, wrap)
            return definition

        return check

    jaxtyping.jaxtyped = jaxtyped
    take_turns_to_parse()
    jaxtyping.install_import_hook("practicum", "beartype.beartype")


def take_turns_to_parse() -> None:
    """Let one module at a time be parsed, without garbage collection: Python 3.11 shares one depth counter between all its parsers.

    A service and its client import in two threads of a test. A collected object that warns prints a traceback, and the lines
    of the traceback are parsed too (`SystemError`, github.com/python/cpython/issues/106905).
    """
    lock, parse = Lock(), _JaxtypingLoader.source_to_code

    def parse_alone(self: _JaxtypingLoader, *args: Any, **options: Any) -> Any:
        with lock:
            gc.disable()
            try:
                return parse(self, *args, **options)
            finally:
                gc.enable()

    _JaxtypingLoader.source_to_code = parse_alone  # type: ignore[method-assign]


def names_a_shape(definition: Any) -> bool:
    """Return whether an annotation of this function or class contains a shape."""
    return any(
        "jaxtyping." in str(annotation) for annotation in get_annotations(definition).values()
    )


def looks_inside(annotation: Any) -> bool:
    """Return whether a check of this annotation reads more than `describe` returns: listed values, or a random element."""
    if "typing.Literal" in str(annotation):
        return True
    if get_origin(annotation) in (Union, UnionType, tuple) and ... not in get_args(annotation):
        return any(map(looks_inside, get_args(annotation)))
    return get_origin(annotation) is not None and "jaxtyping." in str(annotation)


class _Waiting:
    """Replaces a function while shapes are checked around it; runs the waiting work of the current thread."""

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        self.__globals__ = function.__globals__
        self.work: dict[int, list[Callable[..., Any]]] = {}

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.work[get_ident()].pop()(*args, **options)

    def check(self, checked: Callable[..., Any], work: Callable[..., Any], args: Any, named: Any):
        """Do the work between the checks of arguments and result; a check may read a property, which calls this again."""
        stack = self.work.setdefault(get_ident(), [])
        depth = len(stack)
        stack.append(work)
        try:
            return checked(*args, **named)
        finally:
            del stack[depth:]


CHECKS: dict[Any, tuple[_Waiting, Callable[..., Any], dict[Any, set[Any]]]] = {}
"""The check of each function, and the calls that passed; an inner function is defined again with each call."""


def check_each_once(function: Callable[..., Any], wrap: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return the function with checked shapes; a passed combination of types and shapes is not checked again."""
    if isgeneratorfunction(function):
        return wrap(function)
    inside = {name for name, hint in get_annotations(function).items() if looks_inside(hint)}
    describe_result = describe_inside if "return" in inside else describe
    parameters = [name in inside for name in signature(function).parameters] if inside else []
    place = (function.__module__, function.__qualname__, function.__code__)
    if place not in CHECKS:
        waiting = _Waiting(function)
        CHECKS[place] = (waiting, wrap(waiting), {})
    waiting, checked, right = CHECKS[place]

    @wraps(function)
    def check(*args: Any, **options: Any) -> Any:
        deep = [
            describe_inside(value) for value, looks in zip(args, parameters, strict=False) if looks
        ]
        named = tuple(
            (name, describe_inside(value) if name in inside else describe(value))
            for name, value in options.items()
        )
        results = right.setdefault((describe(args), *deep, named), set())
        if not results:
            answer = waiting.check(checked, function, args, options)
            results.add(describe_result(answer))
            return answer
        answer = function(*args, **options)
        if (described := describe_result(answer)) not in results:
            waiting.check(checked, lambda *_, **__: answer, args, options)
            results.add(described)
        return answer

    return check


def describe_inside(value: Any) -> Any:
    """Describe each element of a list or tuple, and a word or number by itself: a check may look at any of them."""
    if isinstance(value, str | int):
        return type(value), value
    if type(value) in (list, tuple):
        return type(value), frozenset(map(describe_inside, value))
    if isinstance(value, Sequence | Mapping):
        return object()  # equal to nothing else: reading all of it may be slow
    return describe(value)


def describe(value: Any) -> Any:
    """Describe everything that a check of shapes sees of a value with unlisted elements."""
    if isinstance(value, Tensor):
        return type(value), value.dtype, value.shape
    if type(value) is tuple:
        return tuple(map(describe, value))
    return type(value)
