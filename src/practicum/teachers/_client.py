"""What every teacher that scores through a sampling client has in common."""

from collections.abc import Sequence

from practicum.objective import Signal
from practicum.ports import SamplingClient, ScoreRequest, TeacherRequest
from practicum.text import Renderer
from practicum.types import Rollout, Sample, SampleRequest, SamplingParams, TeacherSignal


def score_rollouts(
    client: SamplingClient, renderer: Renderer, rollouts: Sequence[Rollout], signal: Signal
) -> list[TeacherSignal]:
    """Score each rollout's tokens after the teacher's own rendering of its prompt."""
    requests = [
        ScoreRequest(renderer.render(rollout.prompt.messages), tuple(rollout.tokens.tolist())) for rollout in rollouts
    ]
    return client.score(requests, signal)


def answer_prompts(
    client: SamplingClient, renderer: Renderer, requests: Sequence[TeacherRequest], params: SamplingParams
) -> list[Sample]:
    """The teacher's own answer to each prompt, after its own rendering of it."""
    return client.sample(
        [SampleRequest(renderer.render(request.prompt.messages), request.seed) for request in requests], params
    )
