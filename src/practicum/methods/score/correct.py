"""Conversations in which a teacher rewrites the student's first wrong turn (SCoRe 2509.14257).

The student acts to the end. A judge that reads the conversation, or the task's expert, finds the
first wrong turn. The teacher writes this turn instead, and the student continues from there, in an
episode that is replayed up to the corrected turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from practicum.core.randomness import seed_of
from practicum.errors import CapabilityError
from practicum.methods.score.rows import CORRECTED, REJECTED, REPLIED, build_step_row
from practicum.ports import (
    OpensEpisodes,
    PromptedClient,
    SamplingClient,
    Task,
    Teacher,
)
from practicum.ports.gate import ask_expert, ask_reward
from practicum.ports.scoring import Scorer
from practicum.rollouts import RolloutRow
from practicum.rollouts.answer_tokens import Tokens
from practicum.rollouts.batch import RolloutKey, sample_to_lengths
from practicum.rollouts.conversation import choose_power, run_conversations
from practicum.rollouts.openings import Beginning, ConversationRequest
from practicum.rollouts.sampling import RolloutSampler, compute_key_seed
from practicum.rollouts.source import Form, OtherWriter, SourceConfig, SourceParts
from practicum.statistics.turn_statistics import reward_step
from practicum.types import AUTHORS, Metrics, Prompt, Rollout, Sample, SampleRequest, Turn


class Config(SourceConfig):
    """`writer` rewrites the student's first wrong turn; the student continues (SCoRe 2509.14257).

    The recipe's `scorer`, a judge with `step: turn`, reads the conversation and rejects a turn.
    Without a scorer the task's expert decides: a turn is wrong if it is less than `below` times as
    likely as the expert's most likely turn. With `start: verified` the student acts again after the
    last correct turn, `rollout.n` times, and only these new tokens have a loss: the reward is 1 if
    the student solves the task, otherwise 0.5 for the corrected turn, 0 for the wrong turn, and 0.1
    for any other turn.
    """

    type: Literal["correct"] = "correct"
    form: ClassVar[Form] = "conversations"
    instead: ClassVar[str] = "replace(...)"
    guide_rejects: ClassVar[bool] = True
    guide_example: ClassVar[str] = "judge, min_grade: 5, teacher: ..."
    writer: Literal["teacher", "reference"] = "teacher"
    scorer: str | None = None
    below: float = Field(default=0.5, gt=0, le=1)
    start: Literal["corrected", "verified"] = "corrected"

    @property
    def other_writers(self) -> tuple[OtherWriter, ...]:
        """Return the model that writes the turns."""
        return (self.writer,)

    @property
    def guide(self) -> str | None:
        """Return the scorer."""
        return self.scorer

    def count_teacher_answers(self, n: int) -> float:
        """Return the conversations in which the teacher may write a turn."""
        return n if self.writer == "teacher" else 0

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Return the student's conversations, each with its first wrong turn rewritten."""
        writers = parts.writers
        assert writers.task is not None
        assert writers.environment is not None, "the recipe check refuses tasks with single answers"
        scorer = None if self.scorer is None else writers.scorers[self.scorer]
        if scorer is not None and not scorer.rejects:
            raise CapabilityError(
                f"rollout.source: correct(scorer={self.scorer}): this scorer rejects no turns; "
                "use a scorer that rejects, such as {type: judge, step: turn, min_grade: 5, ...}"
            )
        if scorer is None and not writers.task.has_expert:
            raise CapabilityError(
                "rollout.source: correct without a scorer asks the task's expert, and this task "
                "has no expert; set correct(scorer=NAME) with a judge"
            )
        model = writers.teacher if self.writer == "teacher" else writers.reference
        assert model is not None, "a recipe without this writer is refused when it is read"
        corrector = TurnCorrector(
            self, parts.sampler, writers.environment, writers.task, writers.student, model, scorer
        )
        return corrector.collect(keys)

    @property
    def converts_rows(self) -> bool:
        """Return True if the rows are made of the student's wrong turns."""
        return self.start == "corrected"

    def convert_row(self, prompt: Prompt, row: RolloutRow) -> Mapping[str, Any] | None:
        """Return a row in the format of easydistill's SCoRe; None if the turn is unfinished."""
        if row.notes.get(CORRECTED) == "refused":
            return None
        return build_step_row(prompt, row)

    @classmethod
    def measure(cls, rollouts: Sequence[Rollout]) -> Metrics:
        """Return the share of corrected conversations, the mean corrected turn, and refusals.

        Empty if no source corrects turns.
        """
        noted = [rollout.notes[CORRECTED] for rollout in rollouts if CORRECTED in rollout.notes]
        if not noted:
            return {}
        numbers = [int(note) for note in noted if note.isdigit()]
        metrics = {
            "corrected": len(numbers) / len(noted),
            "corrected_refused": noted.count("refused") / len(noted),
        }
        return metrics | ({"corrected_turn": sum(numbers) / len(numbers)} if numbers else {})


