"""The beginnings of earlier conversations as prompts: selection, notes, and rounds of play and learning."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy import TASK, assert_same_run, forked, make_model, rows, toy_recipe, toy_run

from practicum.errors import DataError
from practicum.ports import TaskContext
from practicum.runs.assembly import assemble_run
from practicum.runs.pipeline import run
from practicum.tasks.played import Config, build
from practicum.teachers.privileged import Config as Privileged
from practicum.teachers.privileged import add_context
from practicum.training.loop import StepComponents
from practicum.types import Message, Rollout

TALK = {"type": "user", "tries": 3, "wrong": "{answer}", "task": TASK}
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
    # Both conversations are equal up to the second answer: two prompts, not four.
    assert said == [[question], [question, "no", "try again"], [said[2][0]]]
    assert len({prompt.id for prompt in prompts}) == 3
    assert {prompt.privileged["experience"] for prompt in prompts} == {"two\none"}
    assert open_task(tmp_path, note="lesson", keep=1).train_prompts()[0].privileged == {
        "experience": "one"
    }
    assert len(held_out) == 2 and not task.opens_episodes
    talks = open_task(tmp_path, task={"type": "user", "task": PLAYED})
    assert talks.heldout_prompts() == [] and not talks.opens_episodes
    assert talks.reward(Rollout.from_text(prompts[0], "yes")) is None, "no user is left to ask"
    # The student's folder of a stage is next to its rows.
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
        ("nonsense\n", "row 1 is not a rollout; give the unmodified rollouts.jsonl of a run"),
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


def play(models: Path, tmp_path: Path) -> Path:
    """Run a student with random weights that writes pairs of letters in either spelling; return the folder."""
    student = make_model(tmp_path / "odd", tokenizer="pairs")
    changes = {
        "task": TALK,
        "student": {"model": str(student)},
        "teacher": {"type": "none"},
        "objective": {"signal": "text", "divergence": "ce", "source": "dataset"},
        "rollout": {"n": 4, "max_new_tokens": 48},
        "train.steps": 2,
    }
    return toy_run(models, tmp_path, changes).folder


def consolidate(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return changes of the toy recipe: the student learns from the conversations of a folder."""
    return {
        "student.model": str(folder.parent / "odd"),
        "task": {"type": "played", "run": {"model": str(folder)}, "task": TALK},
        "teacher": {
            "type": "privileged",
            "teacher": {"type": "self", "weights": "frozen"},
            "reference": "ab",
        },
        "train.steps": 3,
        "train.checkpoint_every": 1,
        **changes,
    }


def assemble(models: Path, tmp_path: Path, folder: Path, **changes: Any) -> StepComponents:
    return assemble_run(toy_recipe(models, consolidate(folder, **changes)), tmp_path / "next").parts


def list_stored(folder: Path) -> list[tuple[int, ...]]:
    """Return the tokens before each turn of the student, as stored in the rows."""
    stored = []
    for row in rows(folder / "rollouts.jsonl"):
        begun, said = tuple(row["prompt_tokens"]), row["tokens"]
        for turn in row["turns"]:
            if turn["role"] == "assistant":
                stored.append(begun)
            tokens, said = said[: turn["tokens"]], said[turn["tokens"] :]
            begun += tuple(tokens)
    return stored


