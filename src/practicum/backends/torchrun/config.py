"""The settings of the processes that torchrun starts."""

from typing import Literal

from practicum.backends._sharded.config import ShardedConfig


class Config(ShardedConfig):
    """The processes that torchrun starts, and the limits on memory of each of them."""

    type: Literal["torchrun"] = "torchrun"
