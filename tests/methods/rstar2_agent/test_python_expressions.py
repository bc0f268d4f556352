"""The task `python_expressions`: programs run without each other's variables, and the expert writes them."""

from pathlib import Path
from typing import Any

import pytest

from practicum.methods.rstar2_agent import python_expressions
from practicum.methods.rstar2_agent.python_expressions import Config, PythonExpressions, build
from practicum.ports import TaskContext
from practicum.ports.tasks import ToolProblem
from practicum.types import Rollout


@pytest.fixture(scope="module")
def task() -> PythonExpressions:
    config = Config(train_size=4, heldout_size=1, tags=("<", ">"), sloppy=0.5)
    made = build(config, TaskContext(0, Path()))
    assert isinstance(made, PythonExpressions)
    return made


def test_the_expert_writes_a_program_and_copies_its_result(task: PythonExpressions) -> None:
    assert [schema.name for schema in task.toolbox.use.schemas] == ["python"]
    for prompt in task.train_prompts():
        (call,) = task.expert(prompt, ())
        code = prompt.messages[-1].content
        assert call == f'[python(code="{code}")]'
        assert task.toolbox.open(prompt, 0).call("python", {"code": code}) == prompt.answer
        answers = task.expert(prompt, (call,))
        assert len(answers) == 3 and sum(answers.values()) == 1
        assert all(task.reward(Rollout.from_text(prompt, call, text)) == 1 for text in answers)


@pytest.mark.parametrize(
    ("outcome", "said", "arguments"),
    [
        ("failed", "NameError", {"code": "a"}),
        ("failed", "SyntaxError", {"code": "3**"}),
        ("failed", "ended by itself", {"code": "import os; os._exit(0)"}),
        ("invalid", "the only argument, code", {"code": "1", "more": 2}),
        ("invalid", "the only argument, code", {}),
    ],
)
def test_a_program_knows_no_earlier_program(
    task: PythonExpressions, outcome: str, said: str, arguments: dict[str, Any]
) -> None:
    tool = task.toolbox
    assert (
        tool.call("python", {"code": "a = 3\nimport math\nmath.pi = 3\nprint('hi')\na"}) == "hi\n3"
    )
    with pytest.raises(ToolProblem, match=said) as problem:
        tool.call("python", arguments)
    assert problem.value.outcome == outcome
    assert tool.call("python", {"code": "import math\nmath.pi > 3"}) == "True"


def test_a_long_result_is_cut(task: PythonExpressions) -> None:
    assert task.toolbox.call("python", {"code": "'é' * 5000"}) == repr("é" * 5000)[:640]


def test_a_program_runs_once(task: PythonExpressions, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    def count(process: object, arguments: dict[str, str], seconds: float) -> str:
        runs.append(arguments["code"])
        return "2"

    monkeypatch.setattr(python_expressions, "call_process", count)
    assert {task.toolbox.call("python", {"code": "1+1 "}) for _ in range(4)} == {"2"}
    assert runs == ["1+1 "]


def test_random_numbers_of_a_program_are_those_of_every_run(task: PythonExpressions) -> None:
    again = build(Config(train_size=4, heldout_size=1), TaskContext(0, Path()))
    assert isinstance(again, PythonExpressions)
    code = {"code": "import random; random.random()"}
    assert task.toolbox.call("python", code) == again.toolbox.call("python", code)
