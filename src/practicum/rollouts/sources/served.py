"""Turns from conversations of users with the student."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from practicum.rollouts.batch import RolloutKey
from practicum.rollouts.source import Form, SourceConfig, SourceParts, check_path
from practicum.types import Rollout


class Config(SourceConfig):
    """Users talk to the student, which learns from each turn with a reply (2603.10165).

    The task `served` sets the address, and the note `next_state` contains the reply. With `path`, no
    user is served: the turns come from an earlier run's traffic.jsonl.
    """

    type: Literal["served"] = "served"
    form: ClassVar[Form] = "answers"
    path: str | None = Field(default=None, min_length=1)
    serves_users: ClassVar[bool] = True
    fixed: ClassVar[Mapping[str, str]] = {
        "train.prompts_per_step": "it determines which turns of the traffic a step learns from, so "
        "the student would learn from some turns twice or never; start a new run"
    }

    @field_validator("path")
    @classmethod
    def _refuse_ambiguous_path(cls, path: str | None) -> str | None:
        return None if path is None else check_path(path)

    def list_problems(self, n: int, max_new_tokens: int) -> list[str]:
        """Refuse `rollout.n` above 1, because a user gets one answer."""
        if n == 1:
            return []
        return [f"rollout.n is {n}, and a user gets one answer; set n: 1"]

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Return the turns that users replied to."""
        writers, sampler = parts.writers, parts.sampler
        # Without traffic, as in a plan, the student answers the task's own prompts.
        if writers.traffic is None:
            return parts.sample_student(keys)
        return writers.traffic.collect(
            sampler.batch, writers.renderer, writers.student, sampler.params
        )
