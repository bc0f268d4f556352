"""Notes: the content of each kind, the answers they are about, their seeds; notes are data; and a resume keeps them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from noted import answer, write_notes
from toy import HINTED, SEES_HINT, assert_same_run, curve, forked, rows, toy_recipe, toy_run

from practicum.errors import RecipeError, TeacherError
from practicum.notes import feedback, next_state, written
from practicum.ports import (
    Task,
    Teacher,
    TeacherRequest,
)
from practicum.ports.notes import Note, NoteContext, NoteMoment
from practicum.recipe import parse_recipe
from practicum.rollouts import add_notes, measure_notes
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.types import (
    Datum,
    Prompt,
    Rollout,
    Sample,
    SamplingParams,
    TeacherSignal,
    Turn,
)

# --- The content of each kind ---


def test_feedback_is_the_environments_else_the_tasks() -> None:
    @dataclass
    class Explains(Task):
        def train_prompts(self) -> list[Prompt]: ...
        def heldout_prompts(self) -> list[Prompt]: ...
        def reward(self, rollout: Rollout) -> float | None: ...
        def feedback(self, rollout: Rollout) -> str | None:
            return f"not {rollout.text}" if rollout.reward == 0 else None

    noted = answer("b", notes={"feedback": "too short"})
    rollouts = [answer("ab"), answer("ba", 1, 1.0), noted]
    assert write_notes(feedback, rollouts, Explains()) == ["not ab", None, "too short"]
    assert write_notes(feedback, rollouts, object()) == [None, None, "too short"]
    assert write_notes(feedback, rollouts, Explains(), filter="correct") == [None, None, None]


def test_the_next_state_is_what_was_answered_to_the_turns_and_to_the_last_one() -> None:
    turns = (Turn("assistant", 1, "a"), Turn("user", 1, "no"), Turn("assistant", 1, "b"))
    rollouts = [
        answer("a", turns=turns),
        answer("a", turns=turns, notes={"next_state": "thanks"}),
        answer("a"),
    ]
    assert write_notes(next_state, rollouts) == ["no", "no\nthanks", None]
    assert write_notes(next_state, rollouts, turns="last") == ["no", "thanks", None]


# --- Notes that a model writes ---


@dataclass
class Scribe(Teacher):
    """Writes the same words for every request, or refuses."""

    words: str = "so"
    refuses: bool = False
    asked: list[tuple[str, int]] = field(default_factory=list)

    def sample(self, requests: Sequence[TeacherRequest], params: SamplingParams) -> list[Sample]:
        self.asked += [(request.prompt.messages[0].content, request.seed) for request in requests]
        none = torch.zeros(0)
        reason = "error" if self.refuses else "stop"
        return [Sample(none.long(), none, none, reason, self.words) for _ in requests]


@pytest.fixture(scope="module")
def parts(models: Path, tmp_path_factory: pytest.TempPathFactory) -> RunComponents:
    return assemble_run(toy_recipe(models), tmp_path_factory.mktemp("models"))


def ask(
    parts: RunComponents,
    scribe: Scribe,
    rollouts: Sequence[Rollout],
    step: int = 1,
    **settings: Any,
) -> list[str | None]:
    renderer = parts.parts.renderer
    config = written.Config(**{"template": "{attempt}", "author": "teacher", **settings})
    note = written.build(
        config, NoteContext("hint", renderer, parts.parts.task, 5, {"teacher": scribe})
    )
    return note.write(rollouts, NoteMoment(step, parts.parts.sampler))


def test_a_template_shows_the_answer_its_group_and_earlier_notes(parts: RunComponents) -> None:
    scribe = Scribe()
    template = "{question}|{answer}|{plan}|{attempt}|{outcome}|{sibling}|{attempts}|{share}"
    rollouts = [answer("ab", 0, 0.0, notes={"share": "0.50"}), answer("ba", 1, 1.0)]
    # The second answer lacks the note and a right sibling: it is left without, and never an error.
    assert ask(parts, scribe, rollouts, template=template) == ["so", None]
    assert scribe.asked[0][0] == ("ab?|ba|turn it|ab|incorrect|ba|incorrect: ab\ncorrect: ba|0.50")
    several = ["{share} {attempt}", "{attempt}"]
    assert ask(parts, scribe, rollouts, template=several) == ["so", "so"]
    assert [text for text, _ in scribe.asked[1:]] == ["0.50 ab", "ba"]
    turns = (Turn("assistant", 1, "a"), Turn("user", 1, "no {answer}"), Turn("assistant", 1, "b"))
    ask(parts, scribe, [answer("a", turns=turns)], template="{transcript}", characters=40)
    assert scribe.asked[3][0] == "user: ab?\nassistant: a\nuser: no {answer}"[:40]


def test_it_is_about_some_answers_or_once_a_prompt(parts: RunComponents) -> None:
    scribe = Scribe()
    rollouts = [answer("ba", 0, 1.0), answer("ab", 1), answer("aa", 2), answer("?", 3, None)]
    assert ask(parts, scribe, rollouts, filter="incorrect") == [None, "so", "so", None]
    assert ask(parts, scribe, rollouts, unit="prompt") == ["so"] * 4
    assert [text for text, _ in scribe.asked] == ["ab", "aa", "ba"]


def test_a_text_has_a_seed_of_its_own_by_step_prompt_and_number(parts: RunComponents) -> None:
    scribe = Scribe()
    rollouts = [answer("a", 0), answer("a", 1), replace(answer("a"), prompt=Prompt("q", ()))]
    ask(parts, scribe, rollouts)
    ask(parts, scribe, rollouts, step=2)
    ask(parts, scribe, rollouts[1:2])
    seeds = [seed for _, seed in scribe.asked]
    assert len(set(seeds[:6])) == 6 and seeds[6] == seeds[1], "whatever stands beside it"


def test_a_refusal_or_too_few_words_are_no_note(parts: RunComponents) -> None:
    assert ask(parts, Scribe(refuses=True), [answer("a")]) == [None]
    assert ask(parts, Scribe("  so "), [answer("a")], shortest=3) == [None]
    assert ask(parts, Scribe("  so "), [answer("a")]) == ["so"]


def test_of_several_drafts_the_longest_stays(parts: RunComponents) -> None:
    class Drafter(Scribe):
        def sample(self, requests: Any, params: SamplingParams) -> list[Sample]:
            drafts = super().sample(requests, params)
            texts = {1: ["so", "first"], 2: ["so it", "other"], 3: ["", "of 5."]}
            number = len(self.asked) // len(requests)
            return [
                replace(draft, text=text) for draft, text in zip(drafts, texts[number], strict=True)
            ]

    scribe = Drafter()
    rollouts = [answer("a", 0), answer("b", 1)]
    assert ask(parts, scribe, rollouts, drafts=3, shortest=2) == ["so it", "first"]
    assert len({seed for _, seed in scribe.asked}) == 6
    alone = Scribe()
    ask(parts, alone, rollouts)
    assert alone.asked == scribe.asked[:2], "the first draft is the note that there would be"
    assert ask(parts, Scribe(refuses=True), rollouts, drafts=2) == [None, None]


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("xyz "), st.booleans()), max_size=3),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["all", "correct"]),
)
def test_the_experience_is_a_fold_over_the_answers_of_all_steps(
    parts: RunComponents, steps: list[list[tuple[str, bool]]], only: Any
) -> None:
    """The end of a step does not matter, nor does a resume, nor a caller that asks in between without learning from it."""

    class Appender(Scribe):
        def sample(self, requests: Any, params: SamplingParams) -> list[Sample]:
            [draft] = super().sample(requests, params)
            return [replace(draft, text=self.asked[-1][0].strip("<>"))]

    def build() -> Any:
        config = written.Config(
            template=("{experience}{attempt}", "<{attempt}>"),
            author="teacher",
            unit="run",
            filter=only,
            characters=10**6,
        )
        models = {"teacher": Appender()}
        renderer, task = parts.parts.renderer, parts.parts.task
        return written.build(config, NoteContext("experience", renderer, task, 5, models))

    note, expected = build(), ""
    assert note.save_state() == {}
    for number, step in enumerate(steps):
        old = {"experience": "of a replayed answer"}
        rollouts = [
            answer(said, row, float(right), notes=old) for row, (said, right) in enumerate(step)
        ]
        texts = add_notes(rollouts, {"experience": note}, NoteMoment(number, parts.parts.sampler))
        assert note.write(rollouts, NoteMoment(number, parts.parts.sampler)) == [
            rollout.notes.get("experience") for rollout in texts
        ]
        for (said, right), rollout in zip(step, texts, strict=True):
            # A blank answer adds nothing, and is no note where nothing was known before it.
            asked = right or only == "all"
            expected = (expected + said).strip() if asked else expected
            assert rollout.notes.get("experience") == ((expected or None) if asked else None)
        note.after_step(number, [Datum(rollout, TeacherSignal()) for rollout in texts])
        again = build()
        again.load_state(note.save_state())
        note = again
    assert note.experience == (expected or None)


def test_the_student_writes_words_and_no_control_tokens(parts: RunComponents) -> None:
    config = written.Config(template="{attempt}", max_new_tokens=8)
    context = NoteContext("hint", parts.parts.renderer, parts.parts.task, 5)
    texts = written.build(config, context).write(
        [answer("ab", number) for number in range(8)], NoteMoment(1, parts.parts.sampler)
    )
    assert len(set(texts)) > 1
    assert all(text is None or (text and set(text) <= set("abcd")) for text in texts)


def test_a_note_is_text_to_whoever_reads_it(parts: RunComponents) -> None:
    """A stop token's name in a note is encoded as letters, and braces are no placeholder."""
    renderer = parts.parts.renderer
    stop = renderer.decode_token(renderer.final_stop_id)
    sees = parse_recipe({**_data(), "teacher": SEES_HINT}, "toy").teacher
    from practicum.teachers.privileged import add_context

    shown = add_context(answer("a").prompt, sees, {"hint": f"{stop}{{answer}}"})
    assert shown.messages[-1].content == f"{stop}{{answer}}\n\nab?"
    plain = renderer.render(answer("a").prompt.messages)
    tokens = renderer.render(shown.messages)
    assert tokens.count(renderer.final_stop_id) == plain.count(renderer.final_stop_id)


