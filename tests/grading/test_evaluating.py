import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from practicum.grading import evaluating
from practicum.grading.evaluating import GRAMMARS, admit, find_evaluators, find_unguarded

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="the tasks extra is missing"
)

# Other ways to write a right answer.
VARIANTS = {
    "countdown": lambda answer: [f"({answer})", answer.replace(" ", ""), f"1*0 + {answer}"],
    "puzzle24": lambda answer: [f"({answer})", answer.replace(" ", ""), f"+({answer})"],
    "simple_integration": lambda answer: [
        answer.replace(" + C", ""),
        f"{answer} + 7",
        f"({answer})*1",
    ],
    "intermediate_integration": lambda answer: [answer.replace(" + C", ""), f"{answer} + 7"],
    "polynomial_multiplication": lambda answer: [
        f"({answer})",
        answer.replace(" ", ""),
        f"{answer} + 0",
    ],
    "n_queens": lambda answer: [str([row.split() for row in answer.split("\n")]), f"{answer} "],
    "binary_matrix": lambda answer: [
        str([[int(cell) for cell in row.split()] for row in answer.split("\n")])
    ],
    "spiral_matrix": lambda answer: [
        str([int(cell) for cell in answer.split()]),
        str(tuple(answer.split())),
    ],
    "string_insertion": lambda answer: [str(list(answer)), repr(answer), answer + "A"],
    "number_sorting": lambda answer: [
        answer.replace("'", '"'),
        answer.replace("'", ""),
        answer.replace(", ", ","),
    ],
    "bitwise_arithmetic": lambda answer: [str(int(answer, 0)), answer.upper(), bin(int(answer, 0))],
}


def datasets() -> dict[str, Any]:
    from reasoning_gym.factory import DATASETS

    return DATASETS


@pytest.mark.long
def test_every_generator_of_the_installed_package_that_evaluates_has_a_grammar() -> None:
    reached = {name: find_unguarded(name, scoring) for name, (scoring, _) in datasets().items()}
    # It passes the reply to any other generator, and is refused.
    assert any("score_answer" in name for name in reached.pop("composite"))
    assert not {name: evaluated for name, evaluated in reached.items() if evaluated}


@pytest.mark.parametrize("generator", sorted(GRAMMARS))
def test_every_grammar_is_for_a_generator_that_evaluates(generator: str) -> None:
    assert any(
        name == "eval" or name.endswith("parse_expr")
        for name in find_evaluators(datasets()[generator][0])
    ), f"{generator} has a grammar that nothing asks for"


@pytest.mark.long
@pytest.mark.parametrize("generator", sorted(GRAMMARS))
def test_right_answers_score_through_the_grammar_as_without_it(generator: str) -> None:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(generator, seed=7, size=8)
    for number in range(8):
        item = dataset[number]
        if "Integral" in item["answer"]:
            # The package itself takes minutes for these.
            continue
        for reply in [item["answer"], *VARIANTS[generator](item["answer"])]:
            sentence = admit(generator, reply, "")
            assert sentence is not None, reply
            assert dataset.score_answer(sentence, entry=item) == dataset.score_answer(
                reply, entry=item
            ), reply


def test_the_generators_own_answer_passes_whatever_it_says() -> None:
    assert admit("countdown", "foo(bar)", "foo(bar)") == "foo(bar)"
    assert admit("countdown", "foo(bar)", "1") is None
    assert admit("products", "foo(bar)", "1") == "foo(bar)"


SCORING = {
    "plain": ("import re", "return float(re.match(answer, 'x') is not None)", set()),
    "by name": ("", "return float(eval(answer))", {"eval"}),
    "elsewhere": ("from .others import helper", "return helper(answer)", {"exec"}),
    "of a module": ("from . import others", "return others.helper(answer)", {"exec"}),
    "as a method": ("from .others import Helper", "return Helper().run(answer)", {"pickle.loads"}),
    "as an object": ("from .others import helpful", "return helpful.run(answer)", {"pickle.loads"}),
    "of a base": ("from .others import Base", "return self.inherited(answer)", {"os.system"}),
    "within": ("", "import sympy as sp\n        return sp.sympify(answer)", {"sympy.sympify"}),
    "renamed": ("look = eval", "return look(answer)", {"eval"}),
    "of numpy": ("import numpy as np", "return np.load(answer)", {"numpy.load"}),
    "not ours": ("import unheard_of", "return unheard_of.score(answer)", {"unheard_of.score"}),
}
OTHERS = """
import os, pickle
def helper(text): return second(text)
def second(text): exec(text)
class Helper:
    def run(self, text): return pickle.loads(text)
helpful = Helper()
class Base:
    def inherited(self, text): return os.system(text)
"""


@pytest.mark.parametrize("kind", SCORING)
def test_an_evaluator_is_found_wherever_it_hides(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imports, scoring, expected = SCORING[kind]
    base = "Base" if "Base" in imports else "object"
    package = tmp_path / "reasoning_gym"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "others.py").write_text(OTHERS)
    (package / "scored.py").write_text(
        f"{imports}\nclass Scored({base}):\n    def score_answer(self, answer, entry):\n        {scoring}\n"
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "unheard_of", sys)
    evaluating._read.cache_clear()
    try:
        module = importlib.import_module("reasoning_gym.scored")
        reached = find_evaluators(module.Scored)
    finally:
        evaluating._read.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
            del sys.modules[name]
    assert expected <= reached and bool(expected) == bool(reached)
