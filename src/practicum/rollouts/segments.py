"""Answers in segments: an answer longer than the limit per step continues in a later step.

The later step samples with newer weights. Every token keeps the log-probability and the version of
the policy that sampled it. A prompt is trained on once all of its answers have ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from practicum.core.randomness import seed_of
from practicum.errors import CheckpointError
from practicum.ports import SamplingClient
from practicum.rollouts.answer_tokens import Tokens
from practicum.rollouts.batch import RolloutKey, call_by_group, list_all_keys
from practicum.rollouts.sampling import RolloutSampler
from practicum.rollouts.tape import from_exact_floats, to_exact_floats
from practicum.types import Metrics, Prompt, Rollout, Sample, SampleRequest, StopReason, TextStates


@dataclass(frozen=True, slots=True)
class OpenAnswer:
    """An unfinished answer, and the step that began it.

    `states` are the states that the student computed, stored only for an answer with one segment.
    """

    step: int
    key: RolloutKey
    seed: int
    tokens: Tokens = field(default_factory=Tokens.empty)
    stop_reason: StopReason = "length"
    states: TextStates | None = None
    is_ended: bool = False

    @property
    def group(self) -> tuple[int, str]:
        """The group of the answer: all answers of one step to the same prompt."""
        return self.step, self.key.prompt.id


class _OpenRow(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    step: int
    prompt: str
    number: int
    seed: int
    tokens: list[int]
    sampling_logprobs: list[float | None]
    policy_logprobs: list[float | None]
    versions: list[int]
    ended: str | None


NOTHING = Sample(torch.zeros(0, dtype=torch.long), torch.zeros(0), torch.zeros(0), "length")
"""An answer before its first token."""


@dataclass(slots=True)
class Segments:
    """The answers that continue in a later step, oldest first, with at most `limit` tokens per step."""

    limit: int
    waiting: list[OpenAnswer] = field(default_factory=list)

    def collect(self, sampler: RolloutSampler, client: SamplingClient) -> list[Rollout]:
        """Start a batch's answers, continue the waiting answers, and return the finished groups.

        Sampling repeats until at least one prompt has all of its answers.
        """
        batch = sampler.batch
        keys = list_all_keys(batch)
        seeds = sampler.compute_seeds(keys)
        answers = self.waiting + [
            OpenAnswer(batch.step, key, seed) for key, seed in zip(keys, seeds, strict=True)
        ]
        ready: set[tuple[int, str]] = set()
        while not ready:
            answers = self._sample(answers, sampler, client)
            ready = _choose_groups(answers)
        # The student's states of a text are valid only for the weights of the step that computed them.
        self.waiting = [
            replace(answer, states=None) for answer in answers if answer.group not in ready
        ]
        return _build_rollouts([a for a in answers if a.group in ready], sampler)

    def measure(self, rollouts: Sequence[Rollout], step: int) -> Metrics:
        """Return the share of tokens from earlier steps, the mean token age, and the waiting answers.

        The age of a token is the number of updates since it was sampled.
        """
        ages = torch.cat([step - 1 - rollout.token_versions for rollout in rollouts]).double()
        return {
            "tokens_carried": (ages > 0).double().mean().item() if len(ages) else 0.0,
            "token_age": ages.mean().item() if len(ages) else 0.0,
            "answers_open": float(len(self.waiting)),
        }

    def save_state(self) -> list[dict[str, Any]]:
        """Return the waiting answers as JSON data, with exact floats."""
        return [
            _OpenRow(
                step=answer.step,
                prompt=answer.key.prompt.id,
                number=answer.key.number,
                seed=answer.seed,
                tokens=answer.tokens.ids.tolist(),
                sampling_logprobs=to_exact_floats(answer.tokens.sampling_logprobs),
                policy_logprobs=to_exact_floats(answer.tokens.policy_logprobs),
                versions=answer.tokens.versions.tolist(),
                ended=answer.stop_reason if answer.is_ended else None,
            ).model_dump()
            for answer in self.waiting
        ]

    def load_state(self, rows: Sequence[Mapping[str, Any]], prompts: Sequence[Prompt]) -> None:
        """Restore the answers of `save_state`; CheckpointError for an unknown prompt or bad row."""
        by_id = {prompt.id: prompt for prompt in prompts}
        try:
            read = [_OpenRow.model_validate(row) for row in rows]
            self.waiting = [_read_answer(row, by_id[row.prompt]) for row in read]
        except (ValidationError, KeyError):
            raise CheckpointError(
                "state.json: an unfinished answer is damaged or its prompt is not in this run; "
                "resume from an earlier checkpoint, or start a new run"
            ) from None

    def _sample(
        self, answers: Sequence[OpenAnswer], sampler: RolloutSampler, client: SamplingClient
    ) -> list[OpenAnswer]:
        """Return the answers; each unfinished answer is extended by one segment."""
        params, version = sampler.params, sampler.batch.policy_version
        prompts = sampler.render_prompts([answer.key for answer in answers])
        rooms = [
            0 if answer.is_ended else min(self.limit, params.max_new_tokens - len(answer.tokens))
            for answer in answers
        ]

        def sample(rows: list[int]) -> Sequence[Sample]:
            if rooms[rows[0]] <= 0:
                return [NOTHING for _ in rows]
            requests = [_build_request(answers[row], prompts[row]) for row in rows]
            return client.sample(requests, replace(params, max_new_tokens=rooms[rows[0]]))

        samples = call_by_group(rooms, sample)
        most = params.max_new_tokens
        return [
            answer if answer.is_ended else _append(answer, sample, version, most)
            for answer, sample in zip(answers, samples, strict=True)
        ]


def _build_request(answer: OpenAnswer, prompt: tuple[int, ...]) -> SampleRequest:
    """Return the request for the tokens that follow the answer's current tokens."""
    count = len(answer.tokens)
    if not count:
        return SampleRequest(prompt, answer.seed)
    # A sampler that cannot continue a random stream uses a new stream, never the old one's start.
    seed = seed_of(answer.seed, "segment", count)
    return SampleRequest((*prompt, *answer.tokens.ids.tolist()), seed, (answer.seed, count))


