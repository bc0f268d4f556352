"""Conversations with an environment: the student speaks, an episode answers, turn by turn, for all of them at once.

The tokens of a turn are appended exactly as they were sampled. What the environment says is not learned from.
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
from practicum.text import Renderer, excerpt, refuse_stop_texts
from practicum.types import (
    AUTHORS,
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
    """A conversation to be held: its prompt, who speaks and how it reads the prompt, and the seed of its turns."""

    prompt: Prompt
    voice: PromptedClient
    seed: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that was held: its tokens as one sample, which of them the voice spoke, its turns and its notes.

    Of the environment's tokens the sampling log-probability is 0 and the policy's NaN.
    """

    sample: Sample
    spoken: Tensor
    turns: tuple[Turn, ...]
    notes: dict[str, str]

    @property
    def text(self) -> str:
        """What the voice said, a line a turn; line breaks within a turn are spaces."""
        return "\n".join(
            turn.text.replace("\n", " ") for turn in self.turns if turn.role == "assistant"
        )

    def authors(self, source: Source) -> Tensor | None:
        """Return who wrote each token where `source` is the voice; None where it wrote all of them."""
        if self.spoken.all():
            return None
        voice, environment = (
            torch.tensor(AUTHORS.index(author), dtype=torch.uint8)
            for author in (source, "environment")
        )
        return torch.where(self.spoken, voice, environment)

    def complete(self, rollout: Rollout) -> Rollout:
        """Return the rollout of this conversation: learned from where its voice spoke, read as what that said."""
        return replace(
            rollout,
            loss_mask=self.spoken,
            text=self.text,
            authors=self.authors(rollout.source),
            turns=self.turns,
            notes=self.notes,
        )


def run_conversations(
    openings: Sequence[ConversationRequest],
    environment: Environment,
    renderer: Renderer,
    params: SamplingParams,
) -> list[Conversation]:
    """Hold all conversations, each to its end or until no turn fits `params.max_new_tokens`, the environment's included.

    What is said in one depends on its own prompt, voice and seed alone. An episode that fails ends its own conversation; where
    all that were asked for an answer fail, the environment is broken, which is a VerifierError.
    """
    refuse_stop_texts(params, "a conversation")
    conversations = [_Open(opening) for opening in openings]
    with ExitStack() as episodes:
        for conversation in conversations:
            episodes.callback(conversation.close)
        while waiting := [
            conversation for conversation in conversations if conversation.stop_reason is None
        ]:
            for conversation, sample in zip(waiting, _sample_turns(waiting, params), strict=True):
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
        if len(failures) == sum(conversation.asked for conversation in conversations):
            raise VerifierError(
                f"the task's environment failed in all of {len(failures)} conversations, in the first with {failures[0]}; mend it"
            )
        log.warning(
            "the environment broke off %d of %d conversations: %s",
            len(failures),
            len(conversations),
            failures[0],
        )
    return [conversation.finish() for conversation in conversations]


def _sample_turns(waiting: "Sequence[_Open]", params: SamplingParams) -> list[Sample]:
    """Draw what each says next, with one call for all that draw as many tokens from the same client."""
    samples: dict[int, Sample] = {}
    calls = [
        (id(conversation.opening.voice.client), conversation.choose_length(params))
        for conversation in waiting
    ]
    for call in dict.fromkeys(calls):
        rows = [row for row, client_and_length in enumerate(calls) if client_and_length == call]
        requests = [waiting[row].make_request() for row in rows]
        voice = waiting[rows[0]].opening.voice
        drawn = voice.client.sample(requests, replace(params, max_new_tokens=call[1]))
        samples.update(zip(rows, drawn, strict=True))
    return [samples[row] for row in range(len(waiting))]


