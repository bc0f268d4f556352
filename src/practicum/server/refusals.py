"""What a request is answered with when it is not carried out."""


class HttpRefusal(Exception):
    """An HTTP status and one line for the caller; `retry_after` seconds where trying again helps."""

    def __init__(self, status: int, text: str, retry_after: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.retry_after = retry_after
