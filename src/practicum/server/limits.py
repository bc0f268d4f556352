"""Bound what one request may ask for and how long it may take to arrive."""

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of one request.

    `body_bytes` bounds its body, `header_seconds` and `body_seconds` the arrival of headers and
    body, `poll_seconds` the wait of a fetch. `sampled_tokens` bounds the number of samples times
    the most tokens of each.
    """

    body_bytes: int = 2**26
    header_seconds: float = 10.0
    body_seconds: float = 120.0
    poll_seconds: float = 25.0
    sampled_tokens: int = 2**21

    def compute_json_bytes(self, context: int) -> int:
        """Return the largest JSON body: 64 tokens at each position of the longest text, and a MiB.

        JSON is parsed in one step while everything else waits. A protobuf body, with its tensors as
        bytes, may have `body_bytes`.
        """
        return min(self.body_bytes, MIB + context * NUM_CANDIDATES * TOKEN_BYTES)


NUM_CANDIDATES, TOKEN_BYTES = 64, 8
