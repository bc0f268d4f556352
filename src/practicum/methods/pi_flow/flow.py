"""Train a flow from scratch in this process (pi-Flow, arXiv 2510.14974)."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from practicum.models.config import ScorerConfig, ScratchConfig, StudentConfig
from practicum.objective import Objective
from practicum.ports import Backend, BackendContext
from practicum.types import FrozenConfig

USED = frozenset({"hidden_size", "layers", "seed"})
"""The settings of a model from scratch that a flow's network has."""


class Config(FrozenConfig):
    """A flow whose network is called at `steps` states; its policy moves through the substates.

    The student's `hidden_size`, `layers` and `seed` are of the network. A trajectory has one token
    per coordinate and substate, and its only randomness is the noise, which is the prompt.
    """

    checkpoints_here: ClassVar[bool] = True
    adapter_alpha: ClassVar[float | None] = None
    not_compared: ClassVar[frozenset[str]] = frozenset()
    type: Literal["flow"] = "flow"
    policy: Literal["dx", "gmflow"] = Field(
        default="dx",
        description="what the network writes for each interval: predictions of the end point on a "
        "grid of times, or a mixture of Gaussians (GMFlow 2504.05304)",
    )
    components: int = Field(default=8, ge=1, description="grid points, or Gaussians")
    steps: int = Field(default=2, ge=1, description="calls of the network per trajectory")
    substeps: int = Field(default=8, ge=1, description="substates per call of the network")

    def build_single(self) -> "Config":
        """Return the same settings."""
        return self

    def problems(
        self,
        student: StudentConfig,
        objective: Objective,
        mixes_tokens: bool,
        staleness: int,
        models: Mapping[str, ScorerConfig],
    ) -> list[str]:
        """List the settings that a flow does not have, each with a replacement."""
        problems = []
        if not isinstance(student.model, ScratchConfig):
            problems.append(
                "student.model: backend 'flow' makes its network from scratch; set model: "
                "{hidden_size: 64, layers: 2, seed: 0}"
            )
        elif unused := _list_changed(student.model, USED):
            problems.append(f"student.model: a flow's network has no {unused[0]}; remove it")
        if unused := _list_changed(student, frozenset({"model"})):
            problems.append(f"student: a flow has no {unused[0]}; remove it")
        if models:
            problems.append(
                "teacher: backend 'flow' loads no language models; set teacher: {type: velocity}"
            )
        if mixes_tokens:
            problems.append(
                "rollout.source: a flow is not decoded token by token; set source: student or teacher"
            )
        return problems


def _list_changed(settings: FrozenConfig, used: frozenset[str]) -> list[str]:
    """Return the names of settings that are not used and differ from their defaults."""
    defaults = {name: field.default for name, field in type(settings).model_fields.items()}
    return [name for name, value in settings if name not in used and value != defaults[name]]


def build(config: Config, context: BackendContext) -> Backend:
    """Open the backend."""
    from practicum.methods.pi_flow.network import FlowShape
    from practicum.methods.pi_flow.student import FlowBackend

    shape = FlowShape(config.policy, config.components, config.steps, config.substeps)
    return FlowBackend(shape, context)