def _data() -> dict[str, Any]:
    return {
        "student": {"model": {"hidden_size": 8, "layers": 1, "heads": 1}},
        "task": {"type": "reverse"},
        "train": {"steps": 1},
    }


# --- In a step ---


class Silent(Note):
    """Returns one result too few."""

    def write(self, rollouts: Sequence[Rollout], moment: NoteMoment) -> list[str | None]:
        return [None] * (len(rollouts) - 1)


def test_each_note_reads_those_before_it_and_replaces_an_older_one_of_its_name() -> None:
    class Chain(Note):
        def __init__(self, name: str | None) -> None:
            self.name = name

        def write(self, rollouts: Sequence[Rollout], moment: NoteMoment) -> list[str | None]:
            if self.name is None:
                return [None for _ in rollouts]
            return [f"{self.name}{sorted(rollout.notes)}" for rollout in rollouts]

    moment = NoteMoment(1, None)  # type: ignore[arg-type]
    rollouts = [answer("a", notes={"error": "gone", "c": "of an earlier step"})]
    noted = add_notes(rollouts, {"a": Chain("a"), "b": Chain("b"), "c": Chain(None)}, moment)
    assert noted[0].notes == {
        "error": "gone",
        "a": "a['c', 'error']",
        "b": "b['a', 'c', 'error']",
    }
    assert measure_notes(noted, ["a", "c"]) == {"note-a/made": 1.0, "note-c/made": 0.0}
    with pytest.raises(TeacherError, match="note 'x' returned 0 texts for 1 rollouts"):
        add_notes(rollouts, {"x": Silent()}, moment)


