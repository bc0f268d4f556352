"""The public names are a decision: they are listed here, and each describes itself in its docstring."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import practicum
from practicum import functional

SOURCE = Path(__file__).resolve().parents[1] / "src" / "practicum"

# In addition to every divergence, which is public by being in the table.
FUNCTIONAL = [
    "ADVANTAGES",
    "AGGREGATES",
    "CORRECTIONS",
    "PAIR_LOSSES",
    "DIVERGENCES",
    "POLICY_LOSSES",
    "SAMPLE_WEIGHTS",
    "SUPPORTS",
    "TAILS",
    "TEACHER_FLOOR",
    "WEIGHTS",
    "Advantage",
    "Answers",
    "Correction",
    "Divergence",
    "Parameter",
    "PairLoss",
    "PolicyLoss",
    "REWARDS",
    "RewardRule",
    "SampleStatistics",
    "SampleWeight",
    "TokenStatistics",
    "Weight",
    "add_reward",
    "arithmetic",
    "candidates",
    "chunks",
    "cispo",
    "clip",
    "conflict_cosine",
    "contrast",
    "cross_entropy",
    "disagreement",
    "dro",
    "entropy",
    "gather_logprobs",
    "generalized_advantages",
    "geometric",
    "greedy",
    "group_centre",
    "group_normalize",
    "gspo",
    "importance_sampling",
    "k1",
    "k2",
    "k3",
    "leave_one_out",
    "log_linear",
    "measure_answers",
    "member_weights",
    "mixture",
    "modulate",
    "overlap",
    "pair_coefficients",
    "pair_loss",
    "ppo",
    "register",
    "restrict",
    "restrict_candidates",
    "reward_to_go",
    "score_function_returns",
    "step_returns",
    "turn_returns",
    "temper",
    "token_coefficients",
    "top1_conflict",
]


PRACTICUM = [
    "Diagnosis",
    "PracticumError",
    "Recipe",
    "RunResult",
    "compare",
    "distill",
    "doctor",
    "evaluate",
    "functional",
    "load_recipe",
    "load_run",
    "run",
]


def test_the_names_of_the_package_are_pinned():
    assert practicum.__all__ == PRACTICUM, (
        "a public name came or went: decide, then change this list"
    )
    assert all(hasattr(practicum, name) for name in practicum.__all__)


def test_the_names_of_functional_are_pinned():
    assert sorted(functional.__all__) == sorted([*FUNCTIONAL, *functional.DIVERGENCES]), (
        "a public name came or went: decide, then change this list"
    )


def test_every_name_of_functional_is_there():
    assert all(hasattr(functional, name) for name in functional.__all__)


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE))
)
def test_every_public_thing_says_what_it_does(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    silent = [name for name, node in _public("", tree) if ast.get_docstring(node) is None]
    assert ast.get_docstring(tree) is not None, f"{path.name} has no docstring"
    assert not silent, f"{path.name}: no docstring: {', '.join(silent)}"


def _public(
    prefix: str, node: ast.AST
) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef]]:
    """Yield public functions, classes and methods, except a protocol's method without a body (`...`)."""
    for child in ast.iter_child_nodes(node):
        if isinstance(
            child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef
        ) and not child.name.startswith("_"):
            if not _only_dots(child):
                yield f"{prefix}{child.name}", child
            if isinstance(child, ast.ClassDef):
                yield from _public(f"{prefix}{child.name}.", child)


def _only_dots(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and [ast.unparse(part) for part in node.body] == [
        "..."
    ]


def test_no_public_name_is_hidden_by_a_module_of_the_same_name() -> None:
    """Check that `practicum.run` stays the function for any earlier import of the package."""
    modules = {path.stem for path in (Path(practicum.__file__).parent).glob("*.py")}
    assert set(practicum.__all__) & modules == set()
