"""Make the recipe's notes about a step's rollouts in order, and measure how many rollouts have them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from practicum.errors import TeacherError
from practicum.ports import SamplingClient, Task
from practicum.ports.gate import (
    accept_text,
    ask_reward,
    call_foreign,
    collect_rejections,
    list_kinds,
    report_rejections,
)
from practicum.ports.notes import Note, NoteMoment, name_note_role
from practicum.rollouts.batch import RolloutKey
from practicum.rollouts.sampling import RolloutSampler
from practicum.rollouts.source import RolloutWriters
from practicum.types import Metrics, Rollout

NOTE_KINDS = "practicum.notes"
"""The package with the kinds of notes."""


def add_notes(
    rollouts: Sequence[Rollout], notes: Mapping[str, Note], moment: NoteMoment
) -> list[Rollout]:
    """Return the rollouts with the recipe's notes; each note may read the earlier notes."""
    annotated = list(rollouts)
    with report_rejections():
        for name, note in notes.items():
            with collect_rejections() as rejections:
                texts = _write_note(name, note, annotated, moment)
            annotated = [
                set_note(rollout, name, text)
                for rollout, text in zip(annotated, texts, strict=True)
            ]
            if rejections:
                # A note is made from all rollouts at once, so count problems at the first rollout.
                kinds = (*annotated[0].rejected, *list_kinds(rejections))
                annotated[0] = replace(annotated[0], rejected=kinds)
    return annotated


def _write_note(
    name: str, note: Note, rollouts: Sequence[Rollout], moment: NoteMoment
) -> list[str | None]:
    """Return a note's texts, with None for a value that is not text."""
    label = f"note {name!r}"
    texts = call_foreign(label, partial(note.write, rollouts, moment))
    if texts is None:
        return [None] * len(rollouts)
    if not isinstance(texts, Sequence) or len(texts) != len(rollouts):
        count = len(texts) if isinstance(texts, Sequence) else f"a {type(texts).__name__}"
        raise TeacherError(
            f"{label} returned {count} texts for {len(rollouts)} rollouts; return one per rollout, "
            "None for a rollout without a text"
        )
    return [None if text is None else accept_text(text, label) for text in texts]


def add_notes_until(
    rollouts: Sequence[Rollout], last: str, notes: Mapping[str, Note], moment: NoteMoment
) -> list[Rollout]:
    """Return the rollouts with the note `last` and all notes before it, which it may read."""
    names = list(notes)[: list(notes).index(last) + 1]
    return add_notes(rollouts, {name: notes[name] for name in names}, moment)


@dataclass(frozen=True, slots=True)
class AnswerNoter:
    """Samples and annotates answers of the student, for a source that continues from both."""

    sampler: RolloutSampler
    student: SamplingClient
    task: Task
    notes: Mapping[str, Note]

    @classmethod
    def of(cls, sampler: RolloutSampler, writers: RolloutWriters) -> "AnswerNoter":
        """Build the noter from a source's sampler and writers."""
        assert writers.task is not None
        return cls(sampler, writers.student, writers.task, writers.notes)

    def answer(
        self, keys: Sequence[RolloutKey], last: str, marks: Mapping[str, str] | None = None
    ) -> tuple[list[Rollout], list[Rollout]]:
        """Return the rewarded answers with the notes `marks`, and the same answers with note `last`."""
        answers = [
            replace(ask_reward(self.task, rollout), notes={**rollout.notes, **(marks or {})})
            for rollout in self.sampler.sample_student(keys, self.student)
        ]
        moment = NoteMoment(self.sampler.batch.step, self.student)
        return answers, add_notes_until(answers, last, self.notes, moment)


def set_note(rollout: Rollout, name: str, text: str | None) -> Rollout:
    """Return the rollout with this note; without a text, remove the note."""
    # A replayed rollout may carry an outdated note from an earlier step.
    other_notes = {key: value for key, value in rollout.notes.items() if key != name}
    return replace(rollout, notes=other_notes if text is None else {**other_notes, name: text})


def measure_notes(rollouts: Sequence[Rollout], names: Iterable[str]) -> Metrics:
    """Return the share of rollouts that have each note."""
    return {
        f"{name_note_role(name)}/made": sum(name in rollout.notes for rollout in rollouts)
        / len(rollouts)
        for name in names
    }