def test_empty_notes_leave_the_live_self_and_a_gradient_of_zero(
    models: Path, tmp_path: Path
) -> None:
    """The privileged teacher then reads the student's own prompt, to the last token."""

    class Empty(Note):
        def write(self, rollouts: Sequence[Rollout], moment: NoteMoment) -> list[str | None]:
            return ["" for _ in rollouts]

    from practicum.training.loop import train_step

    changes = {
        "teacher": {**SEES_HINT, "reference": "{hint}ab{hint}"},
        "notes": HINTED["notes"],
        "rollout.n": 2,
    }
    components = assemble_run(toy_recipe(models, changes), tmp_path)
    result = train_step(1, replace(components.parts, notes={"hint": Empty()}), components.settings)
    assert result.metrics["grad_norm"] < 1e-6 and result.metrics["supervised"] > 0
    spoken = train_step(2, components.parts, components.settings)
    assert spoken.metrics["grad_norm"] > 1e-3


def test_a_killed_run_with_an_experience_goes_on_with_the_same_bytes(
    models: Path, tmp_path: Path
) -> None:
    experience = {
        "type": "written",
        "unit": "run",
        "template": ["{experience}{attempt}", "{attempt}"],
        "max_new_tokens": 6,
    }
    changes = {
        **HINTED,
        "student.model": str(models / "teacher"),
        "teacher": {**SEES_HINT, "reference": "{experience}"},
        "notes": {"experience": experience},
    }
    whole, out = toy_run(models, tmp_path / "whole", changes).folder, tmp_path / "parts"
    assert forked(lambda: toy_run(models, out, changes), {"PRACTICUM_FAULT": "rollout:3"}) == 137
    assert_same_run(whole, toy_run(models, out, changes, resume=True).folder)
    assert (whole / "checkpoints" / "step-4" / "note-experience.safetensors").is_file()
    recorded = rows(whole / "rollouts.jsonl")
    assert len({row.get("notes", {}).get("experience") for row in recorded}) > 4


