"""Answers whose own statement about themselves makes room for what is known (CaOPD 2604.16830).

The student answers, the task rewards, and the note is made of the answers. Each answer keeps the
tokens before its statement as they were sampled; the new statement is text that nobody sampled.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from practicum.errors import DataError
from practicum.rollouts.annotating import AnswerNoter
from practicum.rollouts.answer_tokens import Tokens
from practicum.rollouts.batch import RolloutKey
from practicum.rollouts.source import Form, SourceConfig, SourceParts
from practicum.text import Renderer
from practicum.types import FAILURES, Metrics, Rollout

NOTE = "restated"
"""The note of a restated rollout with the student's own statement, empty where it stated nothing."""


class Config(SourceConfig):
    """The student answers, and a `note` takes the place of what it states itself (CaOPD 2604.16830).

    Its statement begins with the note's name, as in `Confidence: 0.9` for a note `confidence`, and
    goes on to the answer's end. The answer then ends with a line of the same form that has the note,
    also where nothing was stated.
    """

    type: Literal["restate"] = "restate"
    form: ClassVar[Form] = "answers"
    note: str

    @property
    def note_made(self) -> str:
        """Return the note."""
        return self.note

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Return the student's answers, each ending with the note."""
        return Restater(self, AnswerNoter.of(parts.sampler, parts.writers)).collect(keys)

    @classmethod
    def measure(cls, rollouts: Sequence[Rollout]) -> Metrics:
        """Return the share of restated answers that had a statement of their own."""
        return measure_restated(rollouts)


@dataclass(frozen=True, slots=True)
class Restater:
    """A source that restates: its settings, and who answers and notes."""

    source: Config
    noter: AnswerNoter

    def collect(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return one rollout for each key; one that failed, or lacks the note, stays as it is."""
        rollouts, noted = self.noter.answer(keys, self.source.note)
        return [
            rollout
            if text is None or rollout.stop_reason in FAILURES
            else self._restate(rollout, text)
            for rollout, text in zip(rollouts, self._read_notes(noted), strict=True)
        ]

    def _read_notes(self, rollouts: Sequence[Rollout]) -> list[str | None]:
        return [rollout.notes.get(self.source.note) for rollout in rollouts]

    def _restate(self, rollout: Rollout, note: str) -> Rollout:
        """Return the answer up to its own statement, then the statement with the note."""
        name = self.source.note
        label = f"{name[:1].upper()}{name[1:]}:"
        before, statement = split_statement(rollout.text, label)
        tokens, num_kept = write_ending(
            self.noter.sampler.renderer,
            rollout.tokens.tolist(),
            before,
            f"\n{label} {note}",
            self.noter.sampler.params.max_new_tokens,
        )
        # They were not sampled, so their probabilities are unknown, as for the dataset's tokens.
        ending = Tokens.from_text(
            tokens[num_kept:], "dataset", rollout.policy_version, in_loss=True
        )
        answer = Tokens.from_rollout(rollout).cut(0, num_kept) + ending
        return replace(
            answer.put_into(rollout, rollout.source),
            stop_reason="stop",
            text=self.noter.sampler.renderer.decode(tokens),
            notes={name: note, NOTE: statement},
        )


def split_statement(text: str, label: str) -> tuple[str, str]:
    """Return the text before a statement that begins with the label, and the statement to the end.

    Both cases of letters are read; without a statement it is empty.
    """
    match = re.search(re.escape(label), text, re.IGNORECASE)
    start = len(text) if match is None else match.start()
    return text[:start].rstrip(), text[start:].strip()


def write_ending(
    renderer: Renderer, sampled: Sequence[int], before: str, ending: str, limit: int
) -> tuple[list[int], int]:
    """Return the tokens of `before` and `ending` with a stop token, and how many were sampled.

    `before` is a beginning of the text of the `sampled` tokens, and all of them that lie within it
    stay. It is cut where the answer would have more than `limit` tokens. Raises DataError if the
    ending alone has more.
    """
    room = limit - len(renderer.encode_answer_text(ending)) - 1
    if room < 0:
        raise DataError(
            f"rollout.max_new_tokens: {limit} tokens have no room for {ending.strip()!r}, which "
            "rollout.source restate writes; write a larger number"
        )
    while True:
        text = before
        if room < len(sampled):
            # A character that the cut goes through goes as a whole.
            cut = renderer.decode(sampled[:room]).rstrip("\ufffd").rstrip()
            text = min(before, cut, key=len)
        num_kept = _count_within(renderer, sampled, text)
        remainder = text[len(renderer.decode(sampled[:num_kept])) :] + ending
        tokens = [*sampled[:num_kept], *renderer.encode_answer_text(remainder)]
        if renderer.decode(tokens) != text + ending:
            # Some tokenizers write a text otherwise at its beginning than after other tokens.
            num_kept, tokens = 0, renderer.encode_answer_text(text + ending)
            if not renderer.decode(tokens).endswith(ending):
                raise DataError(
                    f"rollout.source: restate writes {ending!r}, which the student's tokenizer "
                    "cannot write; give the note another name, or take another source"
                )
        if len(tokens) < limit:
            return [*tokens, renderer.final_stop_id], num_kept
        room -= 1


def _count_within(renderer: Renderer, tokens: Sequence[int], text: str) -> int:
    """Return how many of the tokens, from the first on, write a beginning of the text."""
    end = len(tokens)
    while end and renderer.is_control(tokens[end - 1]):
        end -= 1
    count = bisect_right(
        range(end + 1), len(text), key=lambda count: len(renderer.decode(tokens[:count]))
    )
    # A character of several tokens has no text before its last one.
    while count and not text.startswith(renderer.decode(tokens[:count])):
        count -= 1
    return min(count, end)


def measure_restated(rollouts: Sequence[Rollout]) -> Metrics:
    """Return the share of restated answers that had a statement of their own; empty without any."""
    statements = [rollout.notes[NOTE] for rollout in rollouts if NOTE in rollout.notes]
    if not statements:
        return {}
    return {"restated": sum(map(bool, statements)) / len(statements)}
