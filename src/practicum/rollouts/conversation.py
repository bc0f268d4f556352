"""Conversations with an environment: the model writes a turn, and an episode replies.

All conversations run together. The sampled tokens of a turn are appended unchanged, never decoded
and encoded again. The loss excludes the environment's tokens.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from practicum.core.abandon import Cancelled
from practicum.core.randomness import seed_of
from practicum.errors import VerifierError
from practicum.ports import (
    Episode,
    Observation,
    OpensEpisodes,
    PromptedClient,
    SampledTurn,
)
from practicum.ports.gate import (
    Kind,
    Refused,
    RejectedValue,
    accept_observation,
    classify_error,
    collect_rejections,
    list_kinds,
    report_rejections,
)
from practicum.rollouts.answer_tokens import Tokens
from practicum.rollouts.batch import sample_to_lengths
from practicum.rollouts.openings import ConversationRequest
from practicum.rollouts.pace import Answer, Asker, open_asker
from practicum.rollouts.tape import mark_authors
from practicum.text import Renderer, excerpt, refuse_stop_texts
from practicum.types import (
    AUTHORS,
    FAILURES,
    Message,
    Rollout,
    Sample,
    SampleRequest,
    SamplingParams,
    Source,
    StopReason,
    Turn,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A finished conversation: its T tokens as one sample, its turns and its notes.

    `model_mask` [T] is True at the tokens that the model generated. At the environment's tokens
    the sampling log-probability is 0 and the policy's is NaN. `opening` is the number of leading
    tokens that another model wrote, including the environment's turns in between. `warning_mask`
    [T] is True at the warnings in the environment's turns; None without warnings.
    """

    sample: Sample
    model_mask: Tensor
    turns: tuple[Turn, ...]
    notes: dict[str, str]
    opening: int = 0
    rejected: tuple[Kind, ...] = ()
    warning_mask: Tensor | None = None

    @property
    def text(self) -> str:
        """Return the model's turns, one per line; line breaks within a turn become spaces."""
        return "\n".join(
            turn.text.replace("\n", " ") for turn in self.turns if turn.role == "assistant"
        )

    def complete(self, rollout: Rollout, origin: Source = "teacher") -> Rollout:
        """Return the rollout with this conversation's mask, text, authors, turns and notes.

        `origin` wrote the opening, which has no loss. It is also the source of the rollout if the
        model wrote nothing after the opening.
        """
        mask, policy = self.model_mask.clone(), rollout.policy_logprobs.clone()
        # The policy never scored the tokens of another model.
        mask[: self.opening], policy[: self.opening] = False, torch.nan
        source = rollout.source if mask.any() or not self.opening else origin
        authors = mark_authors(self.model_mask, source, "environment")
        authors[: self.opening] = mark_authors(
            self.model_mask[: self.opening], origin, "environment"
        )
        if self.warning_mask is not None:
            authors[self.warning_mask] = AUTHORS.index("harness")
        # The column of authors is not needed if all tokens have the same author.
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
            rejected=(*rollout.rejected, *self.rejected),
        )


def run_conversations(
    requests: Sequence[ConversationRequest],
    environment: OpensEpisodes,
    renderer: Renderer,
    params: SamplingParams,
) -> list[Conversation]:
    """Run all conversations to their end, or until no turn fits `params.max_new_tokens`.

    The environment's tokens count towards that limit. `params.pace` controls the calls to the
    environment. Each conversation depends only on its prompt, client and seed. An episode that
    fails ends only its own conversation. Raises VerifierError if every conversation that called the
    environment failed, because the environment is then broken.
    """
    # A turn ends at a stop token, after which the environment replies; a stop text would end it
    # within a token.
    refuse_stop_texts(params, "a conversation")
    size = renderer.vocab_size
    conversations = [_open_conversation(request, size) for request in _let_remember(requests)]
    with report_rejections():
        _Round(conversations, environment, renderer, params, open_asker(params.pace)).run()
    failures = [
        conversation.notes["error"]
        for conversation in conversations
        if conversation.stop_reason in FAILURES
    ]
    if failures:
        if len(failures) == sum(conversation.has_asked for conversation in conversations):
            raise VerifierError(
                f"the task's environment failed in all of {len(failures)} conversations, in the "
                f"first with {failures[0]}; fix the environment"
            )
        log.warning(
            "the environment failed in %d of %d conversations: %s",
            len(failures),
            len(conversations),
            failures[0],
        )
    return [conversation.finish() for conversation in conversations]


