"""Shapes are checked wherever a signature or a dataclass names one, and nothing else is checked while tests run.

The import hook of jaxtyping wraps every function of the package, and a wrapped call binds its arguments anew. Nine functions
in ten have no tensor, and wrapping those takes half of the time of the tests.
"""

from collections.abc import Callable
from inspect import get_annotations
from typing import Any

import jaxtyping


def check_only_shapes() -> None:
    """From now on, what the hook comes by is left as it is unless it names a shape."""
    wrapped = jaxtyping.jaxtyped

    def jaxtyped(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
        wrap = wrapped(typechecker=typechecker)
        return lambda definition: wrap(definition) if names_a_shape(definition) else definition

    jaxtyping.jaxtyped = jaxtyped


def names_a_shape(definition: Any) -> bool:
    """Whether an annotation of this function or class has a shape in it."""
    return any("jaxtyping." in str(annotation) for annotation in get_annotations(definition).values())
