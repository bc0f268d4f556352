"""Split the student's conversations into turns, each a separate answer (OpenClaw-RL 2603.10165).

A turn keeps its sampled tokens, and its prompt consists of the exact tokens of the conversation
before it. Its reward is the task's reward of the conversation up to the turn. Objectives that compare
the answers to a prompt compare turns at the same position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from practicum.ports import SamplingClient, Task
from practicum.ports.gate import ask_reward
from practicum.rollouts.answer_tokens import Tokens
from practicum.rollouts.batch import RolloutKey
from practicum.rollouts.sampling import RolloutSampler
from practicum.rollouts.source import Form, SourceConfig, SourceParts
from practicum.text.stored import add_tokens
from practicum.types import FAILURES, Rollout, Turn

NEXT_STATE = "next_state"
"""The note with the reply to a turn; for the last turn, the environment writes this note."""


class Config(SourceConfig):
    """The student converses, and each turn is a separate answer (OpenClaw-RL 2603.10165).

    The prompt of a turn is the conversation before it, and its note `next_state` is the reply. A turn
    without a reply has no loss.
    """

    type: Literal["turns"] = "turns"
    form: ClassVar[Form] = "conversations"

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Return the turns of the student's conversations."""
        task = parts.writers.task
        assert task is not None
        return TurnSplitter(parts.sampler, parts.writers.student, task).collect(keys)


@dataclass(frozen=True, slots=True)
class TurnSplitter:
    """Samples conversations of the student and splits them into turns, rewarded by `task`."""

    sampler: RolloutSampler
    student: SamplingClient
    task: Task

    def collect(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return one rollout for each student turn, conversation by conversation."""
        return [
            turn
            for conversation in self.sampler.sample_student(keys, self.student)
            for turn in self._split(conversation)
        ]

    def _split(self, conversation: Rollout) -> Iterator[Rollout]:
        """Yield the student's turns of a conversation in order."""
        start = number = 0
        for place, turn in enumerate(conversation.turns):
            if turn.role == "assistant":
                number += 1
                yield self._cut(conversation, place, start, number)
            start += turn.tokens

    def _cut(self, conversation: Rollout, place: int, start: int, number: int) -> Rollout:
        """Return the turn at a place, which begins at token `start`, as a rollout."""
        turns, prompt = conversation.turns, conversation.prompt
        turn = turns[place]
        is_last = all(later.role != "assistant" for later in turns[place + 1 :])
        notes = conversation.notes if is_last else {}
        if replies := _list_replies(turns[place + 1 :]):
            notes = {**notes, NEXT_STATE: "\n".join(replies)}
        stop_reason = conversation.stop_reason if is_last else "stop"
        is_learned = NEXT_STATE in notes and stop_reason not in FAILURES
        rewarded = ask_reward(self.task, _end_after(conversation, place))
        part = Tokens.from_rollout(conversation).cut(start, start + turn.tokens)
        return replace(
            part.where(is_learned).put_into(conversation, conversation.source),
            prompt=replace(
                prompt,
                id=f"{prompt.id}-turn-{number}",
                messages=add_tokens(
                    prompt.messages,
                    conversation.prompt_tokens,
                    turns[:place],
                    conversation.tokens.tolist(),
                ),
            ),
            prompt_tokens=(*conversation.prompt_tokens, *conversation.tokens[:start].tolist()),
            stop_reason=stop_reason,
            text=turn.text,
            reward=rewarded.reward,
            rejected=rewarded.rejected,
            turns=(),
            notes=notes,
        )


def _list_replies(later: Sequence[Turn]) -> list[str]:
    """Return the texts of other speakers up to the student's next turn."""
    texts = []
    for turn in later:
        if turn.role == "assistant":
            break
        texts.append(turn.text)
    return texts


def _end_after(conversation: Rollout, place: int) -> Rollout:
    """Return the conversation up to the student's turn at a place."""
    turns = conversation.turns[: place + 1]
    end = sum(turn.tokens for turn in turns)
    text = "\n".join(turn.text.replace("\n", " ") for turn in turns if turn.role == "assistant")
    part = Tokens.from_rollout(conversation).cut(0, end)
    return replace(part.put_into(conversation, conversation.source), turns=turns, text=text)
