"""A teacher that scores through a sampling client, which is what a model and the student's own weights have in common."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from practicum.objective import Signal
from practicum.ports import (
    Capabilities,
    PromptedClient,
    SamplingClient,
    StepFollower,
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


class ClientTeacher:
    """Scores rollouts with a client, after its own rendering of their prompts; see `practicum.ports.Teacher`.

    `follows` is who has a state to save: the client again where its weights follow the student's.
    """

    def __init__(
        self,
        client: SamplingClient,
        renderer: Renderer,
        follows: StepFollower | None = None,
    ) -> None:
        self._client = client
        self._renderer = renderer
        self._follower = follows

    @property
    def capabilities(self) -> Capabilities:
        """What the client can answer."""
        return self._client.capabilities

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Score the very tokens of each rollout."""
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
        """The teacher's own answers."""
        prompts = self._renderer.render_all([request.prompt.messages for request in requests])
        asked = [
            SampleRequest(prompt, request.seed)
            for prompt, request in zip(prompts, requests, strict=True)
        ]
        return self._client.sample(asked, params)

    def voice(self, prompt: Prompt) -> PromptedClient:
        """The client, and the prompt as it reads it."""
        return PromptedClient(self._client, self._renderer.render(prompt.messages))

    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        """Follow the student, where there is anything to follow."""
        if self._follower is not None:
            self._follower.after_step(step, data)

    def save_state(self) -> dict[str, Tensor]:
        """The weights that a resume cannot recompute."""
        return {} if self._follower is None else self._follower.save_state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `save_state` gave."""
        if self._follower is not None:
            self._follower.load_state(tensors)
