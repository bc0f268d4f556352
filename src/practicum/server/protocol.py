"""HTTP connections that are closed when a request's headers do not arrive in time."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from practicum.server.limits import Limits


class Connection(H11Protocol):
    """uvicorn's, which itself waits for headers for ever, before anybody has shown a token.

    The time runs from the first moment of a connection, and from the first byte after an answer.
    """

    limits = Limits()
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As asyncio says."""
        super().connection_made(transport)
        self._keep_time()

    def data_received(self, data: bytes) -> None:
        """As asyncio says."""
        super().data_received(data)
        self._keep_time()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio says."""
        self._forget()
        super().connection_lost(exc)

    def _keep_time(self) -> None:
        """Let the time run while headers are missing, or a body whose request was answered already."""
        answered = (
            self.conn.our_state in (h11.DONE, h11.MUST_CLOSE)
            and self.conn.their_state is h11.SEND_BODY
        )
        if self.conn.their_state is not h11.IDLE and not answered:
            self._forget()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.limits.header_seconds, self.transport.close)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def connection_with(limits: Limits) -> type[Connection]:
    """Return the protocol under other limits."""
    return type("LimitedConnection", (Connection,), {"limits": limits})