@dataclass(slots=True)
class _Round:
    """Conversations that take turns with one environment."""

    conversations: "Sequence[_OpenConversation]"
    environment: OpensEpisodes
    renderer: Renderer
    params: SamplingParams
    asker: Asker

    def run(self) -> None:
        """Alternate turns until every conversation is over; always close the episodes."""
        waiting: set[int] = set()
        try:
            for number, conversation in enumerate(self.conversations):
                if conversation.awaits_answer():
                    conversation.has_asked = True
                    waiting.add(number)
                    self.asker.ask(number, partial(conversation.ask, self.environment))
            waiting -= self._take_answers(waiting, len(self.conversations))
            while active := [
                number
                for number, conversation in enumerate(self.conversations)
                if conversation.stop_reason is None
            ]:
                ready = [number for number in active if number not in waiting]
                waiting |= self._take_turns(ready)
                waiting -= self._take_answers(waiting, len(active))
        finally:
            for number in range(len(self.conversations)):
                self._close(number)
            for number, failure in self.asker.finish().items():
                self.conversations[number].note_failure(failure)

    def _take_turns(self, ready: Sequence[int]) -> set[int]:
        """Sample for the conversations that are ready, and send finished turns to the environment."""
        asking: set[int] = set()
        conversations = [self.conversations[number] for number in ready]
        samples = _sample_turns(conversations, self.params)
        for number, conversation, sample in zip(ready, conversations, samples, strict=True):
            conversation.append_sample(sample)
            if sample.stop_reason != "stop" and conversation.count_room(self.params):
                continue
            if conversation.end_turn(self.renderer, self.params):
                asking.add(number)
                self.asker.ask(number, partial(conversation.ask, self.environment))
            else:
                self._close(number)
        return asking

    def _take_answers(self, waiting: set[int], active: int) -> set[int]:
        """Process the environments' answers; wait only if no conversation can be sampled meanwhile."""
        numbers: set[int] = set()
        while waiting - numbers:
            together = self.params.pace.together
            wait = together or len(waiting - numbers) == active
            answers = self.asker.collect(wait=wait)
            # Always in the order of the conversations, because the next batch depends on it.
            for number in sorted(answers):
                self.conversations[number].take_answer(answers[number], self.renderer, self.params)
                if self.conversations[number].stop_reason is not None:
                    self._close(number)
            numbers |= answers.keys()
            if not together:
                break
        return numbers

    def _close(self, number: int) -> None:
        """Close the conversation's episode once, if the environment was ever called."""
        conversation = self.conversations[number]
        if conversation.has_asked and not conversation.is_closed:
            conversation.is_closed = True
            self.asker.close(number, conversation.close)


def _let_remember(requests: Sequence[ConversationRequest]) -> list[ConversationRequest]:
    """Return the requests with clients that cache the earlier turns, if their backend can."""
    clients = [request.prompted_client.client for request in requests]
    # Conversations must keep sharing a client, so that they share its calls.
    remembering = {
        key: client.remember_texts() for key, client in zip(map(id, clients), clients, strict=True)
    }
    return [
        replace(
            request,
            prompted_client=replace(request.prompted_client, client=remembering[id(client)]),
        )
        for request, client in zip(requests, clients, strict=True)
    ]


def choose_power(room: int) -> int:
    """Return the greatest power of two that fits."""
    return 1 << (room.bit_length() - 1)


def _sample_turns(active: "Sequence[_OpenConversation]", params: SamplingParams) -> list[Sample]:
    """Sample the next tokens of each conversation."""
    clients = [conversation.speaker.client for conversation in active]
    requests = [conversation.build_request() for conversation in active]
    lengths = [conversation.choose_length(params) for conversation in active]
    return sample_to_lengths(clients, requests, lengths, params)


def _open_conversation(request: ConversationRequest, vocabulary: int) -> "_OpenConversation":
    """Return a conversation in progress, with its beginning if it has one."""
    conversation = _OpenConversation(request, vocabulary)
    beginning = request.beginning
    if beginning is None:
        return conversation
    return replace(
        conversation,
        tokens=beginning.tokens.ids.tolist(),
        parts=[beginning.tokens],
        turns=list(beginning.turns),
        turn_start=len(beginning.tokens),
    )


