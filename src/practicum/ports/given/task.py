"""A task that is a Python object: prompts to train on, held-out prompts and a reward."""

from typing import Any, ClassVar, Literal

from practicum.ports import Task, TaskConfig
from practicum.ports.given._config import GivenConfig


class Config(TaskConfig, GivenConfig):
    """The settings of a task that is an object."""

    role: ClassVar[str] = "task"
    accepted: ClassVar[str] = (
        "a mapping, rows such as a list of dicts, (rows, verifier), or an object of a class below "
        "practicum.ports.Task"
    )
    type: Literal["practicum.ports.given.task"] = "practicum.ports.given.task"

    @classmethod
    def accepts(cls, entry: Any) -> bool:
        """Return True if an object is a task."""
        return isinstance(entry, Task) and not isinstance(entry, type)


def build(config: Config, context: Any) -> Task:
    """Return the object."""
    return config.load()