@dataclass(slots=True)
class _Open:
    """A conversation so far: its tokens end to end, where they were drawn, their log-probabilities, and its turns.

    `begins` is where the turn that is being said begins; `asked` says whether the environment was asked for an answer.
    """

    opening: ConversationRequest
    tokens: list[int] = field(default_factory=list)
    spoken: list[bool] = field(default_factory=list)
    sampling: list[Tensor] = field(default_factory=list)
    policy: list[Tensor] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    begins: int = 0
    asked: bool = False
    stop_reason: StopReason | None = None
    episode: Episode | None = None

    def count_room(self, params: SamplingParams) -> int:
        """Return how many tokens may follow."""
        return params.max_new_tokens - len(self.tokens)

    def choose_length(self, params: SamplingParams) -> int:
        """Return how many tokens to draw in one go: the greatest power of two that fits, so that many conversations draw as many.

        A turn that is longer goes on with the next draw.
        """
        # Powers of two are few, so many conversations ask for the same length and share one call of the sampler.
        return 1 << (self.count_room(params).bit_length() - 1)

    def make_request(self) -> SampleRequest:
        """Ask for the tokens after those so far."""
        prompt_tokens = (*self.opening.voice.prompt_tokens, *self.tokens)
        return SampleRequest(prompt_tokens, seed_of(self.opening.seed, "turn", len(self.tokens)))

    def append_sample(self, sample: Sample) -> None:
        """Go on with the turn."""
        self._append(
            sample.tokens.tolist(), sample.sampling_logprobs, sample.policy_logprobs, spoken=True
        )

    def end_turn(
        self, environment: Environment, renderer: Renderer, params: SamplingParams
    ) -> None:
        """End the turn, and take the episode's answer; without room for another turn the conversation is over."""
        tokens = self.tokens[self.begins :]
        turn = Turn("assistant", len(tokens), renderer.decode(tokens))
        self.turns.append(turn)
        if not params.stops(tokens):
            self.stop_reason = "length"
            return
        self.asked = True
        observation = self._guard(lambda: self._step(environment, turn.text))
        if observation is None:
            return
        self.notes |= observation.notes
        if observation.message is None:
            self.stop_reason = "stop"
        else:
            self._append_reply(
                observation.message, renderer.render_reply(observation.message), params
            )

    def _step(self, environment: Environment, turn: str) -> Observation:
        if self.episode is None:
            self.episode = environment.open(
                self.opening.prompt, seed_of(self.opening.seed, "episode")
            )
        observation = self.episode.step(turn)
        if not isinstance(observation, Observation):
            raise TypeError(
                f"step() returned a {type(observation).__name__}; return a practicum.ports.Observation"
            )
        if observation.message is not None and observation.message.role == "assistant":
            raise ValueError(
                "step() spoke in the role assistant, which is the student's; write user or tool"
            )
        return observation

    def _append_reply(
        self, message: Message, tokens: Sequence[int], params: SamplingParams
    ) -> None:
        count = len(tokens)
        if count >= self.count_room(params):
            self.stop_reason = "length"
            return
        self._append(
            list(tokens), torch.zeros(count), torch.full((count,), torch.nan), spoken=False
        )
        self.turns.append(Turn(message.role, count, message.content))
        self.begins = len(self.tokens)

    def close(self) -> None:
        """Close the episode, if one is open; a conversation that is over stays as it ended."""
        if self.episode is not None:
            stop_reason, episode, self.episode = self.stop_reason, self.episode, None
            self._guard(episode.close)
            self.stop_reason = stop_reason

    def _guard(self, call: Callable[[], T]) -> T | None:
        """Return what the episode gives, or None where it fails, which is then why the conversation stopped."""
        try:
            return call()
        except Cancelled:
            raise
        except (
            Exception
        ) as error:  # an environment is somebody else's program and may fail in any way
            self.stop_reason = "timeout" if isinstance(error, TimeoutError) else "error"
            self.notes["error"] = excerpt(f"{type(error).__name__}: {error}")
            return None

    def _append(self, tokens: list[int], sampling: Tensor, policy: Tensor, *, spoken: bool) -> None:
        self.tokens += tokens
        self.spoken += [spoken] * len(tokens)
        self.sampling.append(sampling)
        self.policy.append(policy)

    def finish(self) -> Conversation:
        """Return the conversation, which is over."""
        assert self.stop_reason is not None, "it was held to its end"
        tokens = torch.tensor(self.tokens, dtype=torch.long)
        sample = Sample(tokens, torch.cat(self.sampling), torch.cat(self.policy), self.stop_reason)
        return Conversation(
            sample, torch.tensor(self.spoken, dtype=torch.bool), tuple(self.turns), self.notes
        )
