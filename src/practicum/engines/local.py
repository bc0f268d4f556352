"""The backend's own sampler, also on a GPU where vLLM is installed."""

from typing import ClassVar, Literal

from practicum.ports.engines import EngineModel
from practicum.types import FrozenConfig


class Config(FrozenConfig):
    """No settings."""

    not_compared: ClassVar[frozenset[str]] = frozenset()
    may_decline: ClassVar[bool] = True
    may_sample: ClassVar[bool] = False
    tolerance: ClassVar[None] = None
    type: Literal["local"] = "local"

    def problems(self, mixes_tokens: bool, staleness: int) -> list[str]:
        """Return no problems: the backend samples itself."""
        return []

    def list_pool_problems(self, processes: int) -> list[str]:
        """Return no problems: no process starts an engine."""
        return []


def build(config: Config, model: EngineModel) -> None:
    """Return None: there is no engine."""
