"""Writing the rollouts of a step: a plan says who writes each completion, and each author writes its own in one go.

What is written in a place depends on (seed, step, prompt, number), never on what is written beside it.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from practicum.core.randomness import seeds_of
from practicum.errors import CapabilityError, DataError
from practicum.ports import (
    Environment,
    LockstepClient,
    MixedRequest,
    PromptedClient,
    SamplingClient,
    Task,
    Teacher,
    TeacherRequest,
)
from practicum.rollouts.batch import RolloutBatch, RolloutKey, enumerate_keys, permute
from practicum.rollouts.conversation import Conversation, ConversationRequest, run_conversations
from practicum.rollouts.sources import (
    Join,
    Mix,
    Prefix,
    Source,
    TeacherSource,
    TokenMix,
    conversation_problems,
    explain_no_generation,
)
from practicum.rollouts.tape import RolloutArchive
from practicum.text import Renderer
from practicum.types import AUTHORS, Prompt, Rollout, Sample, SampleRequest, SamplingParams
from practicum.types import Source as Origin

Author = Literal["student", "dataset", "teacher", "replay", "token_mix", "prefix", "cache"]


@dataclass(frozen=True, slots=True)
class RolloutWriters:
    """Who can write: the student, the teacher, and what was written before this step; `environment` is who answers them."""

    student: SamplingClient
    teacher: Teacher
    renderer: Renderer
    archive: RolloutArchive = field(default_factory=RolloutArchive)
    environment: Environment | None = None


def collect_rollouts(
    batch: RolloutBatch, source: Source, authors: RolloutWriters, params: SamplingParams
) -> list[Rollout]:
    """The completions of a batch from its source; `policy_version` counts the steps that the student had learned.

    The archive learns what the student wrote, for the steps to come. Where there is an environment, a completion is a
    conversation with it.
    """
    if authors.environment is not None and (problems := conversation_problems(source)):
        raise CapabilityError(problems)
    plan = _assign_writers(batch, source, authors.archive)
    writing = _BatchWriter(batch, source, authors, params)
    written: dict[int, Rollout] = {}
    for author in dict.fromkeys(author for _, author in plan):
        rows = [row for row, (_, writer) in enumerate(plan) if writer == author]
        written.update(zip(rows, writing.by(author, [plan[row][0] for row in rows]), strict=True))
    authors.archive.newest.extend(
        written[row] for row, (_, author) in enumerate(plan) if author == "student"
    )
    return [written[row] for row in range(len(plan))]


def sample_rollouts(
    batch: RolloutBatch,
    client: SamplingClient,
    renderer: Renderer,
    params: SamplingParams,
    environment: Environment | None = None,
) -> list[Rollout]:
    """The student's own completions of a batch, or its conversations with an environment."""
    places = [place for group in enumerate_keys(batch) for place in group]
    return _sampled(batch, places, client, renderer, params, environment)


def sample_teacher_rollouts(
    batch: RolloutBatch,
    teacher: Teacher,
    renderer: Renderer,
    params: SamplingParams,
    environment: Environment | None = None,
) -> list[Rollout] | None:
    """The teacher's own completions of a batch, or its conversations; None where it writes none."""
    places = [place for group in enumerate_keys(batch) for place in group]
    return _taught(batch, places, teacher, renderer, params, environment)


def as_environment(task: Task) -> Environment | None:
    """The task, where it answers back."""
    return task if isinstance(task, Environment) else None


def add_rewards(rollouts: Sequence[Rollout], task: Task) -> list[Rollout]:
    """The same rollouts with the task's reward."""
    return [replace(rollout, reward=task.reward(rollout)) for rollout in rollouts]


def _assign_writers(
    batch: RolloutBatch, source: Source, archive: RolloutArchive
) -> list[tuple[RolloutKey, Author]]:
    """Each place of the batch with who writes it."""
    if isinstance(source, Join):
        groups = enumerate_keys(batch, more=source.n)
        return [
            (place, "student" if order < batch.n else source.other)
            for group in groups
            for order, place in enumerate(group)
        ]
    places = [place for group in enumerate_keys(batch) for place in group]
    if isinstance(source, Mix):
        return [(place, _choose_writer(batch, source, place, archive)) for place in places]
    return [(place, source.type) for place in places]


