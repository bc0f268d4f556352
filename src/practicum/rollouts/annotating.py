"""Make the recipe's notes of a step's rollouts, one after the other, and count those that lack one."""

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
    """Return the rollouts with the recipe's notes, each of which may read those before it."""
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
                # A note is made of all rollouts at once: what was wrong is counted with the first.
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
            f"{label} was made of {count} of {len(rollouts)} rollouts; every rollout needs a text, "
            "None where there is nothing to say"
        )
    return [None if text is None else accept_text(text, label) for text in texts]


def add_notes_until(
    rollouts: Sequence[Rollout], last: str, notes: Mapping[str, Note], moment: NoteMoment
) -> list[Rollout]:
    """Return the rollouts with the note `last` and those before it, which its template may show."""
    names = list(notes)[: list(notes).index(last) + 1]
    return add_notes(rollouts, {name: notes[name] for name in names}, moment)


@dataclass(frozen=True, slots=True)
class AnswerNoter:
    """Answers of the student with a note, for a source that goes on from both."""

    sampler: RolloutSampler
    student: SamplingClient
    task: Task
    notes: Mapping[str, Note]

    @classmethod
    def of(cls, sampler: RolloutSampler, writers: RolloutWriters) -> "AnswerNoter":
        """Return what answers and notes for a source."""
        assert writers.task is not None
        return cls(sampler, writers.student, writers.task, writers.notes)

    def answer(
        self, keys: Sequence[RolloutKey], last: str, marks: Mapping[str, str] | None = None
    ) -> tuple[list[Rollout], list[Rollout]]:
        """Return the answers with rewards and `marks`, and the same with the note `last` as well."""
        answers = [
            replace(ask_reward(self.task, rollout), notes={**rollout.notes, **(marks or {})})
            for rollout in self.sampler.sample_student(keys, self.student)
        ]
        moment = NoteMoment(self.sampler.batch.step, self.student)
        return answers, add_notes_until(answers, last, self.notes, moment)


def set_note(rollout: Rollout, name: str, text: str | None) -> Rollout:
    """Return the rollout with this note, or with none of this name."""
    # A replayed rollout may bring the note of an earlier step, which is not this step's.
    other_notes = {key: value for key, value in rollout.notes.items() if key != name}
    return replace(rollout, notes=other_notes if text is None else {**other_notes, name: text})


def measure_notes(rollouts: Sequence[Rollout], names: Iterable[str]) -> Metrics:
    """Return for each note the share of rollouts that have it."""
    return {
        f"{name_note_role(name)}/made": sum(name in rollout.notes for rollout in rollouts)
        / len(rollouts)
        for name in names
    }