def _append(answer: OpenAnswer, sample: Sample, version: int, most: int) -> OpenAnswer:
    """Append the next segment to an answer; the answer ends at a stop token or at `most` tokens."""
    tokens = answer.tokens + Tokens.from_sample(sample, "student", version)
    return replace(
        answer,
        tokens=tokens,
        stop_reason=sample.stop_reason,
        states=None if len(answer.tokens) else sample.states,
        is_ended=sample.stop_reason != "length" or len(tokens) >= most,
    )


def _choose_groups(answers: Sequence[OpenAnswer]) -> set[tuple[int, str]]:
    """Return the oldest group of each prompt in which all answers have ended."""
    open_groups = {answer.group for answer in answers if not answer.is_ended}
    ready: dict[str, tuple[int, str]] = {}
    for answer in answers:
        # Answers of two steps to the same prompt are separate groups; the later group waits.
        if answer.group not in open_groups:
            ready.setdefault(answer.key.prompt.id, answer.group)
    return set(ready.values())


def _build_rollouts(answers: Sequence[OpenAnswer], sampler: RolloutSampler) -> list[Rollout]:
    """Return ended answers as rollouts."""
    keys = [answer.key for answer in answers]
    samples = [answer.tokens.to_sample(answer.stop_reason) for answer in answers]
    rollouts = sampler.build_rollouts(keys, sampler.render_prompts(keys), samples, "student")
    return [
        replace(
            answer.tokens.where(rollout.loss_mask).put_into(rollout, "student"),
            states=answer.states,
        )
        for answer, rollout in zip(answers, rollouts, strict=True)
    ]


def _read_answer(row: _OpenRow, prompt: Prompt) -> OpenAnswer:
    tokens = replace(
        Tokens.from_text(row.tokens, "student", 0, in_loss=True),
        sampling_logprobs=from_exact_floats(row.sampling_logprobs),
        policy_logprobs=from_exact_floats(row.policy_logprobs),
        versions=torch.tensor(row.versions, dtype=torch.long),
    )
    return OpenAnswer(
        row.step,
        RolloutKey(prompt, row.number),
        row.seed,
        tokens,
        "stop" if row.ended == "stop" else "length",
        is_ended=row.ended is not None,
    )
