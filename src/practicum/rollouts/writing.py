"""Collect the rollouts of a step: a plan assigns a writer to each key, each writer fills its keys.

A completion depends on (seed, step, prompt, number), never on the completions beside it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import torch

from practicum.core.waits import show_wait
from practicum.errors import CapabilityError, DataError
from practicum.foreign import describe_error, name_object
from practicum.ports import (
    Expert,
    LockstepClient,
    MixedRequest,
    OpensEpisodes,
    PromptedClient,
    SamplingClient,
    Task,
    Teacher,
)
from practicum.ports.gate import ask_reward, report_rejections
from practicum.ports.notes import Note
from practicum.ports.scoring import RejectingScorer, Scorer
from practicum.rollouts.annotating import AnswerNoter
from practicum.rollouts.answer_tokens import Tokens
from practicum.rollouts.batch import (
    RolloutBatch,
    RolloutKey,
    call_by_group,
    list_all_keys,
    list_keys,
    shuffle_indices,
)
from practicum.rollouts.correcting import TurnCorrector
from practicum.rollouts.function_source import FunctionSource
from practicum.rollouts.replacing import StepReplacer
from practicum.rollouts.resampling import CleanResampler
from practicum.rollouts.responses import encode_response, encode_written
from practicum.rollouts.restating import Restater
from practicum.rollouts.retrying import Retrier
from practicum.rollouts.sampling import (
    RolloutSampler,
    compute_key_seed,
    require_tokens,
)
from practicum.rollouts.search import AgreementCheck, StepSearch
from practicum.rollouts.segments import Segments
from practicum.rollouts.sources import (
    Correct,
    Join,
    Mix,
    Prefix,
    Replace,
    Resample,
    Restate,
    Retry,
    Search,
    Served,
    Source,
    TeacherSource,
    TokenMix,
    Turns,
    explain_no_generation,
    list_answer_problems,
    list_conversation_problems,
)
from practicum.rollouts.splitting import TurnSplitter
from practicum.rollouts.tape import RolloutArchive
from practicum.rollouts.traffic import Traffic
from practicum.text import Renderer
from practicum.types import Prompt, Rollout, Sample, SampleRequest, SamplingParams, StopReason
from practicum.types import Source as Origin

SampleOrRollout = TypeVar("SampleOrRollout", Sample, Rollout)

Writer = Literal[
    "student",
    "dataset",
    "teacher",
    "reference",
    "replay",
    "token_mix",
    "prefix",
    "search",
    "replace",
    "retry",
    "restate",
    "correct",
    "resample",
    "cache",
    "traces",
    "turns",
    "served",
    "function",
]


@dataclass(frozen=True, slots=True)
class RolloutWriters:
    """The writers of rollouts: student, teacher and reference, and the archive of earlier rollouts.

    With an `environment`, every completion is a conversation with it. Some sources ask the `task`,
    one of the `scorers`, or make one of the `notes`.
    """

    student: SamplingClient
    teacher: Teacher
    renderer: Renderer
    archive: RolloutArchive = field(default_factory=RolloutArchive)
    environment: OpensEpisodes | None = None
    reference: Teacher | None = None
    task: Task | None = None
    scorers: Mapping[str, Scorer] = field(default_factory=dict)
    notes: Mapping[str, Note] = field(default_factory=dict)
    traffic: Traffic | None = None
    segments: Segments | None = None


def collect_rollouts(
    batch: RolloutBatch, source: Source, writers: RolloutWriters, params: SamplingParams
) -> list[Rollout]:
    """Return the completions of a batch from its source, and add the student's to the archive.

    `policy_version` of a rollout counts the optimizer steps behind the student that sampled it.
    """
    is_conversation = writers.environment is not None
    list_problems = list_conversation_problems if is_conversation else list_answer_problems
    if problems := list_problems(source):
        raise CapabilityError(problems)
    if isinstance(source, Served) and writers.traffic is not None:
        return writers.traffic.collect(batch, writers.renderer, writers.student, params)
    sampler = RolloutSampler(batch, writers.renderer, params, writers.environment)
    if writers.segments is not None:
        return writers.segments.collect(sampler, writers.student)
    if isinstance(source, Turns):
        assert writers.task is not None
        return TurnSplitter(sampler, writers.student, writers.task).collect(list_all_keys(batch))
    plan = _assign_writers(batch, source, writers.archive)
    batch_writer = _BatchWriter(sampler, source, writers)

    def fill(rows: list[int]) -> list[Rollout]:
        return batch_writer.fill(plan[rows[0]][1], [plan[row][0] for row in rows])

    # Each writer fills all of its keys in one call, so that sampling is batched. Every key has a
    # random stream of its own, so the grouping does not change what is sampled.
    rollouts = call_by_group([writer for _, writer in plan], fill)
    # Without states: a resumed run reads the replay buffer from its rows, which hold none.
    writers.archive.newest.extend(
        replace(rollout, states=None)
        for rollout, (_, writer) in zip(rollouts, plan, strict=True)
        if writer == "student"
    )
    return rollouts


def sample_rollouts(
    batch: RolloutBatch,
    client: SamplingClient,
    renderer: Renderer,
    params: SamplingParams,
    environment: OpensEpisodes | None = None,
) -> list[Rollout]:
    """Return the student's completions of a batch, or its conversations with an environment."""
    sampler = RolloutSampler(batch, renderer, params, environment)
    return sampler.sample_student(list_all_keys(batch), client)


