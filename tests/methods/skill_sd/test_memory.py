"""A memory of notes: notes of earlier steps, a bandit's choice, and the same bytes after a kill."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from noted import answer
from toy import SEES_HINT, assert_same_run, curve, forked, rows, toy_recipe, toy_run

from practicum.errors import RecipeError
from practicum.methods.skill_sd import memory
from practicum.ports.notes import Note, NoteContext, NoteMoment
from practicum.types import (
    Datum,
    Prompt,
    TeacherSignal,
)

from .hinted import HINTED


def test_the_memory_holds_what_the_steps_before_noted() -> None:
    def build(**settings: Any) -> Note:
        context = NoteContext("known", None, None, 0)  # type: ignore[arg-type]
        return memory.build(memory.Config(note="hint", **settings), context)

    def learn(note: Note, *texts: str) -> None:
        data = [Datum(answer("a", notes={"hint": text}), TeacherSignal()) for text in texts]
        note.after_step(1, [*data, Datum(answer("a"), TeacherSignal())])

    def recall(note: Note, prompt: str = "p") -> str | None:
        rollout = replace(answer("a"), prompt=Prompt(prompt, ()))
        return note.write([rollout], NoteMoment(2, None))[0]  # type: ignore[arg-type]

    note = build(keep=2)
    assert recall(note) is None and note.save_state() == {}
    learn(note, "one", "two ", " ", "one", "three {answer} \N{GREEK SMALL LETTER ALPHA}")
    assert recall(note) == recall(note, "q") == "one\nthree {answer} \N{GREEK SMALL LETTER ALPHA}"
    again = build(keep=2)
    again.load_state(note.save_state())
    assert recall(again) == recall(note)
    by_prompt = build(scope="prompt")
    learn(by_prompt, "one")
    assert (recall(by_prompt), recall(by_prompt, "q")) == ("one", None)


@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from("pq"), st.sampled_from("xyz"), st.booleans()), max_size=4
        ),
        max_size=8,
    ),
    st.sampled_from([0.0, 0.5, 1.4]),
    st.sampled_from(["run", "prompt"]),
    st.integers(1, 3),
)
def test_a_bandit_shows_the_text_with_the_greatest_bound(
    steps: list[list[tuple[str, str, bool]]], exploration: float, per: Any, keep: int
) -> None:
    """Each step: answers by prompt, a text about each, and its reward. The twin reads the whole history again."""
    context = NoteContext("best", None, None, 0)  # type: ignore[arg-type]
    config = memory.Config(note="hint", keep=keep, scope=per, choose="ucb", exploration=exploration)
    note, moment = memory.build(config, context), NoteMoment(1, None)  # type: ignore[arg-type]
    kept: dict[str, list[str]] = {}
    history: list[tuple[str, str, float]] = []

    def expect(key: str) -> str | None:
        tried = {
            text: [r for k, t, r in history if (k, t) == (key, text)] for text in kept.get(key, [])
        }
        total = sum(map(len, tried.values()))
        bounds = [
            (sum(r) / len(r) + exploration * (math.log(total) / len(r)) ** 0.5, place)
            for place, r in enumerate(tried.values())
        ]
        best = [place for bound, place in bounds if bound > max(bounds)[0] - 1e-12]
        return kept[key][best[-1]] if bounds else None

    for number, step in enumerate(steps):
        rollouts = [
            replace(answer("a", row, float(right)), prompt=Prompt(name, ()), notes={"hint": text})
            for row, (name, text, right) in enumerate(step)
        ]
        shown = note.write(rollouts, moment)
        keys = [rollout.prompt.id if per == "prompt" else "" for rollout in rollouts]
        assert shown == [expect(key) for key in keys]
        noted = [
            rollout if text is None else replace(rollout, notes={**rollout.notes, "best": text})
            for rollout, text in zip(rollouts, shown, strict=True)
        ]
        note.after_step(number, [Datum(rollout, TeacherSignal()) for rollout in noted])
        for name in ("best", "hint"):
            pairs = [
                (k, r.notes[name]) for k, r in zip(keys, noted, strict=True) if name in r.notes
            ]
            for key, text in dict.fromkeys(pairs):
                group = [
                    float(r.reward or 0)
                    for k, r in zip(keys, noted, strict=True)
                    if (k, r.notes.get(name)) == (key, text)
                ]
                history.append((key, text, sum(group) / len(group)))
        for key, rollout in zip(keys, noted, strict=True):
            texts = kept.setdefault(key, [])
            texts[:] = [*(t for t in texts if t != rollout.notes["hint"]), rollout.notes["hint"]][
                -keep:
            ]
        history = [entry for entry in history if entry[1] in kept.get(entry[0], [])]
        again = memory.build(config, context)
        again.load_state(note.save_state())
        note = again


def test_a_text_without_a_reward_is_tried_first() -> None:
    context = NoteContext("best", None, None, 0)  # type: ignore[arg-type]
    note = memory.build(memory.Config(note="hint", choose="ucb"), context)
    rollouts = [answer("a", 0, 1.0, notes={"hint": "x"}), answer("a", 1, None, notes={"hint": "y"})]
    note.after_step(1, [Datum(rollout, TeacherSignal()) for rollout in rollouts])
    note.after_step(2, [Datum(answer("a", 0, 1.0, notes={"hint": "x"}), TeacherSignal())])
    assert note.write(rollouts, NoteMoment(3, None)) == ["y", "y"]  # type: ignore[arg-type]


def test_a_killed_run_with_notes_goes_on_with_the_same_bytes(models: Path, tmp_path: Path) -> None:
    whole, out = toy_run(models, tmp_path / "whole", HINTED).folder, tmp_path / "parts"
    assert forked(lambda: toy_run(models, out, HINTED), {"PRACTICUM_FAULT": "rollout:3"}) == 137
    assert_same_run(whole, toy_run(models, out, HINTED, resume=True).folder)
    assert (whole / "checkpoints" / "step-4" / "note-known.safetensors").is_file()
    assert curve(whole, "note-known/made")[0] == 0.0 and curve(whole, "note-known/made")[3] == 1.0
    recorded = rows(whole / "rollouts.jsonl")
    hints = [row.get("notes", {}).get("hint") for row in recorded if row["step"] == 1]
    known = [row["notes"]["known"] for row in recorded if row["step"] == 2]
    said = [hint for hint in hints if hint]
    assert len(set(known)) == 1 and set(known[0].split("\n")) <= set(said)


def test_a_killed_run_with_a_bandit_goes_on_with_the_same_bytes(
    models: Path, tmp_path: Path
) -> None:
    known = {"type": "memory", "note": "hint", "keep": 5, "choose": "ucb"}
    changes = {
        **HINTED,
        "student.model": str(models / "teacher"),
        "teacher": {**SEES_HINT, "reference": "{known}"},
        "notes": {"known": known, "hint": {**HINTED["notes"]["hint"], "unit": "prompt"}},
        "objective": {"losses": [{}, {"signal": "score(group_mean)"}]},
    }
    whole, out = toy_run(models, tmp_path / "whole", changes).folder, tmp_path / "parts"
    assert forked(lambda: toy_run(models, out, changes), {"PRACTICUM_FAULT": "rollout:3"}) == 137
    assert_same_run(whole, toy_run(models, out, changes, resume=True).folder)
    recorded = rows(whole / "rollouts.jsonl")
    shown = {row["step"]: row["notes"].get("known") for row in recorded}
    assert shown[1] is None and all(shown[step] and "\n" not in shown[step] for step in (2, 3, 4))


def test_a_note_that_is_not_there_is_refused_with_the_recipe(models: Path) -> None:
    notes = {"known": {"type": "memory", "note": "hnt"}, "hint": {"type": "feedback"}}
    line = "notes.known.note: no other note named 'hnt'; did you mean 'hint'"
    with pytest.raises(RecipeError, match=line):
        toy_recipe(models, {"notes": notes})