def test_beginnings_come_back_as_the_tokens_that_were_stored(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = play(models, tmp_path)
    parts = assemble(models, tmp_path, folder)
    rendered = {prompt.id: parts.renderer.render(prompt.messages) for prompt in parts.prompts}
    stored = list_stored(folder)
    assert set(rendered.values()) == set(stored) and len(set(stored)) == len(parts.prompts)
    assert "rendered to other tokens" not in caplog.text
    # The difference matters here: most texts have other tokens when they are encoded again.
    plain = {
        tuple(parts.renderer.render([replace(message, tokens=()) for message in prompt.messages]))
        for prompt in parts.prompts
    }
    assert len(plain.intersection(stored)) < 0.7 * len(stored)
    # A teacher with more context reads the same turns: only the last message is rewritten.
    later = [prompt for prompt in parts.prompts if len(prompt.messages) > 1]
    longer = Privileged(reference="ab", system="b", teacher={"type": "self"})
    for prompt in later:
        seen = parts.renderer.render(add_context(prompt, longer).messages)
        earlier = [token for message in prompt.messages[1:-1] for token in message.tokens]
        head = parts.renderer.render(
            [Message("system", "b"), replace(prompt.messages[0], tokens=())]
        )
        last = parts.renderer.render_reply(Message("user", f"ab\n\n{prompt.messages[-1].content}"))
        assert seen == (*head, *earlier, *last)


def test_two_spellings_of_a_beginning_are_two_prompts(tmp_path: Path) -> None:
    name = open_task_of_reverse()[0].id

    def write_row(*tokens: int) -> dict[str, Any]:
        turns = [("assistant", len(tokens), "ab"), ("user", 1, "no"), ("assistant", 1, "ba")]
        return {
            "prompt": name,
            "prompt_tokens": [1],
            "tokens": [*tokens, 8, 9],
            "turns": [dict(zip(("role", "tokens", "text"), turn, strict=True)) for turn in turns],
        }

    write(tmp_path, write_row(3, 4, 2), write_row(5, 2), write_row(3, 4, 2))
    prompts = open_task(tmp_path).train_prompts()
    assert [[message.tokens for message in prompt.messages] for prompt in prompts] == [
        [(1,)],
        [(1,), (3, 4, 2), (8,)],
        [(1,), (5, 2), (8,)],
    ]
    assert prompts[2].id == f"{prompts[1].id}#2" and prompts[1].id.endswith('"ab", "no"]')
    write(tmp_path, {**write_row(3), "tokens": [3]})
    with pytest.raises(DataError, match="row 1 is not a rollout"):
        open_task(tmp_path)


@pytest.mark.parametrize("changes", [{"student.system": "a"}, {"student.model": "characters"}])
def test_a_student_with_other_tokens_reads_the_text_and_the_run_says_so(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    folder = play(models, tmp_path)
    if "student.model" in changes:
        changes = {"student.model": str(make_model(tmp_path / "characters"))}
    caplog.set_level("INFO")
    parts = assemble(models, tmp_path, folder, **changes)
    count = len(parts.prompts)
    lines = [line for line in caplog.messages if "other tokens" in line]
    assert lines == [
        f"{count} of {count} stored prompts are rendered to other tokens than before: the student's "
        "tokenizer, template or system turn differs"
    ]
    if "student.model" in changes:
        for prompt in parts.prompts:
            plain = [replace(message, tokens=()) for message in prompt.messages]
            assert parts.renderer.render(prompt.messages) == parts.renderer.render(plain)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_resumed_run_reads_the_same_tokens(models: Path, tmp_path: Path, staleness: int) -> None:
    folder = play(models, tmp_path)
    changes = consolidate(folder, **{"rollout.max_staleness": staleness})
    whole = toy_run(models, tmp_path / "whole", changes).folder
    killed = tmp_path / "killed"
    fault = {"PRACTICUM_FAULT": "update:2"}
    assert forked(lambda: toy_run(models, killed, changes), fault) == 137
    assert_same_run(whole, toy_run(models, killed, changes, resume=True).folder)
    read = {tuple(row["prompt_tokens"]) for row in rows(whole / "rollouts.jsonl")}
    assert read.issubset(list_stored(folder)) and len(set(map(len, read))) > 3


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("oel", marks=pytest.mark.long),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("oel-lake", "oel-sokoban")),
    ],
)
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
    task = open_task(tmp_path, note="lesson", scope="prompt")
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
        # An untrained model answers no probe.
        "stages.probe.notes.probe.choose=longest",
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
