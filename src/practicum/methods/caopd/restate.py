"""Replace the confidence that an answer states with the measured one (CaOPD 2604.16830).

The student answers, the task rewards the answers, and the note is made from them. Each answer keeps
the sampled tokens before its statement; the new statement is text that no model sampled.
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
"""The note of a restated rollout with the student's original statement; empty without a statement."""


class Config(SourceConfig):
    """The student answers; a `note` replaces the answer's own statement (CaOPD 2604.16830).

    A statement begins with the note's name, as in `Confidence: 0.9` for a note `confidence`, and
    extends to the end of the answer. The answer then ends with a line of the same form that contains
    the note. The line is also added to answers without a statement.
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
        """Return the share of restated answers with an original statement; empty without such answers."""
        statements = [rollout.notes[NOTE] for rollout in rollouts if NOTE in rollout.notes]
        if not statements:
            return {}
        return {"restated": sum(map(bool, statements)) / len(statements)}


@dataclass(frozen=True, slots=True)
class Restater:
    """Samples and annotates answers with `noter`, and replaces the statements in them."""

    source: Config
    noter: AnswerNoter

    def collect(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return one rollout for each key; a failed rollout or one without the note is unchanged."""
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
        """Replace the statement of an answer with a statement of the note."""
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
        # The new tokens were not sampled, so their probabilities are unknown, as in a dataset.
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
    """Split a text before the label into the answer and the statement.

    The label is case-insensitive. Without a label the statement is empty.
    """
    match = re.search(re.escape(label), text, re.IGNORECASE)
    start = len(text) if match is None else match.start()
    return text[:start].rstrip(), text[start:].strip()


def write_ending(
    renderer: Renderer, sampled: Sequence[int], before: str, ending: str, limit: int
) -> tuple[list[int], int]:
    """Return the tokens of `before` and `ending` with a stop token, and the number of sampled tokens.

    `before` is a prefix of the text of the `sampled` tokens; sampled tokens within `before` are
    kept. `before` is truncated if the answer would have more than `limit` tokens. Raises DataError
    if `ending` has more than `limit` tokens.
    """
    room = limit - len(renderer.encode_answer_text(ending)) - 1
    if room < 0:
        raise DataError(
            f"rollout.max_new_tokens: {limit} tokens have no room for {ending.strip()!r}, which "
            "rollout.source restate writes; set a larger number"
        )
    while True:
        text = before
        if room < len(sampled):
            # Drop a character of several tokens that the cut splits.
            cut = renderer.decode(sampled[:room]).rstrip("\ufffd").rstrip()
            text = min(before, cut, key=len)
        num_kept = _count_within(renderer, sampled, text)
        remainder = text[len(renderer.decode(sampled[:num_kept])) :] + ending
        tokens = [*sampled[:num_kept], *renderer.encode_answer_text(remainder)]
        if renderer.decode(tokens) != text + ending:
            # Some tokenizers encode a text differently at the beginning than after other tokens.
            num_kept, tokens = 0, renderer.encode_answer_text(text + ending)
            if not renderer.decode(tokens).endswith(ending):
                raise DataError(
                    f"rollout.source: restate writes {ending!r}, which the student's tokenizer "
                    "cannot write; rename the note, or use another source"
                )
        if len(tokens) < limit:
            return [*tokens, renderer.final_stop_id], num_kept
        room -= 1


def _count_within(renderer: Renderer, tokens: Sequence[int], text: str) -> int:
    """Return the largest number of leading tokens that decode to a prefix of the text."""
    end = len(tokens)
    while end and renderer.is_control(tokens[end - 1]):
        end -= 1
    count = bisect_right(
        range(end + 1), len(text), key=lambda count: len(renderer.decode(tokens[:count]))
    )
    # A character that spans several tokens decodes correctly only after its last token.
    while count and not text.startswith(renderer.decode(tokens[:count])):
        count -= 1
    return min(count, end)
