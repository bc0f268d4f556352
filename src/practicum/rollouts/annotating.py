"""Make the recipe's notes of a step's rollouts, one after the other, and count those that lack one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from practicum.errors import TeacherError
from practicum.ports import SamplingClient, Task
from practicum.ports.notes import Note, NoteMoment, name_note_role
from practicum.rollouts.batch import RolloutKey
from practicum.rollouts.sampling import RolloutSampler
from practicum.types import Metrics, Rollout

NOTE_KINDS = "practicum.rollouts._notes"
"""The package with the kinds of notes."""


def add_notes(
    rollouts: Sequence[Rollout], notes: Mapping[str, Note], moment: NoteMoment
) -> list[Rollout]:
    """Return the rollouts with the recipe's notes, each of which may read those before it."""
    annotated = list(rollouts)
    for name, note in notes.items():
        texts = note.write(annotated, moment)
        if len(texts) != len(annotated):
            raise TeacherError(
                f"note {name!r} was made of {len(texts)} of {len(annotated)} rollouts; every "
                "rollout needs a text, None where there is nothing to say"
            )
        annotated = [
            set_note(rollout, name, text) for rollout, text in zip(annotated, texts, strict=True)
        ]
    return annotated


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

    def answer(
        self, keys: Sequence[RolloutKey], last: str, marks: Mapping[str, str] | None = None
    ) -> tuple[list[Rollout], list[Rollout]]:
        """Return the answers with rewards and `marks`, and the same with the note `last` as well."""
        answers = [
            replace(
                rollout, reward=self.task.reward(rollout), notes={**rollout.notes, **(marks or {})}
            )
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
