"""Say in one line what a device cannot do."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from practicum.errors import ModelError

NO_OPERATION = re.compile(r"operator '(\S+)' is not .* implemented for the MPS device", re.DOTALL)
NO_FLOAT64 = "MPS framework doesn't support float64"


@contextmanager
def explain_missing_operations() -> Iterator[None]:
    """Raise ModelError in place of torch's error if MPS lacks an operation that the block needs."""
    try:
        yield
    except (NotImplementedError, TypeError) as error:
        match = NO_OPERATION.search(str(error))
        missing = match[1] if match else "float64" if NO_FLOAT64 in str(error) else None
        if missing is None:
            raise
        raise ModelError(
            f"device is 'mps', and this torch has no {missing} there; set device: cpu"
        ) from error
