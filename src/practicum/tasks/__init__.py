"""One file a source of prompts with its verifier; the file's name is the recipe's key."""

from practicum.tasks._answered import Answered
from practicum.tasks._context import TaskContext

__all__ = ["Answered", "TaskContext"]
