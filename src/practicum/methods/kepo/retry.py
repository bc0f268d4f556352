"""Let the student answer again with a note in its prompt (KEPO 2602.00400, SD-Zero 2604.12002).

The student answers, the task rewards the answers, and the note is made from the selected answers.
The student then answers again, with the note before the question or at the beginning of the answer.
An answer depends on (seed, step, prompt, number) and on the text of the note.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from practicum.ports.gate import ask_reward
from practicum.rollouts.annotating import AnswerNoter, set_note
from practicum.rollouts.answer_tokens import Tokens
from practicum.rollouts.batch import RolloutKey
from practicum.rollouts.fields import classify_outcome, show_text
from practicum.rollouts.sampling import compute_key_seeds
from practicum.rollouts.source import Form, SourceConfig, SourceParts
from practicum.statistics import group_pairs
from practicum.types import Metrics, Prompt, Rollout, SampleRequest

NOTE = "retried"
"""The note that records whether a rollout is a second answer: `yes`, `no`, or `failed`."""


class Config(SourceConfig):
    """The student answers again with a `note` in its prompt, and learns without it (KEPO 2602.00400).

    `filter` selects the answers: all answers to prompts without a correct answer, all wrong answers,
    or all answers. A second answer replaces the first if it is correct, with `filter=all` always.
    With `prompt=with_note` the student is trained with the note in its prompt. With `place=answer`
    the note is not placed before the question but begins the answer, like text from an environment
    (SD-Zero 2604.12002).
    """

    type: Literal["retry"] = "retry"
    form: ClassVar[Form] = "answers"
    note: str
    filter: Literal["failed_group", "incorrect", "all"] = "failed_group"
    prompt: Literal["without_note", "with_note"] = "without_note"
    place: Literal["question", "answer"] = "question"

    @property
    def begins_answers(self) -> bool:
        """True if the note is a part of the answers that the student is trained on."""
        return self.place == "answer" and self.prompt == "with_note"

    @property
    def note_made(self) -> str:
        """Return the note."""
        return self.note

    @property
    def note_shown(self) -> str:
        """Return the note."""
        return self.note

    @property
    def environment_writes(self) -> bool:
        """Return True if the note is a part of the answers."""
        return self.begins_answers

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Return the student's answers, with selected answers replaced by second answers."""
        return Retrier(self, AnswerNoter.of(parts.sampler, parts.writers)).collect(keys)

    @classmethod
    def measure(cls, rollouts: Sequence[Rollout]) -> Metrics:
        """Return the share of repeated answers and the share of failed repetitions.

        Empty if no source repeats answers.
        """
        marks = [rollout.notes[NOTE] for rollout in rollouts if NOTE in rollout.notes]
        if not marks:
            return {}
        return {
            "retried": (len(marks) - marks.count("no")) / len(marks),
            "retry_failed": marks.count("failed") / len(marks),
        }


@dataclass(frozen=True, slots=True)
class Retrier:
    """Samples and annotates answers with `noter`, and repeats selected answers with the note."""

    source: Config
    noter: AnswerNoter

    def collect(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return one rollout for each key: the second answer if it replaces the first answer."""
        rollouts, noted = self.noter.answer(keys, self.source.note, {NOTE: "no"})
        again = [row for row in self._select_rows(rollouts) if self.source.note in noted[row].notes]
        seconds = self._answer_again([keys[row] for row in again], [noted[row] for row in again])
        for row, second in zip(again, seconds, strict=True):
            takes_place = self.source.filter == "all" or classify_outcome(second) == "correct"
            rollouts[row] = second if takes_place else set_note(rollouts[row], NOTE, "failed")
        return rollouts

    def _select_rows(self, rollouts: Sequence[Rollout]) -> list[int]:
        """Return the rows of the answers to repeat."""
        outcomes = [classify_outcome(rollout) for rollout in rollouts]
        groups = group_pairs(
            (rollout.prompt.id, outcome)
            for rollout, outcome in zip(rollouts, outcomes, strict=True)
        )
        failed = {name for name, group in groups.items() if set(group) == {"incorrect"}}
        rows = enumerate(zip(rollouts, outcomes, strict=True))
        if self.source.filter == "failed_group":
            return [row for row, (rollout, _) in rows if rollout.prompt.id in failed]
        return [
            row
            for row, (_, outcome) in rows
            if self.source.filter == "all" or outcome == "incorrect"
        ]

    def _answer_again(
        self, keys: Sequence[RolloutKey], rollouts: Sequence[Rollout]
    ) -> list[Rollout]:
        """Sample and reward the student's answers with the note in the prompt."""
        if not keys:
            return []
        sampler = self.noter.sampler
        prompts = [self._show_note(rollout) for rollout in rollouts]
        contexts = sampler.renderer.render_all([prompt.messages for prompt in prompts])
        seeds = compute_key_seeds(sampler.batch, "retry", keys)
        requests = [SampleRequest(*pair) for pair in zip(contexts, seeds, strict=True)]
        samples = self.noter.student.sample(requests, sampler.params)
        learns_with = self.source.prompt == "with_note"
        if not learns_with:
            # The policy without the note never scored these tokens.
            samples = [
                replace(sample, policy_logprobs=torch.full_like(sample.policy_logprobs, torch.nan))
                for sample in samples
            ]
        keeps_prompt = not learns_with or self.source.begins_answers
        # A student trained without the note learns the answer from the question only.
        tokens = sampler.render_prompts(keys) if keeps_prompt else contexts
        answers = sampler.build_rollouts(keys, tokens, samples, "student")
        again = []
        for answer, prompt, first, context in zip(
            answers, prompts, rollouts, contexts, strict=True
        ):
            second = replace(
                ask_reward(self.noter.task, answer),
                notes={**first.notes, NOTE: "yes"},
                prompt=answer.prompt if keeps_prompt else prompt,
            )
            if self.source.begins_answers:
                second = _begin_with(context[len(answer.prompt_tokens) :], second)
            again.append(second)
        return again

    def _show_note(self, rollout: Rollout) -> Prompt:
        """Return the prompt of a rollout with its note."""
        prompt, note = rollout.prompt, rollout.notes[self.source.note]
        return replace(prompt, messages=show_text(prompt.messages, note, self.source.place))


def _begin_with(beginning: Sequence[int], answer: Rollout) -> Rollout:
    """Prepend tokens of an environment to the answer; the text of the answer is unchanged."""
    start = Tokens.from_text(beginning, "environment", answer.policy_version, in_loss=False)
    return (start + Tokens.from_rollout(answer)).put_into(answer, answer.source)
