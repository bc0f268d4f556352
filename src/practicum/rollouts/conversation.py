"""Conversations with an environment: the model writes a turn, an episode replies, for all at once.

The tokens of a turn are appended exactly as they were sampled, never decoded and encoded again.
The loss leaves out the environment's tokens.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from practicum.core.abandon import Cancelled
from practicum.core.randomness import seed_of
from practicum.errors import VerifierError
from practicum.ports import Environment, Episode, Observation, PromptedClient
from practicum.rollouts.batch import call_by_group
from practicum.rollouts.tape import mark_authors
from practicum.text import Renderer, excerpt, refuse_stop_texts
from practicum.types import (
    FAILURES,
    Message,
    Prompt,
    Rollout,
    Sample,
    SampleRequest,
    SamplingParams,
    Source,
    StopReason,
    Turn,
)

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConversationRequest:
    """A conversation to run: its prompt, the model with its rendered prompt, and a seed.

    Another model, `opening`, speaks the first `opening_turns` turns of the model, if there are any.
    """

    prompt: Prompt
    prompted_client: PromptedClient
    seed: int
    opening: PromptedClient | None = None
    opening_turns: int = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    """A finished conversation: its T tokens as one sample, its turns and its notes.

    `model_mask` [T] is True at the tokens that the model generated. At the environment's tokens
    the sampling log-probability is 0 and the policy's is NaN. `opening` is the number of tokens at
    which another model spoke, with the environment's turns between its own.
    """

    sample: Sample
    model_mask: Tensor
    turns: tuple[Turn, ...]
    notes: dict[str, str]
    opening: int = 0

    @property
    def text(self) -> str:
        """Return the model's turns, one a line; line breaks within a turn become spaces."""
        return "\n".join(
            turn.text.replace("\n", " ") for turn in self.turns if turn.role == "assistant"
        )

    def complete(self, rollout: Rollout, origin: Source = "teacher") -> Rollout:
        """Return the rollout with this conversation's mask, text, authors, turns and notes.

        `origin` spoke the opening, which has no loss. If there is nothing more, it is its rollout.
        """
        mask, policy = self.model_mask.clone(), rollout.policy_logprobs.clone()
        # The policy never scored what another model said.
        mask[: self.opening], policy[: self.opening] = False, torch.nan
        source = rollout.source if mask.any() or not self.opening else origin
        authors = mark_authors(self.model_mask, source, "environment")
        authors[: self.opening] = mark_authors(
            self.model_mask[: self.opening], origin, "environment"
        )
        # One author for all tokens needs no column of authors.
        is_alone = bool(self.model_mask.all()) and not (self.opening and source != origin)
        return replace(
            rollout,
            loss_mask=mask,
            policy_logprobs=policy,
            source=source,
            text=self.text,
            authors=None if is_alone else authors,
            turns=self.turns,
            notes=self.notes,
        )


def run_conversations(
    requests: Sequence[ConversationRequest],
    environment: Environment,
    renderer: Renderer,
    params: SamplingParams,
) -> list[Conversation]:
    """Run all conversations to their end, or until no turn fits `params.max_new_tokens`.

    The environment's tokens count towards that limit. Each conversation depends on its own prompt,
    client and seed alone. An episode that fails ends its own conversation. Raises VerifierError if
    every conversation that asked the environment failed: then the environment is broken.
    """
    # A turn ends at a stop token, after which the environment replies; a stop text would end it
    # within a token.
    refuse_stop_texts(params, "a conversation")
    conversations = [_OpenConversation(request) for request in requests]
    with ExitStack() as episodes:
        for conversation in conversations:
            episodes.callback(conversation.close)
        while active := [
            conversation for conversation in conversations if conversation.stop_reason is None
        ]:
            for conversation, sample in zip(active, _sample_turns(active, params), strict=True):
                conversation.append_sample(sample)
                if sample.stop_reason == "stop" or not conversation.count_room(params):
                    conversation.end_turn(environment, renderer, params)
                if conversation.stop_reason is not None:
                    conversation.close()
    failures = [
        conversation.notes["error"]
        for conversation in conversations
        if conversation.stop_reason in FAILURES
    ]
    if failures:
        if len(failures) == sum(conversation.has_asked for conversation in conversations):
            raise VerifierError(
                f"the task's environment failed in all of {len(failures)} conversations, in the "
                f"first with {failures[0]}; mend it"
            )
        log.warning(
            "the environment broke off %d of %d conversations: %s",
            len(failures),
            len(conversations),
            failures[0],
        )
    return [conversation.finish() for conversation in conversations]


def _sample_turns(active: "Sequence[_OpenConversation]", params: SamplingParams) -> list[Sample]:
    """Sample the next tokens of each conversation.

    Conversations that sample as many tokens from the same client share one call.
    """
    clients = [conversation.speaker.client for conversation in active]
    lengths = [conversation.choose_length(params) for conversation in active]

    def sample(rows: list[int]) -> Sequence[Sample]:
        requests = [active[row].build_request() for row in rows]
        first = rows[0]
        return clients[first].sample(requests, replace(params, max_new_tokens=lengths[first]))

    return call_by_group(list(zip(map(id, clients), lengths, strict=True)), sample)


