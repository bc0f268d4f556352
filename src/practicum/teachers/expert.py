"""The task's own expert scores: it knows the probabilities of what should be said next, whatever was said before.

A task with such an expert (`practicum.ports.Expert`) needs no teacher model, so what is measured is the method alone. The
candidates are read as one tree of tokens, each text followed by the stop token, and every token's distribution is mixed with a
little of the uniform one, so that no log-probability is minus infinity.
"""

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from practicum.costs import Meter
from practicum.errors import CapabilityError, TeacherError
from practicum.functional import gather_logprobs
from practicum.functional.truncation import sampling_logprobs
from practicum.objective import Signal
from practicum.ports import (
    Capabilities,
    Environment,
    Expert,
    PromptedClient,
    SamplingClient,
    Teacher,
    TeacherContext,
    TeacherRequest,
)
from practicum.text import Renderer, refuse_stop_texts
from practicum.types import (
    Prompt,
    Rollout,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)

EVERYTHING = Capabilities(signals=frozenset({"sampled", "topk", "full"}), follows_student=False)
"""What whole distributions can answer."""

ROUNDING = 1e-6
"""So far from 1 may the probabilities of the candidates be in sum."""

SPELT = 4096
"""So many candidates are remembered as tokens."""

Next = tuple[tuple[int, float], ...]
"""The tokens that may come next with their probabilities, before the uniform share; nothing: any token alike."""


