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
        _one_turn(waiting, params)
        for one in waiting:
            one.hear(environment, renderer, params)
    return [one.conversation() for one in held]


def _one_turn(waiting: "Sequence[_Held]", params: SamplingParams) -> None:
    """A turn of each; one that does not end within the least room of all is drawn again with the room that is its own.

    The same seed draws the same tokens, so it goes on as it would have alone.
    """
    while waiting:
        room = min(one.room(params) for one in waiting)
        spoken = _drawn(waiting, replace(params, max_new_tokens=room))
        ended = [
            sample.stop_reason == "stop" or one.room(params) == room
            for one, sample in zip(waiting, spoken, strict=True)
        ]
        for one, sample, over in zip(waiting, spoken, ended, strict=True):
            if over:
                one.say(sample)
        waiting = [one for one, over in zip(waiting, ended, strict=True) if not over]


def _drawn(waiting: "Sequence[_Held]", params: SamplingParams) -> list[Sample]:
    """The next turn of each, one call for each of the clients that speak."""
    samples: dict[int, Sample] = {}
    clients = [id(one.opening.voice.client) for one in waiting]
    for client in dict.fromkeys(clients):
        rows = [row for row, its in enumerate(clients) if its == client]
        requests = [waiting[row].request() for row in rows]
        voice = waiting[rows[0]].opening.voice
        drawn = voice.client.sample(requests, params)
        samples.update(zip(rows, drawn, strict=True))
        if voice.meter is not None:
            pairs = zip(requests, drawn, strict=True)
            voice.meter.wrote([(request.prompt_tokens, len(sample.tokens)) for request, sample in pairs])
    return [samples[row] for row in range(len(waiting))]


@dataclass(slots=True)
class _Held:
    """A conversation so far: the turns, the tokens of the reply after each but the last, and all tokens end to end."""

    opening: Opening
    turns: list[Sample] = field(default_factory=list)
    replies: list[tuple[int, ...]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None

    def room(self, params: SamplingParams) -> int:
        return params.max_new_tokens - len(self.tokens)

    def request(self) -> SampleRequest:
        whole = (*self.opening.voice.prompt_tokens, *self.tokens)
        return SampleRequest(whole, seed_of(self.opening.seed, "turn", len(self.turns)))

    def say(self, sample: Sample) -> None:
        self.turns.append(sample)
        self.tokens += sample.tokens.tolist()

    def hear(self, environment: Environment, renderer: Renderer, params: SamplingParams) -> None:
        """Take the environment's reply to the turn that was just said; without room for another turn it is over."""
        turn = self.turns[-1]
        self.said.append(renderer.decode(turn.tokens.tolist()))
        if turn.stop_reason == "length":
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
        self.replies.append(tokens)
        self.tokens += tokens

    def conversation(self) -> Conversation:
        assert self.stop_reason is not None, "it was held to its end"
        blanks = [len(reply) for reply in self.replies] + [0]
        sampling, policy, spoken = [], [], []
        for turn, blank in zip(self.turns, blanks, strict=True):
            sampling += [turn.sampling_logprobs, torch.zeros(blank)]
            policy += [turn.policy_logprobs, torch.full((blank,), torch.nan)]
            spoken += [torch.ones(len(turn.tokens), dtype=torch.bool), torch.zeros(blank, dtype=torch.bool)]
        tokens = torch.tensor(self.tokens, dtype=torch.long)
        sample = Sample(tokens, torch.cat(sampling), torch.cat(policy), self.stop_reason)
        return Conversation(sample, torch.cat(spoken), tuple(self.said))
