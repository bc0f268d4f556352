"""Sample one answer or one conversation for each key of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from practicum.core.randomness import compute_seeds
from practicum.errors import CapabilityError
from practicum.ports import OpensEpisodes, PromptedClient, SamplingClient, Teacher, TeacherRequest
from practicum.rollouts.batch import RolloutBatch, RolloutKey
from practicum.rollouts.conversation import run_conversations
from practicum.rollouts.openings import ConversationRequest
from practicum.text import Renderer
from practicum.types import FAILURES, Rollout, Sample, SampleRequest, SamplingParams
from practicum.types import Source as Origin


@dataclass(frozen=True, slots=True)
class RolloutSampler:
    """Sampling for the keys of one batch, from the student or from the teacher."""

    batch: RolloutBatch
    renderer: Renderer
    params: SamplingParams
    environment: OpensEpisodes | None

    def switch_stream(self, stream: str) -> "RolloutSampler":
        """Return the sampler with another stream of random numbers for the same keys."""
        return replace(self, batch=replace(self.batch, stream=stream))

    def sample_student(
        self,
        keys: Sequence[RolloutKey],
        client: SamplingClient,
        openings: "Sequence[PromptedClient] | None" = None,
        turns: int = 0,
    ) -> list[Rollout]:
        """Return the student's completions, or its conversations with the environment.

        With `openings`, another model speaks the first `turns` turns of each conversation.
        """
        prompts, seeds = self.render_prompts(keys), self.compute_seeds(keys)
        if self.environment is None:
            requests = [SampleRequest(*request) for request in zip(prompts, seeds, strict=True)]
            samples = client.sample(requests, self.params)
            return self.build_rollouts(keys, prompts, samples, "student")
        clients = [PromptedClient(client, prompt) for prompt in prompts]
        requests = [
            ConversationRequest(key.prompt, client, seed, opening, turns)
            for key, client, seed, opening in zip(
                keys, clients, seeds, openings or [None for _ in keys], strict=True
            )
        ]
        return self._converse(self.environment, keys, prompts, requests, "student")

    def sample_teacher(
        self,
        keys: Sequence[RolloutKey],
        teacher: Teacher,
        role: Literal["teacher", "reference"] = "teacher",
    ) -> list[Rollout] | None:
        """Return a teacher's completions or conversations, or None if it cannot generate."""
        prompts, requests = self.render_prompts(keys), self.build_teacher_requests(keys, role)
        if self.environment is None:
            samples = teacher.sample(requests, self.params)
            if samples is None:
                return None
            return self.build_rollouts(keys, prompts, samples, role)
        bound = [teacher.bind_prompt(key.prompt) for key in keys]
        clients = [client for client in bound if client is not None]
        if len(clients) < len(keys):
            return None
        require_tokens(clients)
        seeds = [request.seed for request in requests]
        conversations = [
            ConversationRequest(key.prompt, client, seed)
            for key, client, seed in zip(keys, clients, seeds, strict=True)
        ]
        return self._converse(self.environment, keys, prompts, conversations, role)

    def _converse(
        self,
        environment: OpensEpisodes,
        keys: Sequence[RolloutKey],
        prompts: Sequence[tuple[int, ...]],
        requests: Sequence[ConversationRequest],
        source: Origin,
    ) -> list[Rollout]:
        """Return the rollouts of one conversation for each key."""
        conversations = run_conversations(requests, environment, self.renderer, self.params)
        samples = [conversation.sample for conversation in conversations]
        rollouts = self.build_rollouts(keys, prompts, samples, source)
        return [
            conversation.complete(rollout)
            for conversation, rollout in zip(conversations, rollouts, strict=True)
        ]

    def render_prompts(self, keys: Sequence[RolloutKey]) -> list[tuple[int, ...]]:
        """Return the prompt tokens of each key in the student's template."""
        return self.renderer.render_all([key.prompt.messages for key in keys])

    def compute_seeds(self, keys: Sequence[RolloutKey]) -> list[int]:
        """Return the seed of each key's completion in the batch's stream."""
        return compute_key_seeds(self.batch, self.batch.stream, keys)

    def build_teacher_requests(
        self, keys: Sequence[RolloutKey], role: Literal["teacher", "reference"] = "teacher"
    ) -> list[TeacherRequest]:
        """Return a request for a teacher's completion of each key."""
        seeds = compute_key_seeds(self.batch, role, keys)
        return [TeacherRequest(key.prompt, seed) for key, seed in zip(keys, seeds, strict=True)]

    def build_rollouts(
        self,
        keys: Sequence[RolloutKey],
        prompts: Sequence[tuple[int, ...]],
        samples: Sequence[Sample],
        source: Origin,
    ) -> list[Rollout]:
        """Return the samples of some keys as rollouts with a loss at every token.

        A sample that failed, such as an answer that a teacher refused, has no loss.
        """
        texts = self.renderer.decode_all([sample.tokens.tolist() for sample in samples])
        return [
            Rollout(
                prompt=key.prompt,
                prompt_tokens=prompt_tokens,
                tokens=sample.tokens,
                loss_mask=torch.full(
                    (len(sample.tokens),), sample.stop_reason not in FAILURES, dtype=torch.bool
                ),
                sampling_logprobs=sample.sampling_logprobs,
                policy_logprobs=sample.policy_logprobs,
                policy_version=self.batch.policy_version,
                stop_reason=sample.stop_reason,
                text=text,
                sample=key.number,
                source=source,
                states=sample.states,
                authors=sample.authors,
                opens_thoughts=self.renderer.opens_thoughts,
                rounds=sample.rounds,
            )
            for key, prompt_tokens, sample, text in zip(keys, prompts, samples, texts, strict=True)
        ]


def require_tokens(clients: Sequence[PromptedClient]) -> None:
    """Raise CapabilityError if one of the clients cannot hold a conversation."""
    if not all(client.accepts_tokens for client in clients):
        raise CapabilityError(
            "this teacher answers messages and cannot continue from tokens, so it cannot hold a "
            "conversation with the task; set source: student and evaluation.teacher: false, or use "
            "a teacher that completes tokens"
        )


def compute_key_seeds(batch: RolloutBatch, stream: str, keys: Sequence[RolloutKey]) -> list[int]:
    """Return the seed of each key in a stream."""
    return compute_seeds(
        [(batch.seed, stream, batch.step, key.prompt.id, key.number) for key in keys]
    )


def compute_key_seed(batch: RolloutBatch, stream: str, key: RolloutKey) -> int:
    """Return the seed of a key in a stream."""
    return compute_key_seeds(batch, stream, [key])[0]
