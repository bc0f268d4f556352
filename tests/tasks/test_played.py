"""The beginnings of earlier conversations as prompts: which there are, what was noted, and rounds of play and learning."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from toy import TASK, rows, toy_recipe, toy_run

from practicum.errors import DataError
from practicum.ports import Environment
from practicum.runs.assembly import assemble_run
from practicum.runs.pipeline.runner import run
from practicum.tasks import TaskContext
from practicum.tasks.played import Config, build
from practicum.text import Renderer
from practicum.types import Rollout

PLAYED = {"type": "reverse", "alphabet": "abcd", "train_size": 4, "heldout_size": 2}


def write(folder: Path, *written: dict[str, Any]) -> Path:
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    return folder


def row(prompt: str, *turns: str, **notes: str) -> dict[str, Any]:
    roles = ["assistant", "user"] * len(turns)
    spoken = [{"role": role, "text": text} for role, text in zip(roles, turns, strict=False)]
    return {"prompt": prompt, "turns": spoken, "notes": notes}


def open_task(folder: Path, **settings: Any) -> Any:
    config = Config(**{"run": {"model": str(folder)}, "task": PLAYED, **settings})
    return build(config, TaskContext(seed=0, base_dir=Path()))


def test_each_turn_of_the_student_has_its_beginning_and_all_that_was_noted(tmp_path: Path) -> None:
    names = [prompt.id for prompt in open_task_of_reverse()]
    first = row(names[0], "no", "try again", "yes", lesson="one")
    again = row(names[0], "no", "try again", "so", lesson="two")
    other = row(names[1], lesson="one ")
    write(tmp_path, first, again, other)
    task = open_task(tmp_path, note="lesson")
    held_out = task.heldout_prompts()
    prompts = task.train_prompts()
    said = [[message.content for message in prompt.messages] for prompt in prompts]
    question = said[0][0]
    # Both conversations begin alike up to the second answer: two prompts, not four.
    assert said == [[question], [question, "no", "try again"], [said[2][0]]]
    assert len({prompt.id for prompt in prompts}) == 3
    assert {prompt.privileged["experience"] for prompt in prompts} == {"two\none"}
    assert open_task(tmp_path, note="lesson", keep=1).train_prompts()[0].privileged == {
        "experience": "one"
    }
    assert len(held_out) == 2 and not isinstance(task, Environment)
    talks = open_task(tmp_path, task={"type": "user", "task": PLAYED})
    assert talks.heldout_prompts() == [] and not isinstance(talks, Environment)
    assert talks.reward(Rollout.from_text(prompts[0], "yes")) is None, "nobody is left to ask"
    # The student's folder of a stage lies beside its rows.
    (tmp_path / "model").mkdir()
    assert len(open_task(tmp_path / "model").train_prompts()) == 3
    assert open_task(tmp_path).train_prompts()[0].privileged == {}


def open_task_of_reverse() -> Any:
    from practicum.tasks import reverse

    config = reverse.Config(**PLAYED)
    return reverse.build(config, TaskContext(seed=0, base_dir=Path())).train_prompts()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (None, "cannot be read .*; give the rollouts.jsonl of a run"),
        ("", "no rows; give the rollouts.jsonl of a run that has ended"),
        ("nonsense\n", "row 1 is no rollout; give the rollouts.jsonl of a run as it was written"),
        ('{"prompt": "zz"}\n', "row 1: no prompt of task.task is called 'zz'; give the task"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, lines: str | None, words: str) -> None:
    if lines is not None:
        (tmp_path / "rollouts.jsonl").write_text(lines)
    with pytest.raises(DataError, match=words):
        open_task(tmp_path)


def test_a_line_separator_in_a_turn_ends_no_row(tmp_path: Path) -> None:
    name, said = open_task_of_reverse()[0].id, "no\u2028so"
    turns = [{"role": "assistant", "text": said}, {"role": "user", "text": "again"}]
    written = {"prompt": name, "turns": [*turns, {"role": "assistant", "text": "yes"}]}
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(written, ensure_ascii=False) + "\n")
    last = open_task(tmp_path).train_prompts()[-1]
    assert [message.content for message in last.messages[1:]] == [said, "again"]


def test_the_beginnings_are_the_tokens_that_were_stored(models: Path, tmp_path: Path) -> None:
    """They are rendered from their text; a control token inside an answer alone would come back as letters."""
    talk = {"type": "user", "tries": 3, "wrong": "{answer}", "task": TASK}
    changes = {
        "task": talk,
        "student.model": str(models / "teacher"),
        "rollout": {"n": 4, "max_new_tokens": 16, "temperature": 0.5},
        "train.steps": 2,
    }
    folder = toy_run(models, tmp_path, changes).folder
    renderer = assemble_run(toy_recipe(models, changes), tmp_path / "again").parts.renderer
    rendered = {
        renderer.render(prompt.messages) for prompt in open_task(folder, task=talk).train_prompts()
    }
    stored = [
        beginning
        for row in rows(folder / "rollouts.jsonl")
        for beginning in list_beginnings(row, renderer)
    ]
    assert rendered.issuperset(stored) and len({len(tokens) for tokens in stored}) > 4


def list_beginnings(row: Mapping[str, Any], renderer: Renderer) -> Iterator[tuple[int, ...]]:
    """The tokens before each turn of the student, until one with a control token that ends no turn."""
    begun = list(row["prompt_tokens"])
    said = row["tokens"]
    for turn in row["turns"]:
        tokens, said = said[: turn["tokens"]], said[turn["tokens"] :]
        if turn["role"] == "assistant":
            yield tuple(begun)
            if any(map(renderer.is_control, tokens[:-1])):
                return
        begun += tokens


@pytest.mark.long
@pytest.mark.parametrize("name", ["oel", "oel-lake", "oel-sokoban"])
def test_rounds_of_play_and_consolidation(name: str, tmp_path: Path) -> None:
    small = "{hidden_size: 16, layers: 1, heads: 2, tokenizer: bytes}"
    changes = [
        f"student.model={small}",
        "student.trainable_layers=null",
        "rollout.max_new_tokens=16",
        "train.steps=1",
        "train.prompts_per_step=3",
        "evaluation.prompts=0",
        "stages.play_1.notes.experience.shortest=1",
        "stages.play_2.notes.experience.shortest=1",
    ]
    folder = run(f"pipelines/{name}", changes, out=tmp_path, progress=False).folder
    stages = {stage.name[3:]: stage for stage in sorted((folder / "stages").iterdir())}
    played, learned = (
        rows(stages[stage] / "rollouts.jsonl") for stage in ("play_1", "consolidate_1")
    )
    assert len({row["notes"]["experience"] for row in played}) == len(played), "each rewrote it"
    assert not any("experience" in row.get("notes", {}) for row in learned)
    for stage, path in stages.items():
        [metrics] = rows(path / "metrics.jsonl")
        assert (metrics["supervised"] > 0) != stage.startswith("play")
    assert all(row["reward"] is None for row in learned)


def test_what_was_noted_of_a_prompt_may_be_for_it_alone(tmp_path: Path) -> None:
    names = [prompt.id for prompt in open_task_of_reverse()]
    write(tmp_path, row(names[0], lesson="one"), row(names[1], lesson="two"), row(names[2]))
    task = open_task(tmp_path, note="lesson", per="prompt")
    experiences = [prompt.privileged.get("experience") for prompt in task.train_prompts()]
    assert experiences == ["one", "two", None] and len(task.heldout_prompts()) == 2
    right = task.train_prompts()[0]
    assert task.reward(Rollout.from_text(right, right.answer or "")) == 1.0, "its own verifier"


@pytest.mark.long
def test_a_teachers_probes_become_turns(tmp_path: Path) -> None:
    small = "{hidden_size: 16, layers: 1, heads: 2, tokenizer: bytes}"
    changes = [
        f"student.model={small}",
        "student.trainable_layers=null",
        "train.steps=1",
        "train.prompts_per_step=3",
        "evaluation.prompts=0",
        "stages.probe.notes.probe.shortest=0",
    ]
    folder = run("pipelines/probing-to-refine", changes, out=tmp_path, progress=False).folder
    probe, warm_up, refine = (
        rows(stage / "rollouts.jsonl") for stage in sorted((folder / "stages").iterdir())
    )
    assert all("probe" in row["notes"] for row in probe)
    assert {row["source"] for row in warm_up} == {"teacher"}
    assert {row["source"] for row in refine} == {"student"}
    names = {row["prompt"] for row in probe}
    assert {row["prompt"] for row in [*warm_up, *refine]} <= names
