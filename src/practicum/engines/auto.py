"""vLLM where the student is on a GPU and vLLM is installed, otherwise the backend's own sampler.

The choice is made when the run starts. It is part of the run's identity, as `decoding` in
recipe.json, so a run only resumes with the same sampler.
"""

import logging
from importlib.util import find_spec
from typing import ClassVar, Literal

from pydantic import Field

from practicum.engines import vllm
from practicum.ports.engines import EngineModel, SamplingEngine
from practicum.types import FrozenConfig

log = logging.getLogger(__name__)


class Config(FrozenConfig):
    """The settings of vLLM if it is chosen."""

    not_compared: ClassVar[frozenset[str]] = frozenset({"memory", "tolerance"})
    """Settings that may change when a run is resumed."""
    may_decline: ClassVar[bool] = True
    """True: the backend may sample itself instead."""
    may_sample: ClassVar[bool] = True
    type: Literal["auto"] = "auto"
    memory: float = Field(
        default=0.4, gt=0, lt=1, description="share of the GPU's memory for vLLM, if it is chosen"
    )
    tolerance: float | None = Field(
        default=None, gt=0, description="as the engine vllm has it, if that is chosen"
    )

    def problems(self, mixes_tokens: bool, staleness: int) -> list[str]:
        """List what vLLM cannot do for a recipe, each with an alternative."""
        return self.build_vllm().problems(mixes_tokens, staleness)

    def list_pool_problems(self, processes: int) -> list[str]:
        """Return no problems: each process starts its own engine, or no process starts one."""
        return []

    def build_vllm(self) -> vllm.Config:
        """Return the settings of vLLM."""
        return vllm.Config(memory=self.memory, tolerance=self.tolerance)


def build(config: Config, model: EngineModel) -> SamplingEngine | None:
    """Start vLLM if the student is on a GPU and vLLM is installed; return None otherwise."""
    if model.device.type != "cuda" or find_spec("vllm") is None:
        reason = "is not installed" if model.device.type == "cuda" else "would run on a CPU"
        log.info(f"rollout.engine: auto is the local sampler here, for vllm {reason}")
        return None
    return vllm.build(config.build_vllm(), model)
