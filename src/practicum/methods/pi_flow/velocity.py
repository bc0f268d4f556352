"""The exact velocity of a mixture as the teacher of a flow."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from practicum.errors import RecipeError
from practicum.methods.pi_flow.mixture import MixtureTask
from practicum.methods.pi_flow.policies import (
    compute_velocity,
    follow_mixture,
    predict_by_mixture,
)
from practicum.methods.pi_flow.values import (
    build_head,
    list_times,
    predict_next,
    read_trajectories,
    require_numbers,
    write_trajectories,
)
from practicum.objective import EVERY_SIGNAL, Signal
from practicum.ports import Capabilities, Teacher, TeacherConfig, TeacherContext, TeacherRequest
from practicum.text import Renderer
from practicum.types import (
    Rollout,
    Sample,
    SampleRequest,
    SamplingParams,
    TeacherSignal,
)


class Config(TeacherConfig):
    """The velocity that leads from noise to the task's mixture, in closed form.

    It answers at the states of any trajectory. Its own trajectories take `refine` steps per
    substate; with `path: data` they are straight lines from noise to independent points of the
    mixture, as in flow matching.
    """

    type: Literal["velocity"] = "velocity"
    refine: int = Field(
        default=8, ge=1, description="steps per substate of the teacher's own trajectories"
    )

    path: Literal["own", "data"] = Field(
        default="own", description="the trajectories that the teacher writes"
    )

    def capabilities(self) -> Capabilities:
        """Return every signal."""
        return EVERY_SIGNAL


class VelocityTeacher(Teacher):
    """See `practicum.ports.Teacher`."""

    def __init__(self, task: MixtureTask, renderer: Renderer, config: Config) -> None:
        self._mixture, self._renderer, self._config = task.mixture, renderer, config
        self._dimension = task.mixture.means.shape[-1]

    @property
    def capabilities(self) -> Capabilities:
        """Every signal."""
        return EVERY_SIGNAL

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Return the hidden states that predict each number, and the head."""
        if not rollouts:
            return []
        prompts = [rollout.prompt_tokens for rollout in rollouts]
        texts = [rollout.tokens.tolist() for rollout in rollouts]
        states = read_trajectories(prompts, texts, self._dimension)[:, :-1]
        substates = states.shape[1]
        times = list_times(substates)
        predicted = predict_by_mixture(self._mixture, states, times)
        hidden = predict_next(states, compute_velocity(predicted, states, times), substates)
        head = build_head(substates)
        return [TeacherSignal(hidden=rows, head=head) for rows in hidden.flatten(1, 2)]

    def sample(self, requests: Sequence[TeacherRequest], params: SamplingParams) -> list[Sample]:
        """Write the teacher's own trajectories."""
        substates = max(params.max_new_tokens // self._dimension, 1)
        times = [*list_times(substates).tolist(), 0.0]

        prompts = self._renderer.render_all([request.prompt.messages for request in requests])
        ends = torch.stack([self._draw(request.seed) for request in requests])

        def compute(number: int, state: Tensor) -> Tensor:
            if self._config.path == "data":
                return (state - ends) / times[number]
            span = times[number], times[number + 1]
            end = follow_mixture(self._mixture, state, span, self._config.refine)
            return (state - end) * substates

        samples = [SampleRequest(prompt, 0) for prompt in prompts]
        return write_trajectories(samples, params, (substates, self._dimension), compute)

    def _draw(self, seed: int) -> Float[Tensor, " D"]:
        """Return a point of the mixture."""
        stream = torch.Generator().manual_seed(seed)
        weights = torch.softmax(self._mixture.logits, dim=-1)
        number = int(torch.multinomial(weights, 1, generator=stream))
        noise = torch.randn(self._dimension, generator=stream)
        return self._mixture.means[number] + self._mixture.scales[number] * noise


def build(config: Config, context: TeacherContext) -> Teacher:
    """Take the mixture of the task; RecipeError for another task or another student."""
    if not isinstance(context.task, MixtureTask):
        raise RecipeError(
            "teacher: type velocity is of a mixture, and the task is none; set task: {type: mixture}"
        )
    require_numbers(context.renderer, "teacher: type velocity")
    return VelocityTeacher(context.task, context.renderer, config)