@dataclass(slots=True)
class _OpenConversation:
    """A conversation in progress: its tokens end to end, their log-probabilities, and its turns.

    The unfinished turn begins at token `turn_start`, and the first `opening` tokens are those up to
    the end of the opening. `has_asked` is True once the environment was asked for a reply.
    """

    request: ConversationRequest
    tokens: list[int] = field(default_factory=list)
    model_mask: list[bool] = field(default_factory=list)
    sampling_logprobs: list[Tensor] = field(default_factory=list)
    policy_logprobs: list[Tensor] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    turn_start: int = 0
    opening: int = 0
    has_asked: bool = False
    stop_reason: StopReason | None = None
    episode: Episode | None = None

    @property
    def speaker(self) -> PromptedClient:
        """The model whose turn it is."""
        opening = self.request.opening
        is_open = opening is not None and self.count_turns() < self.request.opening_turns
        return opening if opening is not None and is_open else self.request.prompted_client

    def count_room(self, params: SamplingParams) -> int:
        """Return the number of tokens that still fit."""
        return params.max_new_tokens - len(self.tokens)

    def choose_length(self, params: SamplingParams) -> int:
        """Return the number of tokens to sample next: the greatest power of two that fits.

        A longer turn continues with the next call.
        """
        # Powers of two are few, so conversations of different lengths often ask for the same number
        # of tokens and share one call of the sampler.
        return 1 << (self.count_room(params).bit_length() - 1)

    def build_request(self) -> SampleRequest:
        """Return the request for the tokens after the present ones."""
        prompt_tokens = (*self.speaker.prompt_tokens, *self.tokens)
        return SampleRequest(prompt_tokens, seed_of(self.request.seed, "turn", len(self.tokens)))

    def append_sample(self, sample: Sample) -> None:
        """Add sampled tokens to the unfinished turn."""
        tokens, sampling = sample.tokens.tolist(), sample.sampling_logprobs
        self._append(tokens, sampling, sample.policy_logprobs, is_from_model=True)

    def end_turn(
        self, environment: Environment, renderer: Renderer, params: SamplingParams
    ) -> None:
        """End the turn and append the episode's reply.

        The conversation is over if the environment has no more to say, or no turn would fit.
        """
        tokens = self.tokens[self.turn_start :]
        turn = Turn("assistant", len(tokens), renderer.decode(tokens))
        # Asked before the turn counts: afterwards the next speaker may be the student.
        if self.speaker is self.request.opening:
            self.opening = len(self.tokens)
        self.turns.append(turn)
        if not params.should_stop(tokens):
            self.stop_reason = "length"
            return
        self.has_asked = True
        observation = self._guard(lambda: self._step(environment, turn.text))
        if observation is None:
            return
        self.notes |= observation.notes
        self.turns[-1] = replace(turn, calls=observation.calls, reward=observation.reward)
        if not observation.messages:
            self.stop_reason = observation.stop_reason
        # The last turn is answered all the same: its calls and its reward count.
        elif params.max_turns is not None and self.count_turns() >= params.max_turns:
            self.stop_reason = "turns"
        else:
            reply_tokens = renderer.render_reply(*observation.messages)
            self._append_reply(observation.messages, reply_tokens, params)

    def count_turns(self) -> int:
        """Return the number of the model's turns."""
        return sum(turn.role == "assistant" for turn in self.turns)

    def _step(self, environment: Environment, turn: str) -> Observation:
        if self.episode is None:
            self.episode = environment.open(
                self.request.prompt, seed_of(self.request.seed, "episode")
            )
        observation = self.episode.step(turn)
        if not isinstance(observation, Observation):
            raise TypeError(
                f"step() returned a {type(observation).__name__}; "
                "return a practicum.ports.Observation"
            )
        if any(message.role == "assistant" for message in observation.messages):
            raise ValueError(
                "step() spoke in the role assistant, which is the student's; write user or tool"
            )
        return observation

    def _append_reply(
        self, messages: Sequence[Message], tokens: Sequence[int], params: SamplingParams
    ) -> None:
        count = len(tokens)
        if count >= self.count_room(params):
            self.stop_reason = "length"
            return
        # The environment wrote these tokens: a sampling log-probability of 0 gives them
        # probability 1, and NaN says that the policy never scored them.
        self._append(
            list(tokens), torch.zeros(count), torch.full((count,), torch.nan), is_from_model=False
        )
        text = "\n".join(message.content for message in messages)
        self.turns.append(Turn(messages[0].role, count, text))
        self.turn_start = len(self.tokens)

    def close(self) -> None:
        """Close the episode if one is open. A conversation that is over keeps its stop reason."""
        if self.episode is not None:
            # A failure to close is noted, but the conversation itself ended as it did.
            stop_reason, episode, self.episode = self.stop_reason, self.episode, None
            self._guard(episode.close)
            self.stop_reason = stop_reason

    def _guard(self, call: Callable[[], T]) -> T | None:
        """Call the episode. If it fails, note why, end the conversation and return None."""
        try:
            return call()
        except Cancelled:
            raise
        # An environment is foreign code and may fail in any way.
        except Exception as error:
            self.stop_reason = "timeout" if isinstance(error, TimeoutError) else "error"
            self.notes["error"] = excerpt(f"{type(error).__name__}: {error}")
            return None

    def _append(
        self, tokens: list[int], sampling: Tensor, policy: Tensor, *, is_from_model: bool
    ) -> None:
        self.tokens += tokens
        self.model_mask += [is_from_model] * len(tokens)
        self.sampling_logprobs.append(sampling)
        self.policy_logprobs.append(policy)

    def finish(self) -> Conversation:
        """Return the finished conversation."""
        assert self.stop_reason is not None, "it was held to its end"
        sample = Sample(
            torch.tensor(self.tokens, dtype=torch.long),
            torch.cat(self.sampling_logprobs),
            torch.cat(self.policy_logprobs),
            self.stop_reason,
        )
        mask = torch.tensor(self.model_mask, dtype=torch.bool)
        return Conversation(sample, mask, tuple(self.turns), self.notes, self.opening)
