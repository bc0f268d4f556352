"""Turn the student's conversations with users into rollouts; the user's next message finishes a turn.

Every turn is written to a file before the user receives it. The rows of the file determine the
rollouts of a step, so a resumed run and a run that replays the file train on identical data.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from practicum.core.abandon import check
from practicum.core.randomness import seed_of
from practicum.core.stopping import raise_if_stopping
from practicum.core.waits import show_wait
from practicum.costs import Ledger, UsageRow, read_usage, write_usage
from practicum.errors import DataError, ModelError, VerifierError
from practicum.ports import (
    SampledTurn,
    SamplingClient,
    Task,
    TurnRequest,
)
from practicum.rollouts.batch import RolloutBatch, call_by_group
from practicum.rollouts.tape import TokenId, from_exact_floats, to_exact_floats
from practicum.text import Renderer
from practicum.types import (
    Message,
    Metrics,
    Prompt,
    Rollout,
    Sample,
    SampleRequest,
    SamplingParams,
    StopReason,
)

NEXT_STATE = "next_state"
"""The note with the user's next message."""

POLL_SECONDS = 0.5
"""The interval at which cancellation and signals are checked."""


class _SpokenRow(BaseModel):
    role: str
    content: str
    name: str | None = None


class TrafficRow(BaseModel):
    """One answered request: the messages, the student's turn, and the turn that it finishes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    messages: list[_SpokenRow]
    finishes: Annotated[int, Field(ge=0)] | None
    text: str
    stop_reason: StopReason
    policy_version: int
    prompt_tokens: list[TokenId]
    tokens: list[TokenId]
    sampling_logprobs: list[float | None]
    policy_logprobs: list[float | None]
    work: list[UsageRow] = []
    """The work of sampling this turn and all later turns of the same batch."""

    def list_messages(self) -> tuple[Message, ...]:
        """Return the messages before the turn."""
        return tuple(Message(row.role, row.content, row.name) for row in self.messages)


@dataclass(slots=True)
class Traffic:
    """The turns of users' conversations and the finished turns, in order.

    `append` writes a row. Without `users` only the recorded rows are available.
    """

    append: Callable[[Mapping[str, Any]], None]
    longest_prompt: int
    ledger: Ledger
    users: Task | None = None
    rows: list[TrafficRow] = field(default_factory=list)
    finished: list[tuple[int, int]] = field(default_factory=list)
    """The finished turns, each with the row that finished it."""
    refused: int = 0
    """The number of requests that this process refused."""
    _turn_of: dict[str, int] = field(default_factory=dict)
    _finished_turns: set[int] = field(default_factory=set)

    def restore(self, rows: Iterable[TrafficRow]) -> "Traffic":
        """Load recorded rows; DataError if a row finishes a turn that does not precede it."""
        for row in rows:
            if row.finishes is not None and row.finishes >= len(self.rows):
                raise DataError(
                    f"row {len(self.rows) + 1} of the traffic finishes turn {row.finishes}, which "
                    "is not an earlier turn; use the file unmodified, as the run wrote it"
                )
            self._add(row)
        return self

    def collect(
        self,
        batch: RolloutBatch,
        renderer: Renderer,
        client: SamplingClient,
        params: SamplingParams,
    ) -> list[Rollout]:
        """Answer users until the step's turns are finished, and return them as rollouts."""
        count = len(batch.prompts)
        first = (batch.step - 1) * count
        quiet_since = monotonic()
        with show_wait("finished turns", count) as wait:
            while (count_ready := len(self.finished) - first) < count:
                wait.move_to(max(count_ready, 0))
                if self.users is None:
                    raise DataError(
                        f"rollout.source: the traffic has {len(self.finished)} finished turns, and "
                        f"step {batch.step} needs {first + count}; lower train.steps"
                    )
                requests = self.users.receive(POLL_SECONDS)
                if requests:
                    self._answer(requests, batch, renderer, client, params)
                    quiet_since = monotonic()
                    continue
                check()
                raise_if_stopping("nothing is lost: the traffic is kept")
                if monotonic() - quiet_since > self.users.patience:
                    raise VerifierError(
                        f"no user spoke for task.seconds, {self.users.patience:g} s; "
                        f"{count_ready} of {count} turns of the step are finished"
                    )
        # Count the work by rows: a killed run has already sampled a part of its last step.
        rows = self.rows[self._count_rows(first) : self._count_rows(first + count)]
        for row in rows:
            self.ledger.merge(read_usage(row.work))
        return [self._build_rollout(*pair) for pair in self.finished[first : first + count]]

    def _count_rows(self, finished: int) -> int:
        """Return the number of rows up to the row with which `finished` turns are finished."""
        return self.finished[finished - 1][1] + 1 if finished else 0

    def measure(self, step: int, count: int) -> Metrics:
        """Return the number of turns that still waited for a reply when the step was complete."""
        if len(self.finished) < step * count:
            return {}
        # Counted in rows and not by the clock, so a resumed run reports the same value.
        return {"turns_open": float(self._count_rows(step * count) - step * count)}

    def _answer(
        self,
        requests: Sequence[TurnRequest],
        batch: RolloutBatch,
        renderer: Renderer,
        client: SamplingClient,
        params: SamplingParams,
    ) -> None:
        """Sample a turn for each request, record it, and send it to the user."""
        prepared = [(request, self._prepare(request, renderer)) for request in requests]
        accepted = [(request, text) for request, text in prepared if text is not None]
        with self.ledger.record_separately() as work:
            samples = self._sample(accepted, batch, client, params)
        works = [write_usage(work), *([] for _ in samples[1:])]
        for (request, prompt_tokens), sample, used in zip(accepted, samples, works, strict=False):
            finishes = self._find_turn(request.messages)
            # A user may reply twice to the same turn; the first reply is its next state.
            is_first = finishes not in self._finished_turns
            row = TrafficRow(
                messages=[
                    _SpokenRow(role=message.role, content=message.content, name=message.name)
                    for message in request.messages
                ],
                finishes=finishes if is_first else None,
                text=renderer.decode(sample.tokens.tolist()),
                stop_reason=sample.stop_reason,
                policy_version=batch.policy_version,
                prompt_tokens=list(prompt_tokens),
                tokens=sample.tokens.tolist(),
                sampling_logprobs=to_exact_floats(sample.sampling_logprobs),
                policy_logprobs=to_exact_floats(sample.policy_logprobs),
                work=used,
            )
            # Write the row before replying, so that no sent turn is lost.
            self.append(row.model_dump())
            self._add(row)
            logprobs = tuple(sample.sampling_logprobs.tolist())
            tokens = tuple(row.tokens)
            request.reply(SampledTurn(prompt_tokens, tokens, logprobs, row.text, row.stop_reason))

    def _sample(
        self,
        accepted: Sequence[tuple[TurnRequest, tuple[int, ...]]],
        batch: RolloutBatch,
        client: SamplingClient,
        params: SamplingParams,
    ) -> list[Sample]:
        """Return a sample for each request, each from the random stream of its row."""
        first = len(self.rows)
        limits = [
            min(request.max_tokens or params.max_new_tokens, params.max_new_tokens)
            for request, _ in accepted
        ]
        return call_by_group(
            limits,
            lambda rows: client.sample(
                [
                    SampleRequest(accepted[row][1], seed_of(batch.seed, "served", first + row))
                    for row in rows
                ],
                replace(params, max_new_tokens=limits[rows[0]]),
            ),
        )

    def _prepare(self, request: TurnRequest, renderer: Renderer) -> tuple[int, ...] | None:
        """Return the tokens before the turn; None if the request was refused."""
        characters = sum(len(message.content) for message in request.messages)
        if characters > self.longest_prompt * renderer.longest_token:
            self._refuse(
                request,
                f"the conversation has {characters} characters, and {self.longest_prompt} tokens "
                "are read; begin a new one",
            )
            return None
        try:
            tokens = self._render(request.messages, renderer)
        except (DataError, ModelError) as error:
            self._refuse(request, str(error))
            return None
        if len(tokens) > self.longest_prompt:
            self._refuse(
                request,
                f"the conversation has {len(tokens)} tokens, and {self.longest_prompt} are read; "
                "begin a new one",
            )
            return None
        return tokens

    def _refuse(self, request: TurnRequest, reason: str) -> None:
        self.refused += 1
        request.reply(reason)

    def _render(self, messages: Sequence[Message], renderer: Renderer) -> tuple[int, ...]:
        """Return the tokens of a conversation, with the student's last turn exactly as sampled."""
        turn = self._find_turn(messages)
        # Only the template knows how to end a truncated turn.
        if turn is None or self.rows[turn].stop_reason != "stop":
            return renderer.render(messages)
        row = self.rows[turn]
        later = messages[len(row.messages) + 1 :]
        return (*row.prompt_tokens, *row.tokens, *renderer.render_reply(*later))

    def _find_turn(self, messages: Sequence[Message]) -> int | None:
        """Return the student's turn that the messages continue; None for an unknown conversation."""
        spoken = [place for place, message in enumerate(messages) if message.role == "assistant"]
        return self._turn_of.get(_name_conversation(messages[: spoken[-1] + 1])) if spoken else None

    def _add(self, row: TrafficRow) -> None:
        if row.finishes is not None:
            self.finished.append((row.finishes, len(self.rows)))
            self._finished_turns.add(row.finishes)
        spoken = (*row.list_messages(), Message("assistant", row.text))
        self._turn_of[_name_conversation(spoken)] = len(self.rows)
        self.rows.append(row)

    def _build_rollout(self, turn: int, finished_by: int) -> Rollout:
        """Return a finished turn as a rollout, with the reply as its note."""
        row, later = self.rows[turn], self.rows[finished_by]
        replies = later.messages[len(row.messages) + 1 :]
        return Rollout(
            prompt=Prompt(f"user-turn-{turn}", row.list_messages()),
            prompt_tokens=tuple(row.prompt_tokens),
            tokens=torch.tensor(row.tokens, dtype=torch.long),
            loss_mask=torch.ones(len(row.tokens), dtype=torch.bool),
            sampling_logprobs=from_exact_floats(row.sampling_logprobs),
            policy_logprobs=from_exact_floats(row.policy_logprobs),
            policy_version=row.policy_version,
            stop_reason=row.stop_reason,
            text=row.text,
            notes={NEXT_STATE: "\n".join(message.content for message in replies)},
        )


def _name_conversation(messages: Sequence[Message]) -> str:
    """Return a hash of the messages that ignores outer whitespace, which clients may trim."""
    text = json.dumps([[message.role, message.content.strip()] for message in messages])
    return hashlib.sha256(text.encode()).hexdigest()
