"""math-verify behind a deadline: `python -m practicum.tasks._math`."""

import importlib.util
import logging
from typing import Any

from practicum.tasks._worker import refuse, serve


def main() -> None:
    """Serve scores, or the reason why there are none."""
    if importlib.util.find_spec("math_verify") is None:
        refuse("verifier 'math' needs the package math-verify; run: pip install 'practicum[tasks]'")
        return
    # The package warns that its own timeouts are off; the deadline around this process takes their place.
    logging.disable(logging.WARNING)
    from math_verify import parse, verify

    def score(request: dict[str, Any]) -> float:
        gold = parse(request["answer"], parsing_timeout=0) or parse(f"${request['answer']}$", parsing_timeout=0)
        return float(verify(gold, parse(request["reply"], parsing_timeout=0), timeout_seconds=0))

    serve(score)


if __name__ == "__main__":
    main()
