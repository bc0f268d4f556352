"""The task's own expert as a teacher: it knows the next turn's probabilities after any history.

A task with an expert (`practicum.ports.Task.expert`) needs no teacher model, so a run measures only
the method. The candidates form a tree of tokens, each text followed by the stop token. Every
token's distribution is mixed with a small uniform part, so that no log-probability is minus
infinity.
"""

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import lru_cache
from typing import Literal, TypeVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from practicum.core.abandon import Cancelled
from practicum.costs import Meter
from practicum.errors import CapabilityError, TeacherError, VerifierError
from practicum.functional import gather_logprobs
from practicum.functional.head import TableHead
from practicum.functional.truncation import sampling_logprobs
from practicum.objective import Signal
from practicum.pictures import fill_pictures
from practicum.ports import (
    Capabilities,
    Episode,
    PromptedClient,
    SamplingClient,
    Task,
    Teacher,
    TeacherConfig,
    TeacherContext,
    TeacherRequest,
)
from practicum.ports.gate import accept_observation, ask_expert
from practicum.rollouts import as_environment
from practicum.text import Renderer, excerpt, refuse_stop_texts
from practicum.types import (
    Message,
    Prompt,
    Rollout,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)

T = TypeVar("T")

EVERYTHING = Capabilities(
    signals=frozenset({"sampled", "topk", "full"}), follows_student=False, repeats_scores=True
)
"""The capabilities of a teacher that knows each distribution completely.

If a turn began differently from all of the expert's candidates, all tokens except the end are
equally likely.
"""

ROUNDING = 1e-6
"""The largest deviation from 1 of the sum of the candidates' probabilities."""

CACHED_TEXTS = 4096
"""The number of candidates that are cached as tokens."""

ANY_QUESTION = (Message("user", "?"),)
"""The prompt for encoding candidates: the chat template's text around an answer."""

Next = tuple[tuple[int, float], ...]
"""Possible next tokens with probabilities before the uniform share; empty: all equally likely."""


class Config(TeacherConfig):
    """The share of the uniform distribution in the expert's distributions."""

    type: Literal["expert"] = "expert"
    softness: float = Field(
        default=1e-4, gt=0, lt=1, description="the share of the uniform distribution at each token"
    )

    def capabilities(self) -> Capabilities:
        """Return every signal: the distribution is known completely."""
        return EVERYTHING


