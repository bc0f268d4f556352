"""The tool calls of a run's last evaluation: by hand, and from a finished run."""

from pathlib import Path

from laboratory.measures.calls import count_calls, read_calls
from practicum.recipe import load_recipe
from practicum.run_dir import read_json
from practicum.runs import run


def test_calls_by_hand() -> None:
    conversations = [["answered"], ["unreadable", "answered", "answered"], [], ["unknown"]]
    assert count_calls(conversations) == {
        "called": 0.5,
        "calls_too_many": 0.5,
        "calls_answered": 3 / 5,
    }
    assert count_calls([[], []]) == {"called": 0.0, "calls_too_many": 0.0}


def test_a_run_says_of_every_held_out_answer_what_its_calls_came_to(tmp_path: Path) -> None:
    recipe = load_recipe(
        "smoke/tools",
        [
            "name=calls",
            "train.steps=1",
            "train.prompts_per_step=2",
            "task.heldout_size=4",
            "student.model={hidden_size: 16, layers: 1, heads: 2}",
        ],
    )
    folder = run(recipe, out=tmp_path).folder
    # The teacher is the task's expert, which makes only the call that is needed.
    teacher = read_json(folder / "before.json")["teacher"]["answers"]
    assert [answer["calls"] for answer in teacher] == [["answered"]] * 4
    assert count_calls([answer["calls"] for answer in teacher])["calls_too_many"] == 0
    assert 0 <= read_calls(folder)["called"] <= 1
