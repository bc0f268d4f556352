"""Points or pictures around a few centres, to be drawn from noise."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from practicum.core.randomness import seed_of
from practicum.methods.pi_flow.policies import Gaussians, follow, predict_by_mixture
from practicum.methods.pi_flow.values import list_values, round_to_tokens, write_state
from practicum.ports import Task, TaskConfig, TaskContext
from practicum.types import Message, Prompt, Rollout

RADIUS, POINTS = 2.0, 8
"""The ring of centres in two dimensions."""

SIDE = 8
"""The height and the width of a picture."""

EXACT_STEPS = 128
"""The steps of the trajectory that a student's end point is compared with."""

PICTURES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "disc": lambda x, y: x**2 + y**2 < 10,
    "ring": lambda x, y: (x**2 + y**2 - 10).abs() < 6,
    "frame": lambda x, y: torch.maximum(x.abs(), y.abs()) > 2,
    "plus": lambda x, y: torch.minimum(x.abs(), y.abs()) < 1,
    "saltire": lambda x, y: (x.abs() - y.abs()).abs() < 1,
    "bars": lambda x, y: (x + 4) % 4 < 2,
    "stripes": lambda x, y: (y + 4) % 4 < 2,
    "triangle": lambda x, y: x.abs() * 2 < y + 4,
}
"""The black places of each picture; x and y run from -3.5 to 3.5."""


class Config(TaskConfig):
    """Eight centres of equal weight: points on a ring, or pictures of eight by eight grey values.

    The prompts are noise. The reward is exp(-d), d the root mean square of the distance to the end
    point of the exact trajectory from the same noise.
    """

    type: Literal["mixture"] = "mixture"
    shape: Literal["ring", "pictures"] = Field(
        default="ring", description="points in two dimensions, or pictures in 64"
    )
    spread: float = Field(
        default=0.2, gt=0, le=1, description="standard deviation around each centre"
    )
    train_size: int = Field(default=4096, ge=1, description="noises to train on")
    heldout_size: int = Field(default=256, ge=0, description="other noises, to evaluate on")
    seed: int | None = Field(default=None, description="seed of the noises; none: the run's seed")


class MixtureTask(Task):
    """Seeded noises, and the mixture that they lead to."""

    def __init__(self, config: Config, seed: int) -> None:
        centres = list_points() if config.shape == "ring" else list_pictures()
        scales = torch.full((len(centres),), config.spread)
        self.mixture = Gaussians(torch.zeros(len(centres)), centres, scales)
        stream = torch.Generator().manual_seed(seed_of(seed, "noise"))
        sizes = config.heldout_size, config.train_size
        noise = torch.randn(sum(sizes), centres.shape[1], generator=stream)
        self.noise = list_values()[round_to_tokens(noise)]
        names = [
            f"{part}-{number}"
            for part, size in zip(("heldout", "train"), sizes, strict=True)
            for number in range(size)
        ]
        prompts = [
            Prompt(name, (Message("user", write_state(state)),))
            for name, state in zip(names, self.noise, strict=True)
        ]
        self._heldout, self._train = prompts[: sizes[0]], prompts[sizes[0] :]

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the noises to train on."""
        return self._train

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Return the held-out noises."""
        return self._heldout

    @cached_property
    def end_points(self) -> Mapping[str, Float[Tensor, " D"]]:
        """The end point of the exact trajectory of each prompt, by its id."""
        exact = partial(predict_by_mixture, self.mixture)
        ends = follow(exact, self.noise, (1.0, 0.0), EXACT_STEPS)
        prompts = [*self._heldout, *self._train]
        return {prompt.id: end for prompt, end in zip(prompts, ends, strict=True)}

    def reward(self, rollout: Rollout) -> float:
        """Return exp(-d); 0 for a text that does not end with a state."""
        end = read_end_point(rollout.text, self.noise.shape[1])
        if end is None:
            return 0.0
        distance = (end - self.end_points[rollout.prompt.id]).square().mean().sqrt()
        return (-distance).exp().item()


def read_end_point(text: str, dimension: int) -> Float[Tensor, " D"] | None:
    """Return the last state of a trajectory's text, or None if it has none."""
    try:
        numbers = [float(word) for word in text.split()[-dimension:]]
    except ValueError:
        return None
    end = torch.tensor(numbers)
    return end if len(end) == dimension and bool(end.isfinite().all()) else None


def list_points() -> Float[Tensor, "K 2"]:
    """Return points on a ring."""
    angles = torch.arange(POINTS) * (2 * torch.pi / POINTS)
    return RADIUS * torch.stack([angles.cos(), angles.sin()], dim=-1)


def list_pictures() -> Float[Tensor, "K D"]:
    """Return the pictures with the values 1 for black and -1 for white, row by row."""
    places = torch.arange(SIDE) - (SIDE - 1) / 2
    y, x = torch.meshgrid(places, places, indexing="ij")
    return torch.stack([draw(x, y).float().flatten() * 2 - 1 for draw in PICTURES.values()])


def build(config: Config, context: TaskContext) -> MixtureTask:
    """Draw the noises."""
    return MixtureTask(config, context.seed if config.seed is None else config.seed)
