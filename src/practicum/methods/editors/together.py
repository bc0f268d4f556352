"""The base of sources in which student and teacher read one text and write its tokens by a rule."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from practicum.errors import CapabilityError
from practicum.ports import MixedRequest, SamplingClient, TokenRule
from practicum.rollouts.batch import RolloutKey, call_by_group
from practicum.rollouts.source import Form, OtherWriter, SourceConfig, SourceParts
from practicum.types import Metrics, Rollout, Sample


class JointSource(SourceConfig):
    """A rule writes each token of an answer from the student's and the teacher's distributions.

    Both models read every token once, so the cost is linear in the tokens.
    """

    form: ClassVar[Form] = "answers"
    mixes_tokens: ClassVar[bool] = True

    @property
    def other_writers(self) -> tuple[OtherWriter, ...]:
        """Return the teacher."""
        return ("teacher",)

    def build_rule(self, requests: Sequence[MixedRequest], parts: SourceParts) -> TokenRule:
        """Return the rule for one call with these requests."""
        raise NotImplementedError

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Sample completions from student and teacher together, in one call per teacher client.

        An answer in which the teacher wrote every token has the source `teacher`.
        """
        student = self._require_lockstep(parts.writers.student, "the student's backend")
        clients = [parts.bind_teacher(key.prompt, self) for key in keys]
        prompts, seeds = parts.sampler.render_prompts(keys), parts.sampler.compute_seeds(keys)
        teacher_seeds = [request.seed for request in parts.sampler.build_teacher_requests(keys)]

        def sample(rows: list[int]) -> Sequence[Sample]:
            teacher = self._require_lockstep(clients[rows[0]].client, "the teacher")
            requests = [
                MixedRequest(
                    prompts[row], clients[row].prompt_tokens, seeds[row], teacher_seeds[row]
                )
                for row in rows
            ]
            rule = self.build_rule(requests, parts)
            return student.sample_mixed(requests, teacher, rule, parts.sampler.params)

        samples = call_by_group([id(client.client) for client in clients], sample)
        rollouts = parts.sampler.build_rollouts(keys, prompts, samples, "student")
        return [_simplify_authors(rollout) for rollout in rollouts]

    def _require_lockstep(self, client: SamplingClient, who: str) -> SamplingClient:
        if not client.decodes_by_token:
            raise CapabilityError(
                f"rollout.source {self.name!r} decodes teacher and student in lockstep, which "
                f"{who} cannot; set source: mix(other=teacher), or use local models for both"
            )
        return client

    @classmethod
    def measure(cls, rollouts: Sequence[Rollout]) -> Metrics:
        """Return the share of tokens that the teacher wrote."""
        counts = [int(rollout.mark_tokens_by("teacher").sum()) for rollout in rollouts]
        return {"teacher_tokens": sum(counts) / max(sum(len(row.tokens) for row in rollouts), 1)}


def _simplify_authors(rollout: Rollout) -> Rollout:
    """Name the only author of a text in `source`, and drop the column of authors."""
    if rollout.authors is None or not len(rollout.tokens):
        return replace(rollout, authors=None)
    by_teacher = rollout.mark_tokens_by("teacher")
    if by_teacher.all():
        return replace(rollout, source="teacher", authors=None)
    return rollout if by_teacher.any() else replace(rollout, authors=None)
