"""math-verify behind a deadline: `python -m practicum.tasks._math`."""

import importlib.util
from typing import Any

from practicum.tasks._worker import refuse, serve


def main() -> None:
    """Serve scores, or the reason why there are none."""
    if importlib.util.find_spec("math_verify") is None:
        refuse("verifier 'math' needs the package math-verify; run: pip install 'practicum[tasks]'")
        return
    from math_verify import parse, verify

    def score(request: dict[str, Any]) -> float:
        gold = parse(request["answer"], parsing_timeout=None) or parse(f"${request['answer']}$", parsing_timeout=None)
        return float(verify(gold, parse(request["reply"], parsing_timeout=None), timeout_seconds=None))

    serve(score)


if __name__ == "__main__":
    main()
