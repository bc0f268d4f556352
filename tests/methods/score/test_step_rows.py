"""Corrected turns are exported as easydistill's rows, and are imported as prompts with the value of a step."""

import json
from pathlib import Path
from typing import Any

import pytest
from toy import rows, toy_run

from practicum.cli.convert import write_rows
from practicum.core.plugins import load_plugin
from practicum.errors import RecipeError
from practicum.ports import TaskContext
from practicum.types import Rollout

COLUMNS = [
    "prompt",
    "chosen",
    "chosen_observation",
    "rejected",
    "rejected_observation",
    "correct_step",
    "gt_answer",
]


def read(folder: Path, **changes: Any) -> Any:
    module = load_plugin("tasks", "jsonl")
    config = module.Config.model_validate(
        {"type": "jsonl", "path": "rows.json", "heldout": 0, "verifier": "contains", **changes}
    )
    return module.build(config, TaskContext(0, folder))


def test_a_run_that_corrects_leaves_rows_that_a_task_reads(models, tmp_path, capsys):
    changes = {
        "student": {"model": {"hidden_size": 16, "layers": 1, "heads": 2}},
        "teacher": {"type": "expert"},
        "task": {"type": "walker", "turns": 3, "train_size": 12, "heldout_size": 2},
        "rollout": {"source": "correct", "max_new_tokens": 24},
        "objective": {"signal": "text", "divergence": "ce"},
        "train.steps": 2,
        "train.prompts_per_step": 6,
    }
    folder = toy_run(models, tmp_path, changes).folder
    write_rows(folder, tmp_path / "rows.json")
    written = json.loads((tmp_path / "rows.json").read_text())
    said = [
        row for row in rows(folder / "rollouts.jsonl") if row["notes"]["corrected"] != "refused"
    ]
    assert f"wrote {len(said)} rows" in capsys.readouterr().out
    assert len(written) == len(said) and {row["notes"]["corrected"] for row in said} - {"none"}
    for row, conversation in zip(written, said, strict=True):
        assert list(row) == COLUMNS
        texts = [turn["text"] for turn in conversation["turns"]]
        if conversation["notes"]["corrected"] == "none":
            assert len(row["prompt"]) == 1 and not any(row[name] for name in COLUMNS[1:6])
            continue
        # The conversation's beginning is the prompt, the corrected step and all later turns.
        mine = [message["content"] for message in row["prompt"][1:]] + [row["chosen"]]
        assert mine == texts[: len(mine)]
        assert [row["chosen_observation"]] == (texts[len(mine) : len(mine) + 1] or [""])
        assert row["rejected"] == conversation["notes"]["rejected_turn"] != row["chosen"]
        assert row["rejected_observation"] == conversation["notes"].get("rejected_reply", "")
        assert row["correct_step"].endswith(row["chosen"])
    prompts = read(tmp_path).train_prompts()
    pairs = [(p, row) for p, row in zip(prompts, written, strict=True) if row["chosen"]]
    for prompt, row in pairs:
        assert [message.content for message in prompt.messages] == [
            m["content"] for m in row["prompt"]
        ]
        assert prompt.response == row["chosen"] and prompt.privileged["rejected"] == row["rejected"]
    with pytest.raises(RecipeError, match="exists; give another file"):
        write_rows(folder, tmp_path / "rows.json")


def test_a_step_is_worth_what_it_is_where_it_does_not_solve_its_task(tmp_path):
    step = {
        "prompt": [
            {"role": "user", "content": "How many legs have 3 spiders?"},
            {"role": "assistant", "content": "<first_thought>Each has eight.</first_thought>"},
            {"role": "user", "content": "Observation: None"},
        ],
        "chosen": "<thought>Multiply.</thought><code>print(3 * 8)</code>",
        "chosen_observation": "Observation: 24",
        "rejected": "<thought>Add.</thought><code>print(3 + 8)</code>",
        "rejected_observation": "Observation: 11",
        "correct_step": "<thought>It added. Correct Step: Multiply.</thought><code>print(3 * 8)</code>",
        "gt_answer": "24",
    }
    bare = {**dict.fromkeys(COLUMNS, ""), "prompt": step["prompt"][:1], "gt_answer": "24"}
    (tmp_path / "rows.json").write_text(json.dumps([step, bare]))
    task, plain = read(tmp_path, step_rewards=True), read(tmp_path)
    whole, question = task.train_prompts()
    assert [message.role for message in whole.messages] == ["user", "assistant", "user"]
    assert whole.answer == question.answer == "24" and question.response is None
    assert set(whole.privileged) == set(COLUMNS[1:6]) and not question.privileged

    def reward(task: Any, prompt: Any, text: str) -> float:
        return task.reward(Rollout.from_text(prompt, text))

    replies = ["it is 24", f" {step['chosen']}", str(step["rejected"]), "no idea"]
    assert [reward(task, whole, text) for text in replies] == [1.0, 0.5, 0.0, 0.1]
    assert [reward(task, question, text) for text in replies] == [1.0, 0.0, 0.0, 0.0]
    assert [reward(plain, whole, text) for text in replies] == [1.0, 0.0, 0.0, 0.0]


def test_a_run_that_corrects_nothing_has_no_such_rows(models, tmp_path):
    folder = toy_run(models, tmp_path, {"train.steps": 1, "train.prompts_per_step": 2}).folder
    with pytest.raises(RecipeError, match="rows of corrected turns come from a run"):
        write_rows(folder, tmp_path / "rows.json")
