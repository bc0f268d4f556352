"""Clients' sessions: what belongs to each, and which of them a search finds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from practicum.server.requests import SearchSessions


@dataclass(slots=True)
class Session:
    """A client: when it was last heard of, by the clock that never goes back, how it calls itself, and what belongs to it."""

    id: str
    heard: float
    name: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        """Return what is told about it."""
        return {
            "training_run_ids": list(self.models),
            "sampler_ids": list(self.samplers),
            "user_metadata": dict(self.metadata) or None,
            "display_name": self.name,
        }

    def summary(self, checkpoints: int) -> dict[str, Any]:
        """Return what a search shows of it."""
        return {
            "session_id": self.id,
            "created_at": self.created.isoformat(),
            "owner": "local",
            "project_id": "local",
            "status": {"type": "active"},
            "checkpoints_count": checkpoints,
            "display_name": self.name,
            "user_metadata": dict(self.metadata) or None,
        }


def newest_first(sessions: Iterable[Session]) -> list[Session]:
    """Return the sessions in the order in which they are listed."""
    return sorted(sessions, key=lambda session: (session.created, session.id), reverse=True)


def matching(sessions: Iterable[Session], asked: SearchSessions) -> list[Session]:
    """Return the sessions that a search finds from its cursor on, newest first, however many they are."""
    if asked.statuses is not None and all(
        status.get("type") != "active" for status in asked.statuses
    ):
        return []
    found = [session for session in newest_first(sessions) if _matches(session, asked)]
    if asked.cursor is None:
        return found
    last = datetime.fromisoformat(asked.cursor.last_created_at), asked.cursor.last_session_id
    return [session for session in found if (session.created, session.id) < last]


def _matches(session: Session, asked: SearchSessions) -> bool:
    if any(session.metadata.get(key) != value for key, value in asked.user_metadata.items()):
        return False
    if asked.session_id is None and asked.display_name is None:
        return True
    named = asked.display_name is not None and session.name is not None
    words = (asked.display_name or "").casefold().split()
    return session.id == asked.session_id or (
        named and all(word in (session.name or "").casefold() for word in words)
    )
