"""Close HTTP connections when request headers do not arrive in time."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from practicum.server.limits import RequestLimits


class TimedConnection(H11Protocol):
    """A connection of uvicorn with a deadline for headers.

    uvicorn itself waits forever for headers, before a client has shown a token. The time runs from
    the start of a connection, and from the first byte after an answer.
    """

    limits = RequestLimits()
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first request."""
        super().connection_made(transport)
        self._update_deadline()

    def data_received(self, data: bytes) -> None:
        """Read data and update the deadline."""
        super().data_received(data)
        self._update_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline."""
        self._cancel_deadline()
        super().connection_lost(exc)

    def _update_deadline(self) -> None:
        """Run the deadline while headers are missing, or the body of a request with an answer."""
        # A server may answer before it has read the body, and then waits for the rest of it.
        has_answered = (
            self.conn.our_state in (h11.DONE, h11.MUST_CLOSE)
            and self.conn.their_state is h11.SEND_BODY
        )
        if self.conn.their_state is not h11.IDLE and not has_answered:
            self._cancel_deadline()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.limits.header_seconds, self.transport.close)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def build_protocol(limits: RequestLimits) -> type[TimedConnection]:
    """Return the protocol with these limits."""
    # uvicorn takes a class and builds each connection itself, so the limits belong to the class.
    return type("LimitedConnection", (TimedConnection,), {"limits": limits})
