"""Sample each token from a mixture of student and teacher."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from practicum.errors import CapabilityError
from practicum.ports import MixedRequest, SamplingClient
from practicum.rollouts.batch import RolloutKey, call_by_group
from practicum.rollouts.source import Form, OtherWriter, SourceConfig, SourceParts
from practicum.types import Rollout, Sample


class Config(SourceConfig):
    """Tokens sampled from `teacher * T + (1 - teacher) * S` in lockstep (MiniLLM 2306.08543)."""

    type: Literal["token_mix"] = "token_mix"
    form: ClassVar[Form] = "answers"
    mixes_tokens: ClassVar[bool] = True
    teacher: float = Field(default=0.2, ge=0, le=1)

    @property
    def other_writers(self) -> tuple[OtherWriter, ...]:
        """Return the teacher."""
        return ("teacher",)

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Sample completions from student and teacher together, in one call per teacher client."""
        student = _require_lockstep(parts.writers.student, "the student's backend")
        clients = [parts.bind_teacher(key.prompt, self) for key in keys]
        prompts, seeds = parts.sampler.render_prompts(keys), parts.sampler.compute_seeds(keys)

        def sample(rows: list[int]) -> Sequence[Sample]:
            teacher = _require_lockstep(clients[rows[0]].client, "the teacher")
            requests = [
                MixedRequest(prompts[row], clients[row].prompt_tokens, seeds[row]) for row in rows
            ]
            return student.sample_mixed(requests, teacher, self.teacher, parts.sampler.params)

        samples = call_by_group([id(client.client) for client in clients], sample)
        return parts.sampler.build_rollouts(keys, prompts, samples, "student")


def _require_lockstep(client: SamplingClient, who: str) -> SamplingClient:
    if not client.decodes_by_token:
        raise CapabilityError(
            "rollout.source 'token_mix' decodes teacher and student in lockstep, which "
            f"{who} cannot; set source: mix(other=teacher), or use local models for both"
        )
    return client
