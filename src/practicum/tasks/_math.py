"""math-verify in a process of its own: `python -m practicum.tasks._math`."""

import logging
from typing import Any

from practicum.tasks._grammars import read_arithmetic
from practicum.tasks._worker import serve


def run() -> None:
    """Serve scores."""
    # The package warns that its own timeouts are off; the deadline of this process replaces them.
    logging.disable(logging.WARNING)
    from math_verify import parse, parser, verify

    evaluate = parser.parse_expr

    def evaluate_arithmetic(text: str, **settings: Any) -> Any:
        sentence = read_arithmetic(text)
        if sentence is None:
            raise ValueError("not arithmetic")
        return evaluate(sentence, **settings)

    # If a reply has no LaTeX, the package evaluates the numbers, signs and brackets in it as
    # Python. Its own pattern selects these characters; the grammar also guards against a later
    # version whose pattern lets more through.
    parser.parse_expr = evaluate_arithmetic

    def score(request: dict[str, Any]) -> float:
        answer = request["answer"]
        gold = parse(answer, parsing_timeout=0) or parse(f"${answer}$", parsing_timeout=0)
        if not gold:
            raise ValueError(f"the answer {answer!r} is not mathematics")
        return float(verify(gold, parse(request["reply"], parsing_timeout=0), timeout_seconds=0))

    serve(score)


if __name__ == "__main__":
    run()