def sample_teacher_rollouts(
    batch: RolloutBatch,
    teacher: Teacher,
    renderer: Renderer,
    params: SamplingParams,
    environment: OpensEpisodes | None = None,
) -> list[Rollout] | None:
    """Return the teacher's completions or conversations, or None if it cannot generate."""
    sampler = RolloutSampler(batch, renderer, params, environment)
    return sampler.sample_teacher(list_all_keys(batch), teacher)


def add_rewards(rollouts: Sequence[Rollout], task: Task) -> list[Rollout]:
    """Return the rollouts with the task's rewards."""
    rewarded = []
    with report_rejections(), show_wait("rewards", len(rollouts)) as wait:
        for rollout in rollouts:
            # A search has asked the verifier already.
            if rollout.reward is None:
                rollout = ask_reward(task, rollout)
            rewarded.append(rollout)
            wait.advance()
    return rewarded


def _assign_writers(
    batch: RolloutBatch, source: Source, archive: RolloutArchive
) -> list[tuple[RolloutKey, Writer]]:
    """Return the keys of the batch, each with its writer."""
    if isinstance(source, Join):
        count = batch.n if source.student is None else source.student
        students: list[Writer] = ["student" for _ in range(count)]
        writers = students + [writer for writer in source.others for _ in range(source.n)]
        return [
            pair
            for group in list_keys(batch, len(writers))
            for pair in zip(group, writers, strict=True)
        ]
    keys = list_all_keys(batch)
    if isinstance(source, Mix):
        return [(key, _choose_writer(batch, source, key, archive)) for key in keys]
    return [(key, source.type) for key in keys]


def _choose_writer(
    batch: RolloutBatch, source: Mix, key: RolloutKey, archive: RolloutArchive
) -> Writer:
    """Return the student with the source's probability, and while there is nothing to replay."""
    # Seeds are uniform below 2**63, so the seed itself is the coin.
    if compute_key_seed(batch, "mix", key) < source.student * 2**63 or (
        source.other == "replay" and not archive.newest
    ):
        return "student"
    return source.other