class ExpertTeacher(Teacher):
    """A teacher that asks the task for the text of each turn; see `practicum.ports.Teacher`.

    It reads the student's tokens (`renderer`). If a turn began differently from all candidates, the
    expert wants it to end at once, or continues it (`practicum.ports.Task.redirect`).
    """

    def __init__(
        self,
        task: Task,
        renderer: Renderer,
        softness: float,
        meter: Meter | None = None,
        count: Callable[[SamplingClient], SamplingClient] = lambda client: client,
    ) -> None:
        self.task = task
        self.environment = as_environment(task, renderer)
        self.renderer = renderer
        self._softness = softness
        self._meter = meter
        self._count = count
        self._vocabulary = renderer.vocab_size
        self._encode = lru_cache(maxsize=CACHED_TEXTS)(
            lambda text: tuple(renderer.encode_answer(ANY_QUESTION, text, sys.maxsize))
        )

    @property
    def capabilities(self) -> Capabilities:
        """Every signal."""
        return EVERYTHING

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Return the row of each token, with one head for all rollouts, or just log-probabilities.

        If the signal needs nothing else, only log-probabilities of the tokens are returned.
        """
        if self._meter is not None and rollouts:
            texts = [(rollout.prompt_tokens, len(rollout.tokens)) for rollout in rollouts]
            self._meter.count_scored(texts, heads=False)
        row_numbers: dict[Next, int] = {}
        hidden = []
        for rollout in rollouts:
            steps = self._walk(rollout.prompt, rollout.tokens.tolist())
            # Equal steps share a row: most steps of a task with few candidates are equal.
            rows = [row_numbers.setdefault(step, len(row_numbers)) for step in steps]
            # Row numbers are passed as hidden states of width 1; float32 holds them exactly up to
            # 2^24.
            hidden.append(torch.tensor(rows, dtype=torch.float32).reshape(-1, 1))
        if not row_numbers:
            row_numbers[()] = 0
        head = TableHead(torch.stack([self.compute_row(step) for step in row_numbers]))
        if not signal.sampled:
            return [TeacherSignal(hidden=states, head=head) for states in hidden]
        return [
            TeacherSignal(
                logprobs=gather_logprobs(head.logprobs(states), fill_pictures(rollout.tokens))
            )
            for rollout, states in zip(rollouts, hidden, strict=True)
        ]

    def compute_row(self, step: Next) -> Float[Tensor, " V"]:
        """Return log-probabilities of every token: the step mixed with the uniform share."""
        if not step:
            return torch.full((self._vocabulary,), -math.log(self._vocabulary))
        uniform = self._softness / self._vocabulary
        probabilities = torch.full((self._vocabulary,), uniform, dtype=torch.float64)
        for token, probability in step:
            probabilities[token] += (1 - self._softness) * probability
        return probabilities.log().float()

    def _walk(self, prompt: Prompt, tokens: Sequence[int]) -> list[Next]:
        """Return the possible tokens at each position; any token in the environment's turns."""
        steps = []
        with closing(_ExpertWalk(self, prompt)) as walk:
            for token in tokens:
                steps.append(walk.predict())
                walk.read(token)
        return steps

    def list_candidates(
        self, prompt: Prompt, turns: Sequence[str], start: str | None = None
    ) -> list[tuple[tuple[int, ...], float]]:
        """Return the expert's candidates for the next turn as tokens, with the stop token.

        With `start` they are the candidates after this beginning. TeacherError if their
        probabilities are no distribution.
        """
        candidates = ask_expert(self.task, prompt, turns, start)
        total = sum(candidates.values())
        if min(candidates.values(), default=-1) < 0 or abs(total - 1) > ROUNDING:
            raise TeacherError(
                f"the task's expert gives the candidates for turn {len(turns) + 1} of prompt "
                f"{prompt.id!r} a total probability of {total:g}; fix its expert(): each "
                "probability must be at least 0, and the sum 1"
            )
        return [
            (self._encode(text), probability)
            for text, probability in candidates.items()
            if probability > 0
        ]

    def sample(self, requests: Sequence[TeacherRequest], params: SamplingParams) -> list[Sample]:
        """Sample the expert's first turn for each request, from the request's seed."""
        samples = []
        for request in requests:
            tokens = self.renderer.render(request.prompt.messages)
            client = _ExpertClient(self, request.prompt, tokens)
            samples += client.sample([SampleRequest(tokens, request.seed)], params)
        return samples

    def bind_prompt(self, prompt: Prompt) -> PromptedClient:
        """Return the expert as a client of this prompt."""
        prompt_tokens = self.renderer.render(prompt.messages)
        client = _ExpertClient(self, prompt, prompt_tokens)
        return PromptedClient(self._count(client), prompt_tokens)


class _ExpertWalk:
    """A completion read token by token, with the expert's candidates for the current turn."""

    def __init__(self, teacher: ExpertTeacher, prompt: Prompt) -> None:
        self._teacher = teacher
        self._prompt = prompt
        self._turns: tuple[str, ...] = ()
        self._turn: list[int] = []
        self._episode: Episode | None = None
        self._is_turn_over = False
        self._candidates = teacher.list_candidates(prompt, ())
        self._to_skip: float = 0

    def predict(self) -> Next:
        """Return the tokens that may come next."""
        self._receive_reply()
        if self._to_skip:
            return ()
        position = len(self._turn)
        following: dict[int, float] = {}
        for tokens, probability in self._candidates:
            token = tokens[position]
            following[token] = following.get(token, 0.0) + probability
        total = sum(following.values())
        if not total:
            # No candidate begins like this turn: it should end here.
            return ((self._teacher.renderer.final_stop_id, 1.0),)
        return tuple((token, share / total) for token, share in following.items())

    def close(self) -> None:
        """Close the environment's episode."""
        if self._episode is not None:
            self._ask(self._episode.close)

    def read(self, token: int) -> None:
        """Advance by one token."""
        self._receive_reply()
        if self._to_skip:
            self._to_skip -= 1
            return
        self._turn.append(token)
        self._is_turn_over = token in self._teacher.renderer.stop_ids
        self._keep_candidates()
        if not self._candidates and not self._is_turn_over and self._teacher.task.redirects:
            start = self._teacher.renderer.decode(self._turn)
            self._candidates = self._teacher.list_candidates(self._prompt, self._turns, start)
            self._keep_candidates()

    def _keep_candidates(self) -> None:
        """Keep the candidates that continue the turn so far."""
        count = len(self._turn)
        self._candidates = [
            (tokens, probability)
            for tokens, probability in self._candidates
            if list(tokens[:count]) == self._turn and len(tokens) > count
        ]

    def _receive_reply(self) -> None:
        """Let the environment answer a finished turn; without an answer the conversation is over."""
        # The environment is only asked once there is a token after the turn. An episode that failed
        # ended the student's conversation here, and the same failure must not end the run.
        if not self._is_turn_over:
            return
        self._is_turn_over = False
        renderer = self._teacher.renderer
        turn = renderer.decode(self._turn)
        self._turns = (*self._turns, turn)
        self._turn = []
        environment = self._teacher.environment
        reply: tuple[Message, ...] = ()
        if environment is not None:
            if self._episode is None:
                self._episode = self._ask(lambda: environment.open(self._prompt, 0))
            episode = self._episode
            reply = self._ask(
                lambda: accept_observation(episode.step(turn), renderer.vocab_size).messages
            )
        if not reply:
            # Tokens after the end of the conversation have no speaker: all are equally likely.
            self._to_skip = math.inf
            return
        # The environment's tokens and the template's tokens around them are skipped.
        self._to_skip = len(renderer.render_reply(*reply))
        self._candidates = self._teacher.list_candidates(self._prompt, self._turns)

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Cancelled:
            raise
        # An environment is foreign code and may fail in any way.
        except Exception as error:
            raise VerifierError(
                "the task's environment failed while the expert read the conversation about prompt "
                f"{self._prompt.id!r}: {excerpt(f'{type(error).__name__}: {error}')}; fix it"
            ) from error