class Config(BaseModel):
    """How much of the uniform distribution is in the expert's."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["expert"] = "expert"
    softness: float = Field(
        default=1e-4, gt=0, lt=1, description="the share of the uniform distribution at each token"
    )

    def capabilities(self) -> Capabilities:
        """Every signal, for the whole distribution is known."""
        return EVERYTHING


@dataclass(frozen=True, slots=True)
class TableHead:
    """Rows of log-probabilities as a head: a hidden state is the number of its row; see `practicum.types.HeadLike`."""

    table: Float[Tensor, "R V"]

    @property
    def vocab_size(self) -> int:
        """How many tokens it tells apart."""
        return self.table.shape[-1]

    @property
    def key(self) -> tuple[int, ...]:
        """Where the rows are, and how many."""
        return self.table.data_ptr(), len(self.table)

    def logprobs(self, hidden: Float[Tensor, "*s 1"]) -> Float[Tensor, "*s v"]:
        """The rows of these numbers, exactly."""
        return self.table[hidden[..., 0].long().to(self.table.device)]

    def logits(
        self, hidden: Float[Tensor, "*s 1"], room: Callable[[], Tensor] | None = None
    ) -> Float[Tensor, "*s v"]:
        """The same, for log-probabilities are logits."""
        rows = self.logprobs(hidden)
        return rows if room is None else room().copy_(rows)

    def release(self) -> None:
        """Nothing: the rows are few."""


class ExpertTeacher(Teacher):
    """Asks the task what should be said at each turn; see `practicum.ports.Teacher`.

    It reads what the student reads, `renderer`'s tokens. A turn that began as no candidate does should end at once.
    """

    def __init__(
        self,
        task: Expert,
        renderer: Renderer,
        softness: float,
        meter: Meter | None = None,
        count: Callable[[SamplingClient], SamplingClient] = lambda client: client,
    ) -> None:
        self.task = task
        self.environment = task if isinstance(task, Environment) else None
        self.renderer = renderer
        self._softness = softness
        self._meter = meter
        self._count = count
        self._vocabulary = renderer.vocab_size
        self._spelling = lru_cache(maxsize=SPELT)(
            lambda text: tuple(renderer.encode_answer(text, sys.maxsize))
        )

    @property
    def capabilities(self) -> Capabilities:
        """Every signal."""
        return EVERYTHING

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """The numbers of each token's rows, all rollouts sharing a head; the tokens' log-probabilities where they suffice."""
        if self._meter is not None and rollouts:
            texts = [(rollout.prompt_tokens, len(rollout.tokens)) for rollout in rollouts]
            self._meter.scored(texts, heads=False)
        numbers: dict[Next, int] = {}
        hidden = []
        for rollout in rollouts:
            steps = self._steps(rollout.prompt, rollout.tokens.tolist())
            rows = [numbers.setdefault(step, len(numbers)) for step in steps]
            hidden.append(torch.tensor(rows, dtype=torch.float32).reshape(-1, 1))
        if not numbers:
            numbers[()] = 0
        head = TableHead(torch.stack([self.row(step) for step in numbers]))
        if not signal.sampled:
            return [TeacherSignal(hidden=states, head=head) for states in hidden]
        return [
            TeacherSignal(logprobs=gather_logprobs(head.logprobs(states), rollout.tokens))
            for rollout, states in zip(rollouts, hidden, strict=True)
        ]

    def row(self, step: Next) -> Float[Tensor, " V"]:
        """Log-probabilities of every token: the step's mixed with the uniform share."""
        if not step:
            return torch.full((self._vocabulary,), -math.log(self._vocabulary))
        everywhere = self._softness / self._vocabulary
        probabilities = torch.full((self._vocabulary,), everywhere, dtype=torch.float64)
        for token, probability in step:
            probabilities[token] += (1 - self._softness) * probability
        return probabilities.log().float()

    def _steps(self, prompt: Prompt, tokens: Sequence[int]) -> list[Next]:
        """What may come at each token of a completion; nothing in particular where the environment speaks."""
        steps = []
        with closing(_ExpertWalk(self, prompt)) as walk:
            for token in tokens:
                steps.append(walk.ahead())
                walk.read(token)
        return steps

    def spelt(self, prompt: Prompt, said: Sequence[str]) -> list[tuple[tuple[int, ...], float]]:
        """The expert's candidates as tokens, each with its stop token; TeacherError where they are no distribution."""
        candidates = self.task.expert(prompt, said)
        total = sum(candidates.values())
        if min(candidates.values(), default=-1) < 0 or abs(total - 1) > ROUNDING:
            raise TeacherError(
                f"the task's expert gives the candidates for turn {len(said) + 1} of prompt {prompt.id!r} a probability of "
                f"{total:g} in all; mend its expert(): each 0 or more, and 1 together"
            )
        return [
            (self._spelling(text), probability)
            for text, probability in candidates.items()
            if probability > 0
        ]

    def sample(self, requests: Sequence[TeacherRequest], params: SamplingParams) -> list[Sample]:
        """What the expert says first, each from its own seed."""
        prompts = [self.renderer.render(request.prompt.messages) for request in requests]
        return [
            _Writer(self, request.prompt, tokens).sample(
                [SampleRequest(tokens, request.seed)], params
            )[0]
            for request, tokens in zip(requests, prompts, strict=True)
        ]

    def voice(self, prompt: Prompt) -> PromptedClient:
        """The expert in conversation about this prompt."""
        prompt_tokens = self.renderer.render(prompt.messages)
        return PromptedClient(self._count(_Writer(self, prompt, prompt_tokens)), prompt_tokens)


class _ExpertWalk:
    """A completion read token by token: whose turn it is, and what of the expert's candidates fits what was said of it."""

    def __init__(self, teacher: ExpertTeacher, prompt: Prompt) -> None:
        self._teacher = teacher
        self._prompt = prompt
        self._said: tuple[str, ...] = ()
        self._turn: list[int] = []
        self._episode = None if teacher.environment is None else teacher.environment.open(prompt, 0)
        self._candidates = teacher.spelt(prompt, ())
        self._to_skip: float = 0

    def ahead(self) -> Next:
        """The tokens that may come next."""
        if self._to_skip:
            return ()
        place = len(self._turn)
        following: dict[int, float] = {}
        for tokens, probability in self._candidates:
            if tokens[:place] == tuple(self._turn) and len(tokens) > place:
                following[tokens[place]] = following.get(tokens[place], 0.0) + probability
        total = sum(following.values())
        if not total:
            return ((self._teacher.renderer.encode_answer("", 1)[0], 1.0),)
        return tuple((token, share / total) for token, share in following.items())

    def close(self) -> None:
        """Close the episode that was opened to read along."""
        if self._episode is not None:
            self._episode.close()

    def read(self, token: int) -> None:
        """Go on by a token."""
        if self._to_skip:
            self._to_skip -= 1
            return
        self._turn.append(token)
        if token in self._teacher.renderer.stop_ids:
            self._answer()

    def _answer(self) -> None:
        """The turn is over: the environment speaks, or nobody does any more."""
        renderer = self._teacher.renderer
        turn = renderer.decode(self._turn)
        self._said = (*self._said, turn)
        self._turn = []
        reply = None if self._episode is None else self._episode.step(turn).message
        if reply is None:
            self._to_skip = math.inf
            return
        self._to_skip = len(renderer.render_reply(reply))
        self._candidates = self._teacher.spelt(self._prompt, self._said)