@dataclass(frozen=True, slots=True)
class _BatchWriter:
    """The writers of one batch: each `_write_*` method returns the rollouts of its keys."""

    sampler: RolloutSampler
    source: Source
    writers: RolloutWriters

    def fill(self, writer: Writer, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return the rollouts of some keys from one writer."""
        match writer:
            # Without traffic, as on paper, the student answers the task's own prompts.
            case "student" | "served" | "turns":
                return self.sampler.sample_student(keys, self.writers.student)
            case "dataset":
                samples = self._truncate_responses(keys, self.sampler.params.max_new_tokens)
                prompts = self.sampler.render_prompts(keys)
                return self.sampler.build_rollouts(keys, prompts, samples, "dataset")
            case "teacher":
                return self._write_teacher(keys)
            case "reference":
                return self._write_reference(keys)
            case "replay":
                return self._write_replay(keys)
            case "token_mix":
                return self._write_token_mix(keys)
            case "prefix":
                return self._write_prefix(keys)
            case "search":
                return self._write_search(keys)
            case "replace":
                return self._write_replaced(keys)
            case "retry" | "restate":
                return self._write_noted(keys)
            case "resample":
                return self._write_resampled(keys)
            case "correct":
                return self._write_corrected(keys)
            case "function":
                return self._write_function(keys)
            case "cache" | "traces":
                return [self._recall(key) for key in keys]

    def _write_function(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return the answers of the user's function, which gets one seed per answer."""
        assert isinstance(self.source, FunctionSource)
        write, length = self.source.load(), self.sampler.params.max_new_tokens
        samples = []
        for key, seed in zip(keys, self.sampler.compute_seeds(keys), strict=True):
            try:
                text = write(key.prompt, seed)
            # The user's code may raise anything.
            except Exception as error:
                raise DataError(
                    f"rollout.source: {name_object(self.source.object)} fails for prompt "
                    f"{key.prompt.id!r}: {describe_error(error)}"
                ) from error
            samples.append(encode_written(key.prompt, text, self.writers.renderer, length))
        prompts = self.sampler.render_prompts(keys)
        return self.sampler.build_rollouts(keys, prompts, samples, "dataset")

    def _write_teacher(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        sampler = self.sampler
        # `mix` and `join` sample from the teacher too, at the temperature of the rollouts.
        if isinstance(self.source, TeacherSource) and self.source.temperature is not None:
            params = replace(sampler.params, temperature=self.source.temperature)
            sampler = replace(sampler, params=params)
        rollouts = sampler.sample_teacher(keys, self.writers.teacher)
        if rollouts is None:
            raise self._build_refusal()
        return _clear_policy_logprobs(rollouts)

    def _write_reference(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        reference = self.writers.reference
        if reference is not None:
            rollouts = self.sampler.sample_teacher(keys, reference, "reference")
            if rollouts is not None:
                return _clear_policy_logprobs(rollouts)
        raise CapabilityError(explain_no_generation(self.source, "the reference"))

    def _write_replay(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return old rollouts of any prompt, numbered after that prompt's keys in this batch."""
        batch, newest = self.sampler.batch, self.writers.archive.newest
        # The number tells the completions of a prompt apart, so an old rollout must not bring its
        # number along.
        counts: Counter[str] = Counter()
        for prompt in batch.prompts:
            counts[prompt.id] += batch.n
        rollouts = []
        for key in keys:
            replayed = newest[compute_key_seed(batch, "replay", key) % len(newest)]
            rollouts.append(replace(replayed, sample=counts[replayed.prompt.id]))
            counts[replayed.prompt.id] += 1
        return rollouts

    def _recall(self, key: RolloutKey) -> Rollout:
        """Return a recorded completion of the key's prompt; each step has an order of its own."""
        batch = self.sampler.batch
        recorded = self.writers.archive.recorded.get(key.prompt.id, ())
        if len(recorded) < batch.n:
            raise DataError(
                f"the tape of rollout.source holds {len(recorded)} completions of prompt "
                f"{key.prompt.id!r}, and rollout.n asks for {batch.n}; record more with a run over "
                "the same prompts, or ask for fewer"
            )
        order = shuffle_indices(len(recorded), batch.seed, "cache", batch.step, key.prompt.id)
        return replace(
            recorded[order[key.number % len(order)]], sample=key.number, policy_version=0
        )

    def _write_token_mix(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return completions from student and teacher at once, one call for each teacher client."""
        assert isinstance(self.source, TokenMix)
        student = _require_lockstep(self.writers.student, "the student's backend")
        clients = [self._bind_teacher(key.prompt) for key in keys]
        prompts, seeds = self.sampler.render_prompts(keys), self.sampler.compute_seeds(keys)
        share, params = self.source.teacher, self.sampler.params

        def sample(rows: list[int]) -> Sequence[Sample]:
            teacher = _require_lockstep(clients[rows[0]].client, "the teacher")
            requests = [
                MixedRequest(prompts[row], clients[row].prompt_tokens, seeds[row]) for row in rows
            ]
            return student.sample_mixed(requests, teacher, share, params)

        samples = call_by_group([id(client.client) for client in clients], sample)
        return self.sampler.build_rollouts(keys, prompts, samples, "student")

    def _write_prefix(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return the student's continuations of prefixes from teacher or dataset.

        A prefix that stops by itself has no continuation. Prefix tokens have no loss.
        """
        assert isinstance(self.source, Prefix)
        if self.source.turns is not None:
            openings = [self._bind_teacher(key.prompt) for key in keys]
            require_tokens(openings)
            return self.sampler.sample_student(
                keys, self.writers.student, openings, self.source.turns
            )
        origin, max_tokens = self.source.origin, self.sampler.params.max_new_tokens
        length = min(self.source.length, max_tokens)
        begin = self._sample_teacher_prefixes if origin == "teacher" else self._truncate_responses
        prefixes = begin(keys, length)
        rows = [row for row, prefix in enumerate(prefixes) if prefix.stop_reason == "length"]
        prompts, seeds = self.sampler.render_prompts(keys), self.sampler.compute_seeds(keys)
        requests = [
            SampleRequest((*prompts[row], *prefixes[row].tokens.tolist()), seeds[row])
            for row in rows
        ]
        params = replace(self.sampler.params, max_new_tokens=max_tokens - length)
        continuations = self.writers.student.sample(requests, params)
        version = self.sampler.batch.policy_version
        answers = [Tokens.from_sample(prefix, origin, version).where(False) for prefix in prefixes]
        reasons: list[StopReason] = [prefix.stop_reason for prefix in prefixes]
        sources: list[Origin] = [origin for _ in prefixes]
        for row, continuation in zip(rows, continuations, strict=True):
            answers[row] += Tokens.from_sample(continuation, "student", version)
            reasons[row], sources[row] = continuation.stop_reason, "student"
        samples = list(map(Tokens.to_sample, answers, reasons))
        rollouts = self.sampler.build_rollouts(keys, prompts, samples, origin)
        return list(map(Tokens.put_into, answers, rollouts, sources))

    def _write_search(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return the answers of a tree search, marked by the model that has to agree, if any."""
        assert isinstance(self.source, Search) and self.writers.task is not None
        name = self.source.scorer
        scorer = None if name is None else self.writers.scorers[name]
        search = StepSearch(
            self.source, self.sampler, self.writers.task, self.writers.student, scorer
        )
        rollouts = search.collect(keys)
        role = self.source.agree
        model = self.writers.reference if role == "reference" else self.writers.teacher
        if role is None or model is None:
            return rollouts
        return AgreementCheck(role, model, self.sampler, self.writers.task).mark(rollouts)

    def _write_replaced(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return the student's answers, with what the scorer rejects written again."""
        source, writers = self.source, self.writers
        assert isinstance(source, Replace)
        scorer = writers.scorers[source.scorer]
        if not isinstance(scorer, RejectingScorer):
            raise CapabilityError(
                f"rollout.source: replace(scorer={source.scorer}): this scorer rejects no answers; "
                "take one that does, such as {type: judge, at_least: 5, ...}"
            )
        models = {"teacher": writers.teacher, "reference": writers.reference}
        replacer = StepReplacer(
            source, self.sampler, scorer, writers.student, models.get(source.by)
        )
        return replacer.collect(keys)

    def _write_noted(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return the student's answers, given again or restated with a note."""
        source, writers = self.source, self.writers
        assert isinstance(source, Retry | Restate) and writers.task is not None
        noter = AnswerNoter(self.sampler, writers.student, writers.task, writers.notes)
        kind = Retrier(source, noter) if isinstance(source, Retry) else Restater(source, noter)
        return kind.collect(keys)

    def _write_resampled(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return a choice among more of the student's answers."""
        source, writers = self.source, self.writers
        assert isinstance(source, Resample) and writers.task is not None
        return CleanResampler(source, self.sampler, writers.task, writers.student).collect(keys)

    def _write_corrected(self, keys: Sequence[RolloutKey]) -> list[Rollout]:
        """Return the student's conversations, the first wrong turn of each written anew."""
        source, writers = self.source, self.writers
        assert isinstance(source, Correct) and writers.task is not None
        assert writers.environment is not None, "single answers are refused before"
        scorer = None if source.scorer is None else writers.scorers[source.scorer]
        if scorer is not None and not isinstance(scorer, RejectingScorer):
            raise CapabilityError(
                f"rollout.source: correct(scorer={source.scorer}): this scorer rejects no turns; "
                "take one that does, such as {type: judge, step: turn, at_least: 5, ...}"
            )
        if scorer is None and not isinstance(writers.task, Expert):
            raise CapabilityError(
                "rollout.source: correct without a scorer asks the task's expert, and this task "
                "has none; write correct(scorer=NAME) with a judge"
            )
        model = writers.teacher if source.by == "teacher" else writers.reference
        assert model is not None, "a recipe without this writer is refused when it is read"
        corrector = TurnCorrector(
            source, self.sampler, writers.environment, writers.task, writers.student, model, scorer
        )
        return corrector.collect(keys)

    def _sample_teacher_prefixes(self, keys: Sequence[RolloutKey], length: int) -> list[Sample]:
        """Return at most `length` tokens of the teacher's completions in its own context."""
        requests = self.sampler.build_teacher_requests(keys)
        params = replace(self.sampler.params, max_new_tokens=length)
        samples = self.writers.teacher.sample(requests, params)
        if samples is None:
            raise self._build_refusal()
        return _clear_policy_logprobs(samples)

    def _truncate_responses(self, keys: Sequence[RolloutKey], length: int) -> list[Sample]:
        """Return at most `length` tokens of the prompts' responses, which no model sampled."""
        renderer, source = self.writers.renderer, self.source.type
        return [encode_response(key.prompt, renderer, source, length) for key in keys]

    def _bind_teacher(self, prompt: Prompt) -> PromptedClient:
        client = self.writers.teacher.bind_prompt(prompt)
        if client is None:
            raise self._build_refusal()
        return client

    def _build_refusal(self) -> CapabilityError:
        return CapabilityError(explain_no_generation(self.source, "this teacher"))


def _clear_policy_logprobs(items: Sequence[SampleOrRollout]) -> list[SampleOrRollout]:
    # The teacher's own log-probabilities say nothing of the student's policy.
    return [
        replace(item, policy_logprobs=torch.full_like(item.policy_logprobs, math.nan))
        for item in items
    ]


def _require_lockstep(client: SamplingClient, who: str) -> LockstepClient:
    if not isinstance(client, LockstepClient):
        raise CapabilityError(
            "rollout.source 'token_mix' decodes teacher and student in lockstep, which "
            f"{who} cannot; write source: mix(other=teacher), or take local models for both"
        )
    return client
