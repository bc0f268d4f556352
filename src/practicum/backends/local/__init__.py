"""The local backend: a causal language model of transformers (see docs/models.md), in this process, on a CPU or one GPU.

What a recipe says of it stands here, and transformers is imported where a student is built: a recipe is read without it.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from practicum.model_config import StudentConfig
from practicum.objective import Objective
from practicum.ports import BackendContext, Learner

__all__ = ["Config", "build"]


class Config(BaseModel):
    """Nothing to set: what is held at once stands under `train`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["local"] = "local"

    def problems(self, student: StudentConfig, objective: Objective, source: str, staleness: int) -> list[str]:
        """Every student and every objective can be trained here."""
        return []


def build(config: Config, context: BackendContext) -> Learner:
    """Load the student and let learn what the recipe says."""
    from practicum.backends.local.student import load_learner

    return load_learner(context)
