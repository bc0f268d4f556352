"""Define the refusal of a request."""


class HttpRefusal(Exception):
    """An HTTP status and one line for the caller; retry after `retry_after` seconds, if any."""

    def __init__(self, status: int, text: str, retry_after: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.retry_after = retry_after
