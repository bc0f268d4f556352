"""What every editor must keep to: at its ends it is one of the two writers, to the byte."""

from collections.abc import Sequence

import torch

from practicum.types import Rollout

SETTINGS = [{}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}, {"temperature": 0.0}]


def assert_same_text(ours: Sequence[Rollout], theirs: Sequence[Rollout]) -> None:
    """Assert equal bytes of tokens and behaviour log-probabilities, and the same only author."""
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        names = ("text", "source", "stop_reason", "sample", "authors", "prompt_tokens")
        assert [getattr(one, name) for name in names] == [getattr(other, name) for name in names]
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.sampling_logprobs, other.sampling_logprobs)
        if one.source == "student":
            assert torch.equal(one.policy_logprobs, other.policy_logprobs)
    lengths = {len(rollout.tokens) for rollout in ours}
    is_greedy = not any(rollout.sampling_logprobs.any() for rollout in ours)
    assert len(lengths) > 1 or is_greedy, "the answers have several lengths"
