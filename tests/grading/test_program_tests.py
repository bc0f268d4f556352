"""The verifier `tests`: programs of replies against the tests of a row, each in a separate child process."""

import json
from pathlib import Path
from typing import Any

import pytest

from practicum.errors import DataError
from practicum.grading.program_tests import find_program, read_tests
from practicum.ports import TaskContext
from practicum.recipe import load_recipe
from practicum.sandbox import missing
from practicum.tasks.jsonl import Config, build
from practicum.types import Rollout

MBPP = {
    "task_id": 2,
    "text": "Write a function to add two numbers.",
    "code": "def add(a, b):\r\n  return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert add(0, x) == 7"],
    "test_setup_code": "x = 7",
    "challenge_test_list": [],
}
STDIN = {
    "question": "Add the numbers of each line.",
    "inputs": ["1 2\n3 4\n", "5 6\n"],
    "outputs": ["3\n7\n", "11"],
}
RIGHT = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
READS = (
    "import sys\nfor line in sys.stdin:\n    print(sum(map(int, line.split())), '')\nsys.exit(0)"
)


def write(folder: Path, row: dict[str, Any], **settings: Any) -> Config:
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return Config.model_validate(
        {"path": "rows.jsonl", "heldout": 0, "verifier": "tests", "strict": False, **settings}
    )


@pytest.mark.long
def test_the_layout_of_mbpp(tmp_path: Path) -> None:
    config = write(tmp_path, MBPP, columns={"prompt": "text", "response": "code"})
    task = build(config, TaskContext(0, tmp_path))
    (prompt,) = task.train_prompts()

    def grade(reply: str) -> float | None:
        return task.reward(Rollout.from_text(prompt, reply))

    assert grade(RIGHT) == 1.0 and grade(MBPP["code"]) == 1.0
    for wrong in (
        "def add(a, b): return 3",
        "def add(a, b): exit()",
        "import os; os._exit(0)",
        "while True: pass",
        "raise KeyboardInterrupt",
        "nothing",
        "",
    ):
        assert grade(wrong) == 0.0, wrong
    steals = "import sys; sys.modules['practicum.grading.program_tests'].verify = lambda reply, prompt: 1.0\n"
    grade(steals)
    assert grade("def add(a, b): return 3") == 0.0, "nothing is left of the reply before"


@pytest.mark.long
def test_programs_that_read_and_print(tmp_path: Path) -> None:
    task = build(write(tmp_path, STDIN, columns={"prompt": "question"}), TaskContext(0, tmp_path))
    (prompt,) = task.train_prompts()
    for program, score in (
        (READS, 1.0),
        ("while True:\n    print(sum(map(int, input().split())))", 0.0),
        ("print(3); print(7)", 0.0),
    ):
        assert task.reward(Rollout.from_text(prompt, program)) == score


def test_the_program_is_the_last_block_after_the_thoughts() -> None:
    assert find_program("a = 1") == "a = 1"
    assert find_program("```\na\n```\n```py\nb\n```") == "b\n"
    assert find_program("<think>```python\na\n```</think>\nb") == "\nb"
    assert find_program("```python\ncut off") == "cut off"
    assert find_program("<think>```python\na\n```") == "", "no answer follows"


def test_tests_are_read_as_lists_or_as_json() -> None:
    assert json.loads(read_tests({"test_list": '["assert x"]', "test_imports": ["import re"]})) == {
        "setup": "import re",
        "test_list": ["assert x"],
    }
    for row in ({}, {"test_list": []}, {"inputs": ["1"], "outputs": []}, {"test_list": [7]}):
        with pytest.raises(ValueError, match=r"test_list"):
            read_tests(row)


def test_a_row_without_tests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="verifier tests: the row has no test_list"):
        build(write(tmp_path, {"prompt": "a"}), TaskContext(0, tmp_path))


@pytest.mark.skipif(bool(missing()), reason="this machine has no sandbox")
def test_the_programs_of_the_recipe_pass_their_tests() -> None:
    recipe = load_recipe("smoke/programs")
    assert isinstance(recipe.task, Config)
    task = build(recipe.task, TaskContext(0, Path(recipe.base_dir)))
    # Each program is requested in three ways, with the same tests.
    prompts = [*task.train_prompts()[::3], *task.heldout_prompts()]
    programs = [prompt.response or "" for prompt in prompts]
    assert len(prompts) == 16 and len(set(programs)) == 8
    rewards = [
        task.reward(Rollout.from_text(prompt, program))
        for prompt, program in zip(prompts, programs, strict=True)
    ]
    assert rewards == [1.0] * 16
    moved = [
        task.reward(Rollout.from_text(prompt, program))
        for prompt, program in zip(prompts, [*programs[1:], *programs[:1]], strict=True)
    ]
    assert moved == [0.0] * 16, "each test rejects every other program"
