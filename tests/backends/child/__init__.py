"""A backend that runs models in a separate process: it fulfils the port without code of the local backend.

The child opens the backend of this process by its name and executes requests over a pipe. Hidden states and heads stay
there: the child returns their names, and readers fetch them.
"""

from typing import ClassVar, Literal

from pydantic import BaseModel

from practicum.ports import Backend, BackendContext


class Config(BaseModel):
    """The backend has no settings."""

    checkpoints_here: ClassVar[bool] = True
    not_compared: ClassVar[frozenset[str]] = frozenset()
    type: Literal["backends.child"] = "backends.child"

    def build_single(self) -> "Config":
        """Return these settings: checkpoints have the format of one process, and this backend opens them itself."""
        return self

    def problems(self, student, objective, mixes_tokens, staleness, models) -> list[str]:  # type: ignore[no-untyped-def]
        """Require both models in one process for decoding in lockstep."""
        return ["rollout.source: 'token_mix' needs another backend"] if mixes_tokens else []


def build(config: Config, context: BackendContext) -> Backend:
    """Start the process."""
    from backends.child.parent import ChildBackend

    return ChildBackend(context)
