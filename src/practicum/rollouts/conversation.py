"""Conversations with an environment: the student speaks, the task answers, turn by turn, for all of them at once.

The tokens of a turn are appended exactly as they were sampled. What the environment says is not learned from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from practicum.ports import Environment, Voice
from practicum.randomness import seed_of
from practicum.text import Renderer
from practicum.types import Prompt, Sample, SampleRequest, SamplingParams, StopReason


@dataclass(frozen=True, slots=True)
class Opening:
    """A conversation to be held: its prompt, who speaks and how it reads the prompt, and the seed of its turns."""

    prompt: Prompt
    voice: Voice
    seed: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that was held: its tokens as one sample, which of them were `spoken` by the voice, and its turns.

    Of the environment's tokens the sampling log-probability is 0 and the policy's NaN.
    """

    sample: Sample
    spoken: Tensor
    said: tuple[str, ...]

    @property
    def text(self) -> str:
        """What was said, a line a turn; line breaks within a turn are spaces."""
        return "\n".join(turn.replace("\n", " ") for turn in self.said)


def converse(
    openings: Sequence[Opening], environment: Environment, renderer: Renderer, params: SamplingParams
) -> list[Conversation]:
    """Hold all conversations, each to its end or until no turn fits `params.max_new_tokens`, the environment's included.

    What is said in one depends on its own prompt, voice and seed alone.
    """
    held = [_Held(opening) for opening in openings]
    while waiting := [one for one in held if one.stop_reason is None]:
        for one, sample in zip(waiting, _drawn(waiting, params), strict=True):
            one.say(sample)
            if sample.stop_reason == "stop" or not one.room(params):
                one.hear(environment, renderer, params)
    return [one.conversation() for one in held]


def _drawn(waiting: "Sequence[_Held]", params: SamplingParams) -> list[Sample]:
    """What each says next, one call for all that draw as many tokens from the same client."""
    samples: dict[int, Sample] = {}
    calls = [(id(one.opening.voice.client), one.length(params)) for one in waiting]
    for call in dict.fromkeys(calls):
        rows = [row for row, its in enumerate(calls) if its == call]
        requests = [waiting[row].request() for row in rows]
        voice = waiting[rows[0]].opening.voice
        drawn = voice.client.sample(requests, replace(params, max_new_tokens=call[1]))
        samples.update(zip(rows, drawn, strict=True))
    return [samples[row] for row in range(len(waiting))]


@dataclass(slots=True)
class _Held:
    """A conversation so far: its tokens end to end, where they were drawn, their log-probabilities, and its turns as text.

    `begins` is where the turn that is being said begins.
    """

    opening: Opening
    tokens: list[int] = field(default_factory=list)
    spoken: list[bool] = field(default_factory=list)
    sampling: list[Tensor] = field(default_factory=list)
    policy: list[Tensor] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    begins: int = 0
    stop_reason: StopReason | None = None

    def room(self, params: SamplingParams) -> int:
        """How many tokens may follow."""
        return params.max_new_tokens - len(self.tokens)

    def length(self, params: SamplingParams) -> int:
        """How many of them are drawn in one go: the greatest power of two, so that many conversations draw as many.

        A turn that is longer goes on with the next draw.
        """
        return 1 << (self.room(params).bit_length() - 1)

    def request(self) -> SampleRequest:
        """What to draw after."""
        whole = (*self.opening.voice.prompt_tokens, *self.tokens)
        return SampleRequest(whole, seed_of(self.opening.seed, "turn", len(self.tokens)))

    def say(self, sample: Sample) -> None:
        """Go on with the turn."""
        self._append(sample.tokens.tolist(), sample.sampling_logprobs, sample.policy_logprobs, spoken=True)

    def hear(self, environment: Environment, renderer: Renderer, params: SamplingParams) -> None:
        """End the turn, and take the environment's reply; without room for another turn the conversation is over."""
        turn = self.tokens[self.begins :]
        self.said.append(renderer.decode(turn))
        if not params.stops(turn):
            self.stop_reason = "length"
            return
        reply = environment.reply(self.opening.prompt, tuple(self.said))
        if reply is None:
            self.stop_reason = "stop"
            return
        tokens = renderer.reply(reply)
        if len(tokens) >= self.room(params):
            self.stop_reason = "length"
            return
        count = len(tokens)
        self._append(list(tokens), torch.zeros(count), torch.full((count,), torch.nan), spoken=False)
        self.begins = len(self.tokens)

    def _append(self, tokens: list[int], sampling: Tensor, policy: Tensor, *, spoken: bool) -> None:
        self.tokens += tokens
        self.spoken += [spoken] * len(tokens)
        self.sampling.append(sampling)
        self.policy.append(policy)

    def conversation(self) -> Conversation:
        """The whole of it, when it is over."""
        assert self.stop_reason is not None, "it was held to its end"
        tokens = torch.tensor(self.tokens, dtype=torch.long)
        sample = Sample(tokens, torch.cat(self.sampling), torch.cat(self.policy), self.stop_reason)
        return Conversation(sample, torch.tensor(self.spoken, dtype=torch.bool), tuple(self.said))
