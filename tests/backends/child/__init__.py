"""A backend whose models live in a process of their own: what the port promises, with nothing of the local backend's code.

The child opens the backend of this process by its name and does what it is asked over a pipe. Hidden states and heads stay
there: what comes back are their names, and who reads them fetches them.
"""

from typing import ClassVar, Literal

from pydantic import BaseModel

from practicum.ports import Backend, BackendContext


class Config(BaseModel):
    """Nothing to set."""

    checkpoints_here: ClassVar[bool] = True
    not_compared: ClassVar[frozenset[str]] = frozenset()
    type: Literal["backends.child"] = "backends.child"

    def build_single(self) -> "Config":
        """Its checkpoints are those of one process, and it opens them itself."""
        return self

    def problems(self, student, objective, mixes_tokens, staleness, models) -> list[str]:  # type: ignore[no-untyped-def]
        """Decoding in lockstep needs both models in one process."""
        return ["rollout.source: 'token_mix' needs another backend"] if mixes_tokens else []


def build(config: Config, context: BackendContext) -> Backend:
    """Start the process."""
    from backends.child.parent import ChildBackend

    return ChildBackend(context)
