"""The common parts of teachers: scoring through a client, following the student, and silence."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from practicum.models.tensors import SavedTensor
from practicum.objective import Signal
from practicum.ports import (
    Capabilities,
    PromptedClient,
    SamplingClient,
    StepFollower,
    Teacher,
    TeacherRequest,
)
from practicum.text import Renderer
from practicum.types import (
    Datum,
    Prompt,
    Rollout,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)


class FollowerTeacher(Teacher):
    """A teacher that saves the state of its student-following part, if it has such a part."""

    _follower: StepFollower | None = None

    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        """Follow the student, if the teacher follows it at all."""
        if self._follower is not None:
            self._follower.after_step(step, data)

    def save_state(self) -> Mapping[str, SavedTensor]:
        """Return the weights that a resume cannot recompute."""
        return {} if self._follower is None else self._follower.save_state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `save_state`."""
        if self._follower is not None:
            self._follower.load_state(tensors)


class SilentTeacher(Teacher):
    """A teacher without signals, which at most writes."""

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Return an empty signal for each rollout."""
        return [TeacherSignal() for _ in rollouts]


class ClientTeacher(FollowerTeacher):
    """A teacher that renders prompts itself and scores with a client.

    `follower` has the state to save: it is the client itself if its weights follow the student's.
    """

    def __init__(
        self, client: SamplingClient, renderer: Renderer, follower: StepFollower | None = None
    ) -> None:
        self._client = client
        self._renderer = renderer
        self._follower = follower

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the client."""
        return self._client.capabilities

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Score exactly the tokens of each rollout."""
        # The prompt is rendered again with this teacher's template, but the completion is never
        # tokenised again: the teacher scores exactly the sampled tokens.
        prompts = self._renderer.render_all([rollout.prompt.messages for rollout in rollouts])
        requests = [
            ScoreRequest(
                prompt_tokens,
                tuple(rollout.tokens.tolist()),
                None if rollout.candidates is None else rollout.candidates[:, : signal.candidates],
            )
            for prompt_tokens, rollout in zip(prompts, rollouts, strict=True)
        ]
        return self._client.score(requests, signal)

    def sample(self, requests: Sequence[TeacherRequest], params: SamplingParams) -> list[Sample]:
        """Sample completions of the teacher's own."""
        prompts = self._renderer.render_all([request.prompt.messages for request in requests])
        samples = [
            SampleRequest(prompt, request.seed)
            for prompt, request in zip(prompts, requests, strict=True)
        ]
        return self._client.sample(samples, params)

    def bind_prompt(self, prompt: Prompt) -> PromptedClient:
        """Return the client with the tokens of the prompt in its own rendering."""
        return PromptedClient(self._client, self._renderer.render(prompt.messages))


def rewrite_sample(
    sample: Sample, prompt: Prompt, writer: Renderer, reader: Renderer, params: SamplingParams
) -> Sample:
    """Convert a sample to the reader's tokens, through the text of the writer's tokens.

    The reader's chat template decides the position of the thoughts.
    """
    text = writer.read_answer(prompt.messages, sample.tokens.tolist())
    tokens = reader.encode_answer(prompt.messages, text, params.max_new_tokens, drops_thoughts=True)
    if sample.stop_reason != "stop" and len(tokens) > 1 and tokens[-1] in params.stop_ids:
        # The renderer ends each answer with a stop token, and this answer was truncated.
        tokens = tokens[:-1]
    return replace(
        sample,
        tokens=torch.tensor(tokens, dtype=torch.long),
        sampling_logprobs=torch.zeros(len(tokens)),
        policy_logprobs=torch.full((len(tokens),), math.nan),
        text=text,
    )