def _choose_writer(
    batch: RolloutBatch, source: Mix, place: RolloutKey, archive: RolloutArchive
) -> Author:
    """The student with the source's probability, and as long as there is nothing to replay."""
    if _seed(batch, "mix", place) < source.student * 2**63 or (
        source.other == "replay" and not archive.newest
    ):
        return "student"
    return source.other


@dataclass(frozen=True, slots=True)
class _BatchWriter:
    """One batch being written; each method fills the places of one author."""

    batch: RolloutBatch
    source: Source
    authors: RolloutWriters
    params: SamplingParams

    def by(self, author: str, places: Sequence[RolloutKey]) -> list[Rollout]:
        methods = {
            "student": self.student,
            "dataset": self.dataset,
            "teacher": self.teacher,
            "replay": self.replay,
            "token_mix": self.token_mix,
            "prefix": self.prefix,
            "cache": self.cache,
        }
        return methods[author](places)

    def student(self, places: Sequence[RolloutKey]) -> list[Rollout]:
        authors = self.authors
        return _sampled(
            self.batch, places, authors.student, authors.renderer, self.params, authors.environment
        )

    def dataset(self, places: Sequence[RolloutKey]) -> list[Rollout]:
        return self._rollouts(places, self._given(places, self.params.max_new_tokens), "dataset")

    def teacher(self, places: Sequence[RolloutKey]) -> list[Rollout]:
        own = self.source.temperature if isinstance(self.source, TeacherSource) else None
        params = self.params if own is None else replace(self.params, temperature=own)
        authors = self.authors
        rollouts = _taught(
            self.batch, places, authors.teacher, authors.renderer, params, authors.environment
        )
        if rollouts is None:
            raise CapabilityError(explain_no_generation(self.source, "this teacher"))
        return [
            replace(rollout, policy_logprobs=torch.full_like(rollout.policy_logprobs, math.nan))
            for rollout in rollouts
        ]

    def replay(self, places: Sequence[RolloutKey]) -> list[Rollout]:
        """Old rollouts of any prompt, numbered on from that prompt's places in this batch."""
        newest = self.authors.archive.newest
        taken = Counter(prompt.id for prompt in self.batch.prompts for _ in range(self.batch.n))
        rollouts = []
        for place in places:
            old = newest[_seed(self.batch, "replay", place) % len(newest)]
            rollouts.append(replace(old, sample=taken[old.prompt.id]))
            taken[old.prompt.id] += 1
        return rollouts

    def cache(self, places: Sequence[RolloutKey]) -> list[Rollout]:
        """The tape's completions of each prompt, in an order of their own in each step."""
        return [
            self._cached(place, self.authors.archive.tape.get(place.prompt.id, ()))
            for place in places
        ]

    def _cached(self, place: RolloutKey, recorded: Sequence[Rollout]) -> Rollout:
        if len(recorded) < self.batch.n:
            raise DataError(
                f"the tape of rollout.source holds {len(recorded)} completions of prompt {place.prompt.id!r}, and rollout.n asks "
                f"for {self.batch.n}; record more with a run over the same prompts, or ask for fewer"
            )
        order = permute(len(recorded), self.batch.seed, "cache", self.batch.step, place.prompt.id)
        return replace(
            recorded[order[place.number % len(order)]], sample=place.number, policy_version=0
        )

    def token_mix(self, places: Sequence[RolloutKey]) -> list[Rollout]:
        """Completions drawn from student and teacher at once, one call for each of the teacher's clients."""
        assert isinstance(self.source, TokenMix)
        student = _lockstep(self.authors.student, "the student's backend")
        voices, prompts = [self._voice(place.prompt) for place in places], self._prompts(places)
        samples: dict[int, Sample] = {}
        for number in dict.fromkeys(id(voice.client) for voice in voices):
            rows = [row for row, voice in enumerate(voices) if id(voice.client) == number]
            teacher = _lockstep(voices[rows[0]].client, "the teacher")
            requests = [
                MixedRequest(
                    prompts[row], voices[row].prompt_tokens, self._student_seed(places[row])
                )
                for row in rows
            ]
            mixed = student.sample_mixed(requests, teacher, self.source.teacher, self.params)
            samples.update(zip(rows, mixed, strict=True))
        return self._rollouts(places, [samples[row] for row in range(len(places))], "student")

    def prefix(self, places: Sequence[RolloutKey]) -> list[Rollout]:
        """The student's continuations of the first tokens of others; an answer that ends within them has none."""
        assert isinstance(self.source, Prefix)
        begin = self._begun if self.source.origin == "teacher" else self._given
        length = min(self.source.length, self.params.max_new_tokens)
        begun = begin(places, length)
        rows, prompts = (
            [row for row, sample in enumerate(begun) if sample.stop_reason == "length"],
            self._prompts(places),
        )
        requests = [
            SampleRequest(
                (*prompts[row], *begun[row].tokens.tolist()), self._student_seed(places[row])
            )
            for row in rows
        ]
        rest = replace(self.params, max_new_tokens=self.params.max_new_tokens - length)
        goes_on = dict(zip(rows, self.authors.student.sample(requests, rest), strict=True))
        whole = [
            _joined(sample, goes_on[row]) if row in goes_on else sample
            for row, sample in enumerate(begun)
        ]
        origin, student = (
            torch.tensor(AUTHORS.index(author), dtype=torch.uint8)
            for author in (self.source.origin, "student")
        )
        rollouts = []
        for row, rollout in enumerate(self._rollouts(places, whole, self.source.origin)):
            own = torch.arange(len(rollout.tokens)) >= len(begun[row].tokens)
            if row in goes_on:
                rollout = replace(
                    rollout, source="student", authors=torch.where(own, student, origin)
                )
            rollouts.append(replace(rollout, loss_mask=own))
        return rollouts

    def _given(self, places: Sequence[RolloutKey], limit: int) -> list[Sample]:
        """At most `limit` tokens of the prompts' own responses, which nobody sampled."""
        return [self._response(place.prompt, limit) for place in places]

    def _response(self, prompt: Prompt, limit: int) -> Sample:
        text = prompt.answer if prompt.response is None else prompt.response
        if text is None:
            raise DataError(
                f"prompt {prompt.id!r} has neither a response nor an answer, which rollout.source {self.source.type!r} learns "
                "from; add one to its row, or write source: student"
            )
        renderer = self.authors.renderer
        tokens = renderer.encode_answer(text, limit)
        if any(token in renderer.stop_ids for token in tokens[:-1]):
            raise DataError(
                f"the response of prompt {prompt.id!r} has a stop token before its end, where the student would stop; take it "
                "out of the text, or out of student.stop"
            )
        ends = bool(tokens) and tokens[-1] in renderer.stop_ids
        unknown = torch.full((len(tokens),), math.nan)
        ids = torch.tensor(tokens, dtype=torch.long)
        return Sample(ids, torch.zeros(len(tokens)), unknown, "stop" if ends else "length")

    def _begun(self, places: Sequence[RolloutKey], limit: int) -> list[Sample]:
        """At most `limit` tokens of the teacher's own answers in its own context."""
        requests = _asked(self.batch, places)
        samples = self.authors.teacher.sample(requests, replace(self.params, max_new_tokens=limit))
        if samples is None:
            raise CapabilityError(explain_no_generation(self.source, "this teacher"))
        return [
            replace(sample, policy_logprobs=torch.full_like(sample.policy_logprobs, math.nan))
            for sample in samples
        ]

    def _voice(self, prompt: Prompt) -> PromptedClient:
        voice = self.authors.teacher.voice(prompt)
        if voice is None:
            raise CapabilityError(explain_no_generation(self.source, "this teacher"))
        return voice

    def _prompts(self, places: Sequence[RolloutKey]) -> list[tuple[int, ...]]:
        return _rendered(places, self.authors.renderer)

    def _student_seed(self, place: RolloutKey) -> int:
        return _seed(self.batch, self.batch.stream, place)

    def _rollouts(
        self, places: Sequence[RolloutKey], samples: Sequence[Sample], source: Origin
    ) -> list[Rollout]:
        return _as_rollouts(
            self.batch, places, samples, self.authors.renderer, self._prompts(places), source
        )


