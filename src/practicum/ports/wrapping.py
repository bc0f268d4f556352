"""Clients around another client."""

from collections.abc import Sequence

from practicum.objective import Capabilities, Signal
from practicum.ports import DecodeBatch, MixedRequest, SamplingClient, TokenRule
from practicum.types import Sample, SampleRequest, SamplingParams, ScoreRequest, TeacherSignal


class WrappedClient(SamplingClient):
    """The base of clients that change some calls of the client `bare` and pass on the remaining ones.

    It keeps no texts, because the subclass would not see them.
    """

    def __init__(self, bare: SamplingClient) -> None:
        self.bare = bare

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample with the client."""
        return self.bare.sample(requests, params)

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Score with the client."""
        return self.bare.score(requests, signal)

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the client."""
        return self.bare.capabilities

    @property
    def decodes_by_token(self) -> bool:
        """Return True if the client does."""
        return self.bare.decodes_by_token

    def open_decode_batch(
        self, prompts: Sequence[tuple[int, ...]], max_rows: int, max_new_tokens: int
    ) -> DecodeBatch:
        """Open a batch of the client."""
        return self.bare.open_decode_batch(prompts, max_rows, max_new_tokens)

    def sample_mixed(
        self,
        requests: Sequence[MixedRequest],
        teacher: SamplingClient,
        rule: TokenRule,
        params: SamplingParams,
    ) -> list[Sample]:
        """Sample with the client and a teacher together."""
        return self.bare.sample_mixed(requests, teacher, rule, params)