@dataclass(frozen=True, slots=True)
class WrongTurn:
    """A wrong turn of a rollout: its place in `rollout.turns`, and the tokens before it."""

    row: int
    place: int
    start: int


@dataclass(frozen=True, slots=True)
class TurnCorrector:
    """Finds the student's wrong turns with a scorer or the task's expert, and has them rewritten."""

    source: Config
    sampler: RolloutSampler
    environment: OpensEpisodes
    task: Task
    student: SamplingClient
    writer: Teacher
    scorer: Scorer | None = None

    def collect(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return one conversation for each key, corrected if it has a wrong turn."""
        if self.source.start == "verified":
            return self._collect_again(keys)
        rollouts = self.sampler.sample_student(keys, self.student)
        wrong = self._find_wrong_turns(rollouts)
        rollouts = [
            replace(rollout, notes={**rollout.notes, CORRECTED: "none"}) for rollout in rollouts
        ]
        turns = self._write_turns(keys, rollouts, wrong)
        corrections = [
            (turn, sample)
            for turn, sample in zip(wrong, turns, strict=True)
            if sample.stop_reason == "stop"
        ]
        for turn in wrong:
            rollout = rollouts[turn.row]
            rollouts[turn.row] = replace(rollout, notes={**rollout.notes, CORRECTED: "refused"})
        for (turn, _), rollout in zip(
            corrections, self._continue_answers(keys, rollouts, corrections), strict=True
        ):
            rollouts[turn.row] = rollout
        return rollouts

    def _collect_again(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Restart conversations after the correct turns of the first conversation about their prompt.

        If that conversation has no wrong turn, or the correction failed, the prompt gets complete
        conversations instead.
        """
        firsts = {key.prompt.id: key for key in reversed(keys)}
        first_keys = list(firsts.values())
        tries = self.sampler.sample_student(first_keys, self.student)
        wrong = self._find_wrong_turns(tries)
        new_turns = self._write_turns(first_keys, tries, wrong)
        starts = {
            first_keys[turn.row].prompt.id: _Restart(
                tries[turn.row], first_keys[turn.row], turn, sample
            )
            for turn, sample in zip(wrong, new_turns, strict=True)
            if sample.stop_reason == "stop"
        }
        other_keys = [key for key in keys if key.prompt.id not in starts]
        rollouts = {
            _name(key): replace(rollout, notes={**rollout.notes, CORRECTED: "none"})
            for key, rollout in zip(
                other_keys, self.sampler.sample_student(other_keys, self.student), strict=True
            )
        }
        again = [key for key in keys if key.prompt.id in starts]
        rollouts |= self._act_again(again, starts)
        return [rollouts[_name(key)] for key in keys]

    def _act_again(
        self, keys: Sequence[RolloutKey], starts: "Mapping[str, _Restart]"
    ) -> dict[tuple[str, int], Rollout]:
        """Let the student act again after the correct turns, which have no loss, and add rewards."""
        requests = [
            self._build_request(
                key, starts[key.prompt.id], self._begin_right(starts[key.prompt.id])
            )
            for key in keys
        ]
        conversations = run_conversations(
            requests, self.environment, self.sampler.renderer, self.sampler.params
        )
        rollouts = {}
        for key, conversation in zip(keys, conversations, strict=True):
            start = starts[key.prompt.id]
            (rollout,) = self.sampler.build_rollouts(
                [key], [start.rollout.prompt_tokens], [conversation.sample], "student"
            )
            rollout = conversation.complete(rollout)
            mask = rollout.loss_mask.clone()
            mask[: start.turn.start] = False
            notes = {**rollout.notes, **start.notes}
            rewarded = self._add_reward(rollout, start)
            rollouts[_name(key)] = replace(rewarded, loss_mask=mask, notes=notes)
        return rollouts

    def _add_reward(self, rollout: Rollout, start: "_Restart") -> Rollout:
        """Reward a solved task with 1, otherwise reward the first new turn (SCoRe 2509.14257)."""
        rewarded = ask_reward(self.task, rollout)
        if rewarded.reward is None or rewarded.reward >= 1:
            return rewarded
        new_text = (
            rollout.turns[start.turn.place].text if len(rollout.turns) > start.turn.place else ""
        )
        corrected = self.sampler.renderer.decode(start.correction.tokens.tolist())
        return replace(rewarded, reward=reward_step(new_text, corrected, start.rejected))

    def _build_request(
        self, key: RolloutKey, start: "_Restart", beginning: Beginning | None
    ) -> ConversationRequest:
        """Return the request of a student conversation in the replayed episode of the first one."""
        first = compute_key_seed(self.sampler.batch, self.sampler.batch.stream, start.key)
        return ConversationRequest(
            key.prompt,
            PromptedClient(self.student, start.rollout.prompt_tokens),
            compute_key_seed(self.sampler.batch, "corrected", key),
            beginning=beginning,
            episode_seed=seed_of(first, "episode"),
        )

    def _begin_right(self, start: "_Restart") -> Beginning | None:
        """Return the conversation up to its wrong turn; None if the first turn is wrong."""
        if not start.turn.start:
            return None
        return _cut(start.rollout, start.turn)

    def _find_wrong_turns(self, rollouts: Sequence[Rollout]) -> list[WrongTurn]:
        """Return the first wrong turn of each rollout that has one."""
        if self.scorer is None:
            places = [self._ask_expert(rollout) for rollout in rollouts]
        else:
            cuts = self.scorer.count_accepted(rollouts)
            places = [
                None if cut is None else find_turn(rollout.turns, cut)
                for rollout, cut in zip(rollouts, cuts, strict=True)
            ]
        return [
            WrongTurn(row, place, sum(turn.tokens for turn in rollout.turns[:place]))
            for row, (rollout, place) in enumerate(zip(rollouts, places, strict=True))
            if place is not None
        ]

    def _ask_expert(self, rollout: Rollout) -> int | None:
        """Return the place of the first turn that is wrong by the task's expert."""
        replies: list[str] = []
        for place, turn in enumerate(rollout.turns):
            if turn.role != "assistant":
                continue
            # The environment never answered a turn that the token limit truncated.
            if place == len(rollout.turns) - 1 and rollout.stop_reason == "length":
                return None
            choices = ask_expert(self.task, rollout.prompt, replies)
            if choices.get(turn.text, 0.0) < self.source.below * max(choices.values()):
                return place
            replies.append(turn.text)
        return None

    def _write_turns(
        self, keys: Sequence[RolloutKey], rollouts: Sequence[Rollout], wrong: Sequence[WrongTurn]
    ) -> list[Sample]:
        """Sample the writer's replacement for each wrong turn; a truncated one is no correction."""
        bound = [self._bind(keys[turn.row]) for turn in wrong]
        rooms = [choose_power(self.sampler.params.max_new_tokens - turn.start) for turn in wrong]
        requests = [
            SampleRequest(
                (*prompted.prompt_tokens, *rollouts[turn.row].tokens[: turn.start].tolist()),
                compute_key_seed(self.sampler.batch, "correct", keys[turn.row]),
            )
            for prompted, turn in zip(bound, wrong, strict=True)
        ]
        clients = [prompted.client for prompted in bound]
        return sample_to_lengths(clients, requests, rooms, self.sampler.params)

    def _bind(self, key: RolloutKey) -> PromptedClient:
        client = self.writer.bind_prompt(key.prompt)
        if client is None or not client.accepts_tokens:
            raise CapabilityError(
                f"rollout.source: {self.source.model_dump()} lets the {self.source.writer} write one "
                "turn of a conversation, and it cannot continue from tokens; use a teacher that "
                "completes tokens, such as {type: model, model: ...} or {type: expert}"
            )
        return client

    def _continue_answers(
        self,
        keys: Sequence[RolloutKey],
        rollouts: Sequence[Rollout],
        corrections: Sequence[tuple[WrongTurn, Sample]],
    ) -> list[Rollout]:
        """Let the student continue from the corrected turns, and return the new rollouts."""
        starts = [
            _Restart(rollouts[turn.row], keys[turn.row], turn, sample)
            for turn, sample in corrections
        ]
        requests = [self._build_request(start.key, start, self._begin(start)) for start in starts]
        conversations = run_conversations(
            requests, self.environment, self.sampler.renderer, self.sampler.params
        )
        corrected = []
        for start, conversation in zip(starts, conversations, strict=True):
            (built,) = self.sampler.build_rollouts(
                [start.key], [start.rollout.prompt_tokens], [conversation.sample], "student"
            )
            built = conversation.complete(built)
            authors = torch.full((len(built.tokens),), AUTHORS.index("student"), dtype=torch.uint8)
            authors = authors if built.authors is None else built.authors.clone()
            end = start.turn.start + len(start.correction.tokens)
            authors[start.turn.start : end] = AUTHORS.index(self.source.writer)
            notes = {**built.notes, **start.notes}
            corrected.append(replace(built, authors=authors, notes=notes))
        return corrected

    def _begin(self, start: "_Restart") -> Beginning:
        """Return the conversation up to and including the corrected turn."""
        right, correction = _cut(start.rollout, start.turn), start.correction
        new_tokens = Tokens.from_sample(
            correction, self.source.writer, start.rollout.policy_version
        )
        text = self.sampler.renderer.decode(correction.tokens.tolist())
        turn = Turn("assistant", len(new_tokens), text)
        return Beginning(right.tokens + new_tokens, (*right.turns, turn))


@dataclass(frozen=True, slots=True)
class _Restart:
    """A conversation with a wrong turn, and the teacher's correction of this turn."""

    rollout: Rollout
    key: RolloutKey
    turn: WrongTurn
    correction: Sample

    @property
    def number(self) -> int:
        """The number of the wrong turn among the student's, from 1."""
        turns = self.rollout.turns[: self.turn.place + 1]
        return sum(turn.role == "assistant" for turn in turns)

    @property
    def rejected(self) -> str:
        """The text of the wrong turn."""
        return self.rollout.turns[self.turn.place].text

    @property
    def notes(self) -> dict[str, str]:
        """The notes of the conversation that continues from here."""
        replies = [turn.text for turn in self.rollout.turns[self.turn.place + 1 :][:1]]
        reply = {REPLIED: replies[0]} if replies else {}
        return {CORRECTED: str(self.number), REJECTED: self.rejected, **reply}


def _name(key: RolloutKey) -> tuple[str, int]:
    """Return an identifier of a key within its batch."""
    return key.prompt.id, key.number


def _cut(rollout: Rollout, turn: WrongTurn) -> Beginning:
    """Return the turns of a conversation before a wrong one."""
    tokens = Tokens.from_rollout(rollout).cut(0, turn.start)
    return Beginning(tokens, rollout.turns[: turn.place])


def find_turn(turns: Sequence[Turn], start: int) -> int | None:
    """Return the place of the first student turn that begins at or after token `start`."""
    position = 0
    for place, turn in enumerate(turns):
        if turn.role == "assistant" and position >= start:
            return place
        position += turn.tokens
    return None