class _Writer:
    """The expert as a client of one prompt, after which it goes on from any tokens; see `practicum.ports.SamplingClient`.

    It remembers how far it read, for the turns of a conversation come one after another.
    """

    capabilities = EVERYTHING

    def __init__(
        self, teacher: ExpertTeacher, prompt: Prompt, prompt_tokens: tuple[int, ...]
    ) -> None:
        self.teacher = teacher
        self.prompt = prompt
        self.prompt_tokens = prompt_tokens
        self._read: tuple[int, ...] = ()
        self._walk = _ExpertWalk(teacher, prompt)

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """One turn a request."""
        return [self._turn(request, params) for request in requests]

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """What the teacher says about each request's tokens, where they follow this prompt."""
        return self.teacher.score([self._rollout(request) for request in requests], signal)

    def _rollout(self, request: ScoreRequest) -> Rollout:
        tokens = torch.tensor(request.tokens, dtype=torch.long)
        known = torch.zeros(len(tokens))
        return Rollout(
            self.prompt, self.prompt_tokens, tokens, known >= 0, known, known, 0, "length", ""
        )

    def _walk_to(self, tokens: tuple[int, ...]) -> _ExpertWalk:
        """The walk when these tokens were read: the last one if they begin as it did, else a new one."""
        if tokens[: len(self._read)] != self._read:
            self._walk.close()
            self._read, self._walk = (), _ExpertWalk(self.teacher, self.prompt)
        for token in tokens[len(self._read) :]:
            self._walk.read(token)
        self._read = tokens
        return self._walk

    def _turn(self, request: SampleRequest, params: SamplingParams) -> Sample:
        refuse_stop_texts(params, "the task's expert")
        walk = self._walk_to(request.prompt_tokens[len(self.prompt_tokens) :])
        stream = torch.Generator().manual_seed(request.seed)
        drawn: list[int] = []
        sampling: list[float] = []
        policy: list[float] = []
        while len(drawn) < params.max_new_tokens and not (drawn and params.stops(drawn)):
            row = self.teacher.row(walk.ahead())
            tempered = sampling_logprobs(row[None], params)[0]
            token = int(torch.multinomial(tempered.double().exp(), 1, generator=stream))
            drawn.append(token)
            sampling.append(tempered[token].item())
            policy.append(row[token].item())
            walk.read(token)
        self._read = (*self._read, *drawn)
        return Sample(
            torch.tensor(drawn, dtype=torch.long),
            torch.tensor(sampling, dtype=torch.float32),
            torch.tensor(policy, dtype=torch.float32),
            "stop" if drawn and params.stops(drawn) else "length",
        )


def build(config: Config, context: TeacherContext) -> Teacher:
    """Take the task's expert; CapabilityError where it has none."""
    if not isinstance(context.task, Expert):
        raise CapabilityError(
            [
                "teacher: {type: expert} asks the task what to say, and this task has no expert; write task: walker, give your own "
                "task a method expert(prompt, said), or take another teacher such as {type: model, model: ...}"
            ]
        )
    return ExpertTeacher(
        context.task, context.renderer, config.softness, context.meter, context.count
    )