def _sampled(
    batch: RolloutBatch,
    places: Sequence[RolloutKey],
    client: SamplingClient,
    renderer: Renderer,
    params: SamplingParams,
    environment: Environment | None,
) -> list[Rollout]:
    """The student's completions of some places."""
    prompts, seeds = _rendered(places, renderer), _seeds(batch, batch.stream, places)
    requests = [SampleRequest(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    if environment is None:
        return _as_rollouts(
            batch, places, client.sample(requests, params), renderer, prompts, "student"
        )
    openings = [
        ConversationRequest(
            place.prompt, PromptedClient(client, request.prompt_tokens), request.seed
        )
        for place, request in zip(places, requests, strict=True)
    ]
    conversations = run_conversations(openings, environment, renderer, params)
    return _complete(batch, places, conversations, renderer, prompts, "student")


def _taught(
    batch: RolloutBatch,
    places: Sequence[RolloutKey],
    teacher: Teacher,
    renderer: Renderer,
    params: SamplingParams,
    environment: Environment | None,
) -> list[Rollout] | None:
    """The teacher's completions of some places, or None where it writes none."""
    requests = _asked(batch, places)
    prompts = _rendered(places, renderer)
    if environment is None:
        samples = teacher.sample(requests, params)
        return (
            None
            if samples is None
            else _as_rollouts(batch, places, samples, renderer, prompts, "teacher")
        )
    voices = [teacher.voice(place.prompt) for place in places]
    heard = [voice for voice in voices if voice is not None]
    if len(heard) < len(voices):
        return None
    if not all(voice.accepts_tokens for voice in heard):
        raise CapabilityError(
            "this teacher answers messages and cannot go on from tokens, so it can hold no conversation with the task; "
            "write source: student and evaluation.teacher: false, or take a teacher that completes tokens"
        )
    openings = [
        ConversationRequest(request.prompt, voice, request.seed)
        for request, voice in zip(requests, heard, strict=True)
    ]
    conversations = run_conversations(openings, environment, renderer, params)
    return _complete(batch, places, conversations, renderer, prompts, "teacher")


def _complete(
    batch: RolloutBatch,
    places: Sequence[RolloutKey],
    conversations: Sequence[Conversation],
    renderer: Renderer,
    prompts: Sequence[tuple[int, ...]],
    source: Origin,
) -> list[Rollout]:
    """Return conversations in their places."""
    samples = [conversation.sample for conversation in conversations]
    rollouts = _as_rollouts(batch, places, samples, renderer, prompts, source)
    return [
        conversation.complete(rollout)
        for conversation, rollout in zip(conversations, rollouts, strict=True)
    ]


def _rendered(places: Sequence[RolloutKey], renderer: Renderer) -> list[tuple[int, ...]]:
    return renderer.render_all([place.prompt.messages for place in places])


def _as_rollouts(
    batch: RolloutBatch,
    places: Sequence[RolloutKey],
    samples: Sequence[Sample],
    renderer: Renderer,
    prompts: Sequence[tuple[int, ...]],
    source: Origin,
) -> list[Rollout]:
    """Return samples in their places, learned from at every token."""
    version = batch.policy_version
    texts = renderer.decode_all([sample.tokens.tolist() for sample in samples])
    return [
        Rollout(
            prompt=place.prompt,
            prompt_tokens=prompt_tokens,
            tokens=sample.tokens,
            loss_mask=torch.ones(len(sample.tokens), dtype=torch.bool),
            sampling_logprobs=sample.sampling_logprobs,
            policy_logprobs=sample.policy_logprobs,
            policy_version=version,
            stop_reason=sample.stop_reason,
            text=text,
            sample=place.number,
            source=source,
        )
        for place, prompt_tokens, sample, text in zip(places, prompts, samples, texts, strict=True)
    ]


def _joined(beginning: Sample, rest: Sample) -> Sample:
    return Sample(
        torch.cat([beginning.tokens, rest.tokens]),
        torch.cat([beginning.sampling_logprobs, rest.sampling_logprobs]),
        torch.cat([beginning.policy_logprobs, rest.policy_logprobs]),
        rest.stop_reason,
    )


def _asked(batch: RolloutBatch, places: Sequence[RolloutKey]) -> list[TeacherRequest]:
    seeds = _seeds(batch, "teacher", places)
    return [TeacherRequest(place.prompt, seed) for place, seed in zip(places, seeds, strict=True)]


def _seeds(batch: RolloutBatch, name: str, places: Sequence[RolloutKey]) -> list[int]:
    """Return the random stream of a name at each place."""
    return seeds_of(
        [(batch.seed, name, batch.step, place.prompt.id, place.number) for place in places]
    )


def _seed(batch: RolloutBatch, name: str, place: RolloutKey) -> int:
    return _seeds(batch, name, [place])[0]


def _lockstep(client: SamplingClient, who: str) -> LockstepClient:
    if not isinstance(client, LockstepClient):
        raise CapabilityError(
            f"rollout.source 'token_mix' decodes teacher and student in lockstep, which {who} cannot; write "
            "source: mix(other=teacher), or take local models for both"
        )
    return client
