import ast
import importlib.util
import re
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.errors import DataError, SandboxError
from practicum.grading import verifiers
from practicum.grading.verifiers import VERIFIERS, check_installed, find_last_number, prepare


@pytest.mark.parametrize(
    ("verifier", "reply", "answer", "score"),
    [
        ("exact", " abc\n", "abc", 1),
        ("exact", "Abc", "abc", 0),
        ("contains", "It is Paris.", "paris", 1),
        ("contains", "It is 56.", "5", 0),
        ("contains", "so C++ it is", "C++", 1),
        ("contains", "a (b) c", "(b)", 1),
        ("contains", "parisian", "Paris", 0),
        ("number", "8 * 7 = 56.", "56", 1),
        ("number", "56", "56.0", 1),
        ("number", "first 3, then 4", "3", 0),
        ("number", "that makes 1,000", "1000", 1),
        ("number", "$1,234,567.50.", "1234567.5", 1),
        ("number", "the pair 3,4", "4", 1),
        ("number", "x = -3", "-3", 1),
        ("number", "x = \u22123", "-3", 1),
        ("number", "5-3", "3", 1),
        ("number", "(2)-3", "3", 1),
        ("number", "it is .5", "0.5", 1),
        ("number", "about 6.02e23", "6.02e+23", 1),
        ("number", "**56**", "56", 1),
        ("number", "x2", "2", 0),
        ("number", "none", "2", 0),
        ("number", "", "2", 0),
        ("number", "9" * 5000, "9" * 4999, 0),
        ("number", "1e999", "1e998", 0),
        ("number", "1e99999999999999999999", "1", 1),
        ("number", "\u0665", "5", 0),
        ("first_line", "\n8 * 7 = 56\nConfidence: 0.25", "56", 1),
        ("first_line", "54\n56", "56", 0),
        ("first_line", "first 3, then 4", "4", 1),
        ("first_line", "", "4", 0),
    ],
)
def test_replies_are_judged(verifier: str, reply: str, answer: str, score: int) -> None:
    assert VERIFIERS[verifier](reply, answer) == score


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3), st.text(alphabet="abc .,=\n"))
def test_a_number_at_the_end_is_found_with_and_without_thousands(
    value: Decimal, before: str
) -> None:
    for written in (f"{value:f}", f"{value:,f}"):
        assert find_last_number(f"{before.rstrip('.abc')} {written}.") == value


@given(st.text(), st.text(min_size=1))
def test_no_text_breaks_the_quick_verifiers(reply: str, answer: str) -> None:
    for name in ("exact", "contains", "number"):
        assert VERIFIERS[name](reply, answer) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("reply", "answer", "score"),
    [
        ("The answer is $\\frac{1}{2}$.", "0.5", 1),
        ("so \\boxed{x^2 + 2x + 1}", "$(x+1)^2$", 1),
        ("8 * 7 = 56", "56", 1),
        ("1/2", "\\frac{1}{2}", 1),
        ("I do not know", "56", 0),
        ("57", "56", 0),
    ],
)
def test_mathematics_is_compared_by_value(reply: str, answer: str, score: int) -> None:
    assert VERIFIERS["math"](reply, answer) == score


EVALUATORS = {
    # Numbers, signs and brackets of a reply, which `practicum.grading.math_verify` checks by a separate grammar.
    "math_verify/parser.py": {"parse_expr"},
    # Values of variables, which do not occur here.
    "latex2sympy2_extended/latex2sympy2.py": {"parse_expr"},
    # Arguments that are expressions already.
    "latex2sympy2_extended/logic.py": {"sympify"},
    "latex2sympy2_extended/sets.py": {"sympify"},
}


@pytest.mark.long
def test_the_packages_of_mathematics_evaluate_where_they_are_known_to() -> None:
    evaluating = {
        "eval",
        "exec",
        "compile",
        "__import__",
        "parse_expr",
        "sympify",
        "pickle",
        "subprocess",
        "literal_eval",
    }
    mentioned: dict[str, set[str]] = {}
    for package in ("math_verify", "latex2sympy2_extended"):
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        folder = Path(spec.origin).parent
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Name) and node.id in evaluating:
                    mentioned.setdefault(str(path.relative_to(folder.parent)), set()).add(node.id)
    assert mentioned == EVALUATORS


def test_a_reply_that_is_a_program_is_no_mathematics(tmp_path: Path) -> None:
    file = tmp_path / "F"
    program = f"__import__('os').system('touch {file}')"
    for reply in (
        program,
        f"$ {program} $",
        f"\\boxed{{{program}}}",
        f"the answer is ({program})",
        f"1 + {program}",
    ):
        assert VERIFIERS["math"](reply, "0") in (0.0, 1.0)
    assert not file.exists()
    assert VERIFIERS["math"]("the answer is 7*(2 - 1)", "7") == 1.0
    assert VERIFIERS["math"]("the answer is 2^3 + 1", "9") == 1.0


@pytest.mark.long
def test_mathematics_that_would_run_for_ever_scores_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = verifiers.VerifierProcess("practicum.grading.math_verify", seconds=1.0)
    monkeypatch.setattr(verifiers, "_MATH", quick)
    assert VERIFIERS["math"]("$9^{9^{9^{9}}}$", "5") == 0.0
    assert VERIFIERS["math"]("56", "56") == 1.0
    quick.close()


def test_an_answer_that_is_no_mathematics_is_counted_as_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = verifiers.VerifierProcess("practicum.grading.math_verify")
    monkeypatch.setattr(verifiers, "_MATH", own)
    assert VERIFIERS["math"]("5", "") == 0.0
    assert own.errors == 1
    own.close()


def test_a_verifier_without_a_needed_wall_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    monkeypatch.setattr("practicum.sandbox.deadline.missing", lambda: ["files (no Landlock)"])
    with pytest.raises(SandboxError, match="cannot wall off files"):
        prepare("math", "require")
    assert prepare("number", "require")("7", "7.0") == 1.0
    assert prepare("math", "best_effort")("$\\frac{1}{2}$", "0.5") == 1.0
    assert notes == [
        "the verifier practicum.grading.math_verify runs without a wall around files (no Landlock)"
    ]


def test_a_missing_package_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed("math")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_installed("number")
    with pytest.raises(
        DataError,
        match=re.escape(
            "needs the package math-verify; in the checkout of practicum, run: pip install -e '.[tasks]'"
        ),
    ):
        check_installed("math")