class _ExpertClient(SamplingClient):
    """The expert as a client of one prompt.

    It continues from any tokens after the prompt. The turns of a conversation come one after
    another, so it keeps the walk through the tokens of the last request.
    """

    def __init__(
        self, teacher: ExpertTeacher, prompt: Prompt, prompt_tokens: tuple[int, ...]
    ) -> None:
        self.teacher = teacher
        self.prompt = prompt
        self.prompt_tokens = prompt_tokens
        self._read: tuple[int, ...] = ()
        self._walk = _ExpertWalk(teacher, prompt)

    @property
    def capabilities(self) -> Capabilities:
        """Everything."""
        return EVERYTHING

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample one turn for each request."""
        return [self._sample_turn(request, params) for request in requests]

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Score each request's tokens, which must follow this client's prompt."""
        return self.teacher.score([self._build_rollout(request) for request in requests], signal)

    def _build_rollout(self, request: ScoreRequest) -> Rollout:
        tokens = torch.tensor(request.tokens, dtype=torch.long)
        zeros, mask = torch.zeros(len(tokens)), torch.ones(len(tokens), dtype=torch.bool)
        return Rollout(self.prompt, self.prompt_tokens, tokens, mask, zeros, zeros, 0, "length", "")

    def _walk_to(self, tokens: tuple[int, ...]) -> _ExpertWalk:
        """Return the walk after these tokens: the last walk if they continue it, else a new one."""
        if tokens[: len(self._read)] != self._read:
            self._walk.close()
            self._read, self._walk = (), _ExpertWalk(self.teacher, self.prompt)
        for token in tokens[len(self._read) :]:
            self._walk.read(token)
        self._read = tokens
        return self._walk

    def _sample_turn(self, request: SampleRequest, params: SamplingParams) -> Sample:
        refuse_stop_texts(params, "the task's expert")
        walk = self._walk_to(request.prompt_tokens[len(self.prompt_tokens) :])
        generator = torch.Generator().manual_seed(request.seed)
        tokens: list[int] = []
        sampling: list[float] = []
        policy: list[float] = []
        while len(tokens) < params.max_new_tokens and not (tokens and params.should_stop(tokens)):
            row = self.teacher.compute_row(walk.predict())
            tempered = sampling_logprobs(row[None], params)[0]
            token = int(torch.multinomial(tempered.double().exp(), 1, generator=generator))
            tokens.append(token)
            sampling.append(tempered[token].item())
            policy.append(row[token].item())
            walk.read(token)
        self._read = (*self._read, *tokens)
        return Sample(
            torch.tensor(tokens, dtype=torch.long),
            torch.tensor(sampling, dtype=torch.float32),
            torch.tensor(policy, dtype=torch.float32),
            "stop" if tokens and params.should_stop(tokens) else "length",
        )


def build(config: Config, context: TeacherContext) -> Teacher:
    """Use the task's expert; CapabilityError if it has none."""
    if context.task is None or not context.task.has_expert:
        raise CapabilityError(
            "teacher: {type: expert} asks the task what to say, and this task has no expert; "
            "write task: walker, give your own task a method expert(prompt, said), or take "
            "another teacher such as {type: model, model: ...}"
        )
    return ExpertTeacher(
        context.task, context.renderer, config.softness, context.meter, context.count_client
    )
