"""Completions that another writer begins and the student continues."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from practicum.errors import CapabilityError
from practicum.rollouts.answer_tokens import Tokens
from practicum.rollouts.batch import RolloutKey
from practicum.rollouts.sampling import require_tokens
from practicum.rollouts.source import (
    OtherWriter,
    SourceConfig,
    SourceParts,
    clear_policy_logprobs,
)
from practicum.types import Rollout, Sample, SampleRequest, StopReason
from practicum.types import Source as Origin


class Config(SourceConfig):
    """`origin` writes `length` tokens; the student continues (TrOPD 2606.01249).

    These tokens have no loss, unless they are `imitated`: then a term's `source` selects them.
    In a conversation the teacher speaks the first `turns` turns instead (TCOD 2604.24005).
    """

    type: Literal["prefix"] = "prefix"
    length: int = Field(default=64, ge=0)
    origin: Literal["teacher", "dataset"] = "teacher"
    turns: int | None = Field(default=None, ge=0)
    imitated: bool | None = None

    @property
    def other_writers(self) -> tuple[OtherWriter, ...]:
        """Return the origin."""
        return (self.origin,)

    def count_teacher_answers(self, n: int) -> float:
        """Return the answers that the teacher begins."""
        return n if self.origin == "teacher" else 0

    def limit_answer(self, max_new_tokens: int) -> int:
        """Return the prefix's length."""
        return min(self.length, max_new_tokens)

    def list_problems(self, n: int, max_new_tokens: int) -> list[str]:
        """Refuse a prefix that leaves no tokens to the student; a prefix of turns is never refused."""
        if self.turns is not None or self.length < max_new_tokens:
            return []
        return [
            f"a prefix of {self.length} tokens leaves no tokens to the student, because "
            f"max_new_tokens is {max_new_tokens}; shorten the prefix, or raise max_new_tokens"
        ]

    def explain_form(self, *, is_conversation: bool) -> str | None:
        """Refuse tokens of a conversation, and turns of a single answer."""
        if is_conversation and self.origin == "teacher":
            if self.turns is not None:
                return None
            return (
                f"rollout.source: {self.model_dump()} does not write turn by turn, and this task "
                "answers every turn; use prefix(turns=2) for the turns that the teacher speaks "
                "first"
            )
        if not is_conversation and self.turns is not None:
            return (
                f"rollout.source: {self.model_dump()} counts turns, and this task has single "
                "answers; use prefix(length=64) for the tokens that the teacher writes first"
            )
        return super().explain_form(is_conversation=is_conversation)

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Return the student's continuations of prefixes from the teacher or the dataset.

        A prefix that ends with a stop token has no continuation.
        """
        sampler, student = parts.sampler, parts.writers.student
        if self.turns is not None:
            openings = [parts.bind_teacher(key.prompt, self) for key in keys]
            require_tokens(openings)
            return sampler.sample_student(keys, student, openings, self.turns)
        max_tokens = sampler.params.max_new_tokens
        length = self.limit_answer(max_tokens)
        prefixes = (
            self._sample_teacher(keys, parts, length)
            if self.origin == "teacher"
            else parts.encode_answers(keys, self, length)
        )
        rows = [row for row, prefix in enumerate(prefixes) if prefix.stop_reason == "length"]
        prompts, seeds = sampler.render_prompts(keys), sampler.compute_seeds(keys)
        requests = [
            SampleRequest((*prompts[row], *prefixes[row].tokens.tolist()), seeds[row])
            for row in rows
        ]
        params = replace(sampler.params, max_new_tokens=max_tokens - length)
        continuations = student.sample(requests, params)
        version = sampler.batch.policy_version
        answers = [
            Tokens.from_sample(prefix, self.origin, version).where(bool(self.imitated))
            for prefix in prefixes
        ]
        reasons: list[StopReason] = [prefix.stop_reason for prefix in prefixes]
        sources: list[Origin] = [self.origin for _ in prefixes]
        for row, continuation in zip(rows, continuations, strict=True):
            answers[row] += Tokens.from_sample(continuation, "student", version)
            reasons[row], sources[row] = continuation.stop_reason, "student"
        samples = list(map(Tokens.to_sample, answers, reasons))
        rollouts = sampler.build_rollouts(keys, prompts, samples, self.origin)
        return list(map(Tokens.put_into, answers, rollouts, sources))

    def _sample_teacher(
        self, keys: Sequence[RolloutKey], parts: SourceParts, length: int
    ) -> list[Sample]:
        """Return at most `length` tokens of the teacher's completions in its own context."""
        requests = parts.sampler.build_teacher_requests(keys)
        params = replace(parts.sampler.params, max_new_tokens=length)
        samples = parts.writers.teacher.sample(requests, params)
        if samples is None:
            raise CapabilityError(self.explain_no_generation("this teacher"))
        return clear_policy_logprobs(samples)
