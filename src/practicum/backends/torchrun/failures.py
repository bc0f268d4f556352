"""Describe why a rank cannot continue, in a form that other ranks can read."""

from dataclasses import dataclass

import torch.distributed as dist

from practicum.errors import PracticumError, WorkerLost


class Unanswered(Exception):
    """A collective waits for a rank that is stuck or late; `loss` has the details."""

    def __init__(self, loss: WorkerLost) -> None:
        super().__init__(str(loss))
        self.loss = loss


class RunEnded(Exception):
    """A collective waits although the run has ended."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """The reason why a rank cannot continue: an exit code and a text for the user.

    The code 0 means that another rank broke the link, and -1 an unexpected error.
    """

    code: int
    text: str = ""

    @classmethod
    def describe(cls, error: BaseException) -> "Trouble":
        """Return the trouble of a rank that raised an error."""
        if isinstance(error, PracticumError | OSError):
            kind = error if isinstance(error, PracticumError) else PracticumError
            return cls(kind.exit_code, shorten(error))
        is_link = isinstance(error, dist.DistError | Unanswered | RunEnded)
        if is_link or "gloo/transport" in str(error):
            return cls(0)
        return cls(-1, f"{type(error).__name__}: {shorten(error)}")

    @property
    def is_elsewhere(self) -> bool:
        """True if another rank is the cause."""
        return self.code == 0

    @property
    def is_bug(self) -> bool:
        """True if the error is unexpected, not a user error."""
        return self.code < 0


def shorten(error: BaseException) -> str:
    """Return the text of an error in one line."""
    return " ".join(str(error).split())[:400]
