"""The network of a flow, and its velocities at the states of a trajectory."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.methods.pi_flow.policies import (
    Gaussians,
    compute_velocity,
    interpolate,
    predict_by_gaussians,
)
from practicum.methods.pi_flow.values import list_times


@dataclass(frozen=True, slots=True)
class FlowShape:
    """The form of a trajectory and of its policy; see `practicum.methods.pi_flow.flow.Config`."""

    policy: Literal["dx", "gmflow"]
    components: int
    steps: int
    substeps: int

    @property
    def substates(self) -> int:
        """The number of substates of a trajectory, without the noise."""
        return self.steps * self.substeps


@dataclass(frozen=True, slots=True)
class FlowInterval:
    """The part of a trajectory that one call of the network decides: its start and its policy."""

    state: Float[Tensor, "... D"]
    time: Float[Tensor, "..."]
    policy: Float[Tensor, "... G D"] | Gaussians


class FlowNetwork(torch.nn.Module):
    """A network from a state and its time to a policy. Time runs from 1, the noise, to 0."""

    def __init__(
        self, shape: FlowShape, dimension: int, width: int, layers: int, seed: int
    ) -> None:
        super().__init__()
        self.shape, self.dimension = shape, dimension
        outputs = shape.components * (dimension + 2 * (shape.policy == "gmflow"))
        sizes = [dimension + 1, *[width] * layers, outputs]
        self.maps = torch.nn.ModuleList(map(torch.nn.Linear, sizes[:-1], sizes[1:]))
        stream = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.parameters():
                # Uneven biases: equal Gaussians would stay equal.
                bound = sizes[0] ** -0.5 if weight.ndim == 1 else weight.shape[1] ** -0.5
                weight.uniform_(-bound, bound, generator=stream)

    def open_interval(
        self, state: Float[Tensor, "... D"], time: Float[Tensor, "..."]
    ) -> FlowInterval:
        """Call the network at the start of an interval."""
        hidden = torch.cat([state, time.expand(state.shape[:-1])[..., None]], dim=-1)
        for layer in self.maps[:-1]:
            hidden = torch.nn.functional.silu(layer(hidden))
        numbers = self.maps[-1](hidden).unflatten(-1, (self.shape.components, -1))
        if self.shape.policy == "dx":
            return FlowInterval(state, time, numbers)
        means, scales = numbers[..., 2:], numbers[..., 1].exp()
        return FlowInterval(state, time, Gaussians(numbers[..., 0], means, scales))

    def compute_velocity(
        self, interval: FlowInterval, state: Float[Tensor, "... D"], time: Float[Tensor, "..."]
    ) -> Float[Tensor, "... D"]:
        """Return the policy's velocity at a state of the interval; the network is not called."""
        policy, start = interval.policy, interval.time
        if isinstance(policy, Gaussians):
            predicted = predict_by_gaussians(policy, (interval.state, start), (state, time))
        else:
            predicted = interpolate(policy, (start - time) * self.shape.steps)
        return compute_velocity(predicted, state, time)

    def read_velocities(self, states: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        """Return the velocities at all states of trajectories except the end points."""
        times = list_times(self.shape.substates).unflatten(0, (self.shape.steps, -1))
        states = states.unflatten(1, (self.shape.steps, -1))
        start = self.open_interval(states[:, :, :1], times[:, :1])
        return self.compute_velocity(start, states, times).flatten(1, 2)
