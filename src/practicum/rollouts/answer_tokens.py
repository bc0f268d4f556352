"""Cut and join ranges of an answer's tokens, with log-probabilities, authors and versions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from practicum.columns import TokenColumns
from practicum.types import AUTHORS, Author, Rollout, Sample, Source, StopReason


@dataclass(frozen=True, slots=True)
class Tokens(TokenColumns):
    """The ids of T tokens, and the log-probabilities, author, policy version and loss of each token.

    Where they are unknown, such as for a text that was not sampled, `sampling_logprobs` are 0 and
    `policy_logprobs` are NaN. `authors` are indices into `AUTHORS`. `in_loss` is False at tokens
    without a loss.
    """

    ids: Int[Tensor, " T"]
    sampling_logprobs: Float[Tensor, " T"]
    policy_logprobs: Float[Tensor, " T"]
    authors: UInt8[Tensor, " T"]
    versions: Int[Tensor, " T"]
    in_loss: Bool[Tensor, " T"]

    @classmethod
    def empty(cls) -> "Tokens":
        """Return no tokens."""
        return cls.from_text([], "student", 0, in_loss=True)

    @classmethod
    def from_rollout(cls, rollout: Rollout) -> "Tokens":
        """Return the tokens of a rollout."""
        return cls(
            rollout.tokens,
            rollout.sampling_logprobs,
            rollout.policy_logprobs,
            _repeat_author(rollout.source, len(rollout.tokens))
            if rollout.authors is None
            else rollout.authors,
            rollout.token_versions,
            rollout.loss_mask,
        )

    @classmethod
    def from_sample(cls, sample: Sample, author: Author, version: int) -> "Tokens":
        """Return sampled tokens of one author; other writers' tokens have no policy log-probabilities."""
        count = len(sample.tokens)
        policy_logprobs = sample.policy_logprobs
        if author != "student":
            policy_logprobs = torch.full_like(policy_logprobs, torch.nan)
        return cls(
            sample.tokens,
            sample.sampling_logprobs,
            policy_logprobs,
            _repeat_author(author, count),
            torch.full((count,), version),
            torch.ones(count, dtype=torch.bool),
        )

    @classmethod
    def from_text(
        cls, ids: Sequence[int], author: Author, version: int, *, in_loss: bool
    ) -> "Tokens":
        """Return the tokens of a text that was not sampled."""
        count = len(ids)
        return cls(
            torch.tensor(ids, dtype=torch.long),
            torch.zeros(count),
            torch.full((count,), torch.nan),
            _repeat_author(author, count),
            torch.full((count,), version),
            torch.full((count,), in_loss, dtype=torch.bool),
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __add__(self, end: "Tokens") -> "Tokens":
        return Tokens.join([self, end])

    def cut(self, start: int, end: int | None = None) -> "Tokens":
        """Return the tokens from `start` to before `end`; without `end`, to the last token."""
        return self[start:end]

    def where(self, mask: Bool[Tensor, " T"] | bool) -> "Tokens":
        """Return the same tokens, and remove the loss where the mask is False."""
        return replace(self, in_loss=self.in_loss & mask)

    def is_by(self, author: Author) -> Bool[Tensor, " T"]:
        """Return a mask that is True at the tokens that `author` wrote."""
        return self.authors == AUTHORS.index(author)

    def to_sample(self, stop_reason: StopReason) -> Sample:
        """Return the tokens as one sample."""
        return Sample(self.ids, self.sampling_logprobs, self.policy_logprobs, stop_reason)

    def put_into(self, rollout: Rollout, source: Source) -> Rollout:
        """Return the rollout with these tokens, written by `source`.

        The states of the replaced tokens are dropped.
        """
        has_versions = len(self.versions.unique()) > 1
        return replace(
            rollout,
            tokens=self.ids,
            loss_mask=self.in_loss,
            sampling_logprobs=self.sampling_logprobs,
            policy_logprobs=self.policy_logprobs,
            policy_version=int(self.versions.min()) if len(self) else rollout.policy_version,
            source=source,
            # A column is not needed if all tokens have the same author or version.
            authors=None if self.is_by(source).all() else self.authors,
            versions=self.versions if has_versions else None,
            states=None,
        )


def _repeat_author(author: Author, count: int) -> UInt8[Tensor, " T"]:
    return torch.full((count,), AUTHORS.index(author), dtype=torch.uint8)
