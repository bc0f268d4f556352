"""Hold clients' sessions and search among them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from practicum.server.requests import SearchSessions


@dataclass(slots=True)
class ClientSession:
    """A client's session: its name, its models and samplers.

    `last_seen` is in seconds of the monotonic clock.
    """

    id: str
    last_seen: float
    name: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return what a client may know about its session."""
        return {
            "training_run_ids": list(self.models),
            "sampler_ids": list(self.samplers),
            "user_metadata": dict(self.metadata) or None,
            "display_name": self.name,
        }

    def summarize(self, checkpoints: int) -> dict[str, Any]:
        """Return the session as a result of a search."""
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


def sort_by_age(sessions: Iterable[ClientSession]) -> list[ClientSession]:
    """Return the sessions newest first, the order of every listing."""
    return sorted(sessions, key=lambda session: (session.created, session.id), reverse=True)


def search(sessions: Iterable[ClientSession], query: SearchSessions) -> list[ClientSession]:
    """Return all sessions that match from the query's cursor on, newest first."""
    if query.statuses is not None and all(
        status.get("type") != "active" for status in query.statuses
    ):
        return []
    matches = [session for session in sort_by_age(sessions) if _matches(session, query)]
    if query.cursor is None:
        return matches
    last = datetime.fromisoformat(query.cursor.last_created_at), query.cursor.last_session_id
    return [session for session in matches if (session.created, session.id) < last]


def _matches(session: ClientSession, query: SearchSessions) -> bool:
    if any(session.metadata.get(key) != value for key, value in query.user_metadata.items()):
        return False
    if query.session_id is None and query.display_name is None:
        return True
    named = query.display_name is not None and session.name is not None
    words = (query.display_name or "").casefold().split()
    return session.id == query.session_id or (
        named and all(word in (session.name or "").casefold() for word in words)
    )
