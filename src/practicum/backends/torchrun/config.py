"""The settings of the processes that torchrun starts."""

from typing import Literal

from practicum.backends._sharded.config import ShardedConfig


class Config(ShardedConfig):
    """The processes that torchrun starts, and the memory limits of each process."""

    type: Literal["torchrun"] = "torchrun"