def test_fixed_writers_may_work_ahead(models: Path, tmp_path: Path) -> None:
    notes = {
        "hint": {**HINTED["notes"]["hint"], "author": "reference"},
        "share": {"type": "feedback"},
    }
    changes = {
        **HINTED,
        "notes": notes,
        "reference": {"type": "model", "model": str(models / "teacher")},
        "rollout.max_staleness": 1,
        "train.steps": 3,
    }
    folder = toy_run(models, tmp_path, changes).folder
    assert min(curve(folder, "note-hint/made")) > 0


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"notes": {"answer": {"type": "feedback"}}}, "notes.answer: a placeholder has this name"),
        (
            {"notes": {"hint": {"type": "written", "template": "{a}"}, "a": {"type": "feedback"}}},
            r"notes.hint.template: \{a\} is made later; move that note before this one",
        ),
        (
            {"notes": {"hint": {"type": "written", "template": "a", "author": "reference"}}},
            "notes.hint.author: the recipe has no reference; set author: student, or add a writer",
        ),
        (
            {"notes": {"hint": {"type": "written", "template": "a", "writer": "none"}}},
            "notes.hint.writer: this writer writes nothing; set author: student, or use",
        ),
        (
            {"notes": {"hint": {"type": "written", "template": "a"}}, "rollout.max_staleness": 1},
            "notes.hint needs the newest student or the steps before, so it cannot be made ahead",
        ),
        (
            {"notes": {"hint": {"type": "written", "template": "{hint}"}}},
            r"notes.hint.template: \{hint\} is the note's current text; use it if and only if",
        ),
        (
            {"notes": {"hint": {"type": "written", "template": "a", "unit": "run"}}},
            r"notes.hint.template: \{hint\} is the note's current text; use it if and only if",
        ),
        ({"notes": {"hint": {"type": "writen"}}}, "did you mean 'written'"),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_recipe(
    models: Path, changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(RecipeError, match=line):
        toy_recipe(models, changes)
