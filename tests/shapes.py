"""Shapes are checked wherever a signature or a dataclass names one, and nothing else is checked while tests run.

The import hook of jaxtyping wraps every function of the package, and a wrapped call binds its arguments anew. Nine functions
in ten have no tensor, and wrapping those takes half of the time of the tests. What is left takes half of what is left again:
`make check` sets JAXTYPING_DISABLE=1 and does without.
"""

import gc
from collections.abc import Callable
from inspect import get_annotations
from threading import Lock
from typing import Any

import jaxtyping
from jaxtyping._import_hook import _JaxtypingLoader


def check_only_shapes() -> None:
    """Check shapes in all modules of the package that are imported from now on, unless JAXTYPING_DISABLE is set."""
    if jaxtyping.config.jaxtyping_disable:
        return
    wrapped = jaxtyping.jaxtyped

    def jaxtyped(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
        wrap = wrapped(typechecker=typechecker)
        return lambda definition: wrap(definition) if names_a_shape(definition) else definition

    jaxtyping.jaxtyped = jaxtyped
    take_turns_to_parse()
    jaxtyping.install_import_hook("practicum", "beartype.beartype")


def take_turns_to_parse() -> None:
    """Let one module at a time be parsed, and nothing in between: Python 3.11 counts the depth of all its parsers in one place.

    A service and its client import in two threads of a test. A collected object that warns prints a traceback, whose lines
    are parsed too (`SystemError`, github.com/python/cpython/issues/106905).
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
    """Whether an annotation of this function or class has a shape in it."""
    return any(
        "jaxtyping." in str(annotation) for annotation in get_annotations(definition).values()
    )