@dataclass(slots=True)
class _OpenConversation:
    """A conversation in progress: its token ids, the same tokens as parts, and its turns.

    The unfinished turn begins at token `turn_start`, and the opening consists of the first `opening`
    tokens. `has_asked` is True once the environment was asked for a reply, `is_closed` once its
    episode was told to close. Only `ask` and `close` touch the episode, and they may run in a
    separate thread.
    """

    request: ConversationRequest
    vocabulary: int
    tokens: list[int] = field(default_factory=list)
    parts: list[Tokens] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    turn_start: int = 0
    opening: int = 0
    has_asked: bool = False
    is_closed: bool = False
    stop_reason: StopReason | None = None
    episode: Episode | None = None
    rejections: list[RejectedValue] = field(default_factory=list)
    rejected: tuple[Kind, ...] = ()

    @property
    def speaker(self) -> PromptedClient:
        """The model that writes the next turn."""
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
        # With only powers of two, conversations of different lengths often need the same number of
        # tokens and share one sampling call.
        return choose_power(self.count_room(params))

    def build_request(self) -> SampleRequest:
        """Return the request for the next tokens of the conversation."""
        prompt_tokens = (*self.speaker.prompt_tokens, *self.tokens)
        return SampleRequest(prompt_tokens, seed_of(self.request.seed, "turn", len(self.tokens)))

    def append_sample(self, sample: Sample) -> None:
        """Add sampled tokens to the unfinished turn."""
        self._append(Tokens.from_sample(sample, "student", 0))

    def end_turn(self, renderer: Renderer, params: SamplingParams) -> bool:
        """End the turn; return True if the environment has to answer it.

        Otherwise the turn was truncated, and the conversation is over.
        """
        tokens = self.tokens[self.turn_start :]
        # Check the speaker before the turn is appended: the next speaker may be the student.
        if self.speaker is self.request.opening:
            self.opening = len(self.tokens)
        self.turns.append(Turn("assistant", len(tokens), renderer.decode(tokens)))
        if not params.should_stop(tokens):
            self.stop_reason = "length"
            return False
        self.has_asked = True
        return True

    def ask(self, environment: OpensEpisodes) -> Answer:
        """Return the episode's answer to the newest turn, or the error that it raised."""
        with collect_rejections() as rejections:
            try:
                answer = self._step(environment, self.turns[-1].text)
            except Cancelled:
                raise
            # An environment is foreign code and may fail in any way.
            except (Exception, SystemExit) as error:
                answer = error if isinstance(error, Exception) else RuntimeError(repr(error))
        self.rejections = rejections
        return answer

    def take_answer(self, observation: Answer, renderer: Renderer, params: SamplingParams) -> None:
        """Append the episode's reply.

        The conversation ends if the environment has no reply, or if no further turn would fit.
        """
        self.rejected += list_kinds(self.rejections)
        self.rejections = []
        if isinstance(observation, Exception):
            self.rejected += (classify_error(observation),)
            self.stop_reason = "timeout" if isinstance(observation, TimeoutError) else "error"
            self.note_failure(observation)
            return
        turn = self.turns[-1]
        self.notes |= observation.notes
        self.turns[-1] = replace(turn, calls=observation.calls, reward=observation.reward)
        if not observation.messages and not observation.tokens:
            self.stop_reason = observation.stop_reason
        # The environment answers the last turn too, because its calls and reward count.
        elif params.max_turns is not None and self.count_turns() >= params.max_turns:
            self.stop_reason = "turns"
        elif self._is_too_long(observation.messages, renderer, params):
            self.stop_reason = "length"
        elif observation.tokens:
            messages = [Message("user", renderer.decode(list(observation.tokens)))]
            self._append_reply(messages, observation.tokens, params)
        else:
            reply_tokens = renderer.render_reply(*observation.messages)
            warning = _find_warning(observation, reply_tokens, renderer)
            self._append_reply(observation.messages, reply_tokens, params, warning)

    def _is_too_long(
        self, messages: Sequence[Message], renderer: Renderer, params: SamplingParams
    ) -> bool:
        """Return True if the texts have more characters than the remaining tokens can hold."""
        characters = sum(len(message.content) for message in messages)
        return characters > self.count_room(params) * renderer.longest_token

    def awaits_answer(self) -> bool:
        """Return True if the environment has to answer before the model continues."""
        return bool(self.turns) and self.turns[-1].role == "assistant"

    def count_turns(self) -> int:
        """Return the number of the model's turns."""
        return sum(turn.role == "assistant" for turn in self.turns)

    def _step(self, environment: OpensEpisodes, turn: str) -> Observation:
        if self.episode is None:
            seed = self.request.episode_seed
            episode = environment.open(
                self.request.prompt, self.episode_seed if seed is None else seed
            )
            if not isinstance(episode, Episode):
                kind = type(episode).__name__
                raise Refused(
                    "type", f"open() returned a {kind}, which is not below practicum.ports.Episode"
                )
            self.episode = episode
            self._replay(self.episode)
        episode = self.episode
        observation = (
            episode.answer_tokens(self._read_turn()) if episode.takes_tokens else episode.step(turn)
        )
        return accept_observation(observation, self.vocabulary)

    @property
    def episode_seed(self) -> int:
        """The default seed of the conversation's episode."""
        return seed_of(self.request.seed, "episode")

    def _replay(self, episode: Episode) -> None:
        """Replay the turns of the beginning; RuntimeError if the environment answers differently."""
        beginning = self.request.beginning
        turns = () if beginning is None else beginning.turns
        for turn, answer in pairwise(turns):
            if turn.role != "assistant":
                continue
            observation = accept_observation(episode.step(turn.text), self.vocabulary)
            text = "\n".join(message.content for message in observation.messages)
            if text != answer.text:
                raise RuntimeError(
                    "the environment no longer answers the beginning as it did: "
                    f"{excerpt(text)!r} instead of {excerpt(answer.text)!r}"
                )

    def _read_turn(self) -> SampledTurn:
        """Return the newest turn as tokens with their log-probabilities."""
        before = (*self.request.prompted_client.prompt_tokens, *self.tokens[: self.turn_start])
        turn = Tokens.join(self.parts).cut(self.turn_start)
        return SampledTurn(before, tuple(turn.ids.tolist()), tuple(turn.sampling_logprobs.tolist()))

    def _append_reply(
        self,
        messages: Sequence[Message],
        tokens: Sequence[int],
        params: SamplingParams,
        warning: slice = slice(0),
    ) -> None:
        count = len(tokens)
        if count >= self.count_room(params):
            self.stop_reason = "length"
            return
        reply = Tokens.from_text(tokens, "environment", 0, in_loss=False)
        reply.authors[warning] = AUTHORS.index("harness")
        self._append(reply)
        text = "\n".join(message.content for message in messages)
        self.turns.append(Turn(messages[0].role, count, text))
        self.turn_start = len(self.tokens)

    def close(self) -> Exception | None:
        """Close the episode if it is open, and return the error if closing failed."""
        episode, self.episode = self.episode, None
        try:
            if episode is not None:
                episode.close()
        except Cancelled:
            raise
        except Exception as error:
            return error
        return None

    def note_failure(self, error: Exception) -> None:
        """Record an error of the environment in the notes, without changing the stop reason."""
        self.notes["error"] = excerpt(f"{type(error).__name__}: {error}")

    def _append(self, tokens: Tokens) -> None:
        self.tokens += tokens.ids.tolist()
        self.parts.append(tokens)

    def finish(self) -> Conversation:
        """Return the finished conversation."""
        assert self.stop_reason is not None, (
            "`finish` is called only after the conversation has ended"
        )
        tokens = Tokens.join(self.parts)
        warnings = tokens.is_by("harness")
        return Conversation(
            tokens.to_sample(self.stop_reason),
            ~(tokens.is_by("environment") | warnings),
            tuple(self.turns),
            self.notes,
            self.opening,
            self.rejected,
            warnings if warnings.any() else None,
        )


def _find_warning(observation: Observation, reply: Sequence[int], renderer: Renderer) -> slice:
    """Return the place of the warning's tokens in a reply: what the reply without it lacks."""
    message, warning = observation.message, observation.warning
    if message is None or not warning:
        return slice(0)
    plain = replace(message, content=message.content.removeprefix(warning))
    plain_reply = renderer.render_reply(plain, *observation.more)
    start = _count_equal(reply, plain_reply)
    end = _count_equal(reply[start:][::-1], plain_reply[start:][::-1])
    return slice(start, len(reply) - end)


def _count_equal(tokens: Sequence[int], plain: Sequence[int]) -> int:
    """Return the number of leading tokens that two texts share."""
    pairs = enumerate(zip(tokens, plain, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(tokens), len(plain)))
