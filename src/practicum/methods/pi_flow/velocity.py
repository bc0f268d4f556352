"""The velocity of a mixture as the teacher of a flow: in closed form, or of a network."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from practicum.core.waits import show_wait
from practicum.errors import RecipeError
from practicum.methods.pi_flow.mixture import MixtureTask
from practicum.methods.pi_flow.network import FlowNetwork, FlowShape
from practicum.methods.pi_flow.policies import (
    Gaussians,
    Predictor,
    compute_velocity,
    follow,
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
    FrozenConfig,
    Rollout,
    Sample,
    SampleRequest,
    SamplingParams,
    TeacherSignal,
)

EARLIEST = 0.05
"""The least time of flow matching; at 0 a velocity has no bound."""


class TrainedNetwork(FrozenConfig):
    """A network that learns the velocity by flow matching when the run starts (arXiv 2210.02747)."""

    hidden_size: int = Field(default=128, ge=1)
    layers: int = Field(default=3, ge=1)
    steps: int = Field(default=2000, ge=1)
    batch: int = Field(default=256, ge=1)
    learning_rate: float = Field(default=0.005, gt=0)
    seed: int = 0


class Config(TeacherConfig):
    """The velocity that leads from noise to the task's mixture, in closed form or of a `network`.

    It answers at the states of any trajectory. Its own trajectories take `refine` steps per
    substate; with `path: data` they are straight lines from noise to independent points of the
    mixture, as in flow matching.
    """

    type: Literal["velocity"] = "velocity"
    refine: int = Field(
        default=8, ge=1, description="steps per substate of the teacher's own trajectories"
    )
    network: TrainedNetwork | None = Field(
        default=None, description="a network with this velocity; none: the exact one"
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
        self._predict: Predictor = partial(predict_by_mixture, task.mixture)
        if config.network is not None:
            self._predict = partial(predict_by_network, train_network(task.mixture, config.network))

    @property
    def capabilities(self) -> Capabilities:
        """Every signal."""
        return EVERY_SIGNAL

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Return the hidden states that predict each number, and the head."""
        if not rollouts:
            return []
        prompts = [rollout.prompt_tokens for rollout in rollouts]
        texts = [rollout.tokens.tolist() for rollout in rollouts]
        states = read_trajectories(prompts, texts, self._dimension)[:, :-1]
        substates = states.shape[1]
        times = list_times(substates)
        predicted = self._predict(states, times)
        hidden = predict_next(states, compute_velocity(predicted, states, times), substates)
        head = build_head(substates)
        return [TeacherSignal(hidden=rows, head=head) for rows in hidden.flatten(1, 2)]

    @torch.no_grad()
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
            end = follow(self._predict, state, span, self._config.refine)
            return (state - end) * substates

        samples = [SampleRequest(prompt, 0) for prompt in prompts]
        return write_trajectories(samples, params, (substates, self._dimension), compute)

    def _draw(self, seed: int) -> Float[Tensor, " D"]:
        """Return a point of the mixture."""
        return self._mixture.draw(1, torch.Generator().manual_seed(seed))[0]


def train_network(mixture: Gaussians, settings: TrainedNetwork) -> FlowNetwork:
    """Return a network of end points, trained on straight lines from noise to points of the mixture."""
    dimension = mixture.means.shape[-1]
    shape = FlowShape("dx", components=1, steps=1, substeps=1)
    network = FlowNetwork(shape, dimension, settings.hidden_size, settings.layers, settings.seed)
    stream = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.Adam(network.parameters())
    with show_wait("training the teacher's network: steps", settings.steps) as wait:
        for step in range(settings.steps):
            ends = mixture.draw(settings.batch, stream)
            noise = torch.randn(ends.shape, generator=stream)
            times = EARLIEST + (1 - EARLIEST) * torch.rand(settings.batch, generator=stream)
            states = ends + times[:, None] * (noise - ends)
            predicted = predict_by_network(network, states, times)
            loss = (compute_velocity(predicted, states, times) - (noise - ends)).square().mean()
            optimizer.param_groups[0]["lr"] = settings.learning_rate * (1 - step / settings.steps)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            wait.advance()
    return network


def predict_by_network(
    network: FlowNetwork, state: Float[Tensor, "... D"], time: Float[Tensor, "..."]
) -> Float[Tensor, "... D"]:
    """Return the network's mean of x_0 given x_t."""
    policy = network.open_interval(state, time).policy
    assert isinstance(policy, Tensor), "a network of one component predicts end points"
    return policy[..., 0, :]


def build(config: Config, context: TeacherContext) -> Teacher:
    """Take the mixture of the task; RecipeError for another task or another student."""
    if not isinstance(context.task, MixtureTask):
        raise RecipeError(
            "teacher: type velocity is of a mixture, and the task is none; set task: {type: mixture}"
        )
    require_numbers(context.renderer, "teacher: type velocity")
    return VelocityTeacher(context.task, context.renderer, config)
