"""Aggregates, gathering and chunks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum import functional as F

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def aggregate_twin(losses, aggregate, norm):
    """Compute the definitions, over sequences that have tokens."""
    rows = [row for row in losses if row]
    if not rows:
        return 0.0
    if aggregate == "token_mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    per_sequence = {
        "seq_mean_token_mean": lambda row: sum(row) / len(row),
        "seq_mean_token_sum": sum,
        "seq_mean_token_sum_norm": lambda row: sum(row) / norm,
    }[aggregate]
    return sum(map(per_sequence, rows)) / len(rows)


@pytest.mark.parametrize("aggregate", F.AGGREGATES)
@given(LENGTHS, st.integers(0, 10**6), st.integers(1, 3))
def test_aggregates_and_their_twin_whatever_the_split(aggregate, lengths, seed, micro):
    generator = torch.Generator().manual_seed(seed)
    losses = [
        torch.rand(length, generator=generator, dtype=torch.float64).tolist() for length in lengths
    ]
    coefficients = F.token_coefficients(lengths, aggregate, 7.0)
    expected = aggregate_twin(losses, aggregate, 7.0)
    batches = [
        list(zip(coefficients, losses, strict=True))[part] for part in F.chunks(len(lengths), micro)
    ]
    assert sum(c * sum(row) for batch in batches for c, row in batch) == pytest.approx(expected)


def test_coefficients_by_hand():
    assert F.token_coefficients([2, 0, 6], "token_mean") == [1 / 8, 0.0, 1 / 8]
    assert F.token_coefficients([2, 0, 6], "seq_mean_token_mean") == [1 / 4, 0.0, 1 / 12]
    assert F.token_coefficients([2, 0, 6], "seq_mean_token_sum") == [1 / 2, 0.0, 1 / 2]
    assert F.token_coefficients([2, 0, 6], "seq_mean_token_sum_norm", 10.0) == [1 / 20, 0.0, 1 / 20]
    assert F.token_coefficients([0, 0], "token_mean") == [0.0, 0.0]
    assert F.token_coefficients([], "token_mean") == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([1], "mean"), "no aggregate named 'mean'; known: token_mean, seq_mean_token_mean"),
        (([1, -1], "token_mean"), r"lengths must not be negative, got \[1, -1\]"),
        (
            ([1], "seq_mean_token_sum_norm"),
            "needs a positive norm, for example the token limit; got None",
        ),
        (([1], "seq_mean_token_sum_norm", 0.0), r"needs a positive norm.*got 0\.0"),
    ],
)
def test_errors(arguments, text):
    with pytest.raises(ValueError, match=text):
        F.token_coefficients(*arguments)


def test_gather():
    logprobs = torch.arange(12.0).view(2, 2, 3)
    ids = torch.tensor([[0, 2], [1, 0]], dtype=torch.int32)
    assert F.gather_logprobs(logprobs, ids).tolist() == [[0.0, 5.0], [7.0, 9.0]]


@given(st.integers(0, 30), st.integers(1, 12))
def test_chunks_cover_everything_once(total, size):
    parts = [list(range(total))[part] for part in F.chunks(total, size)]
    assert [index for part in parts for index in part] == list(range(total))
    assert all(0 < len(part) <= size for part in parts)


def test_chunked_gradient_is_the_whole():
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(10, 5, generator=generator, dtype=torch.float64).log_softmax(-1)
    logits = torch.randn(10, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    whole = torch.autograd.grad(F.reverse_kl(logits.log_softmax(-1), teacher).sum(), logits)[0]
    for part in F.chunks(10, 3):
        F.reverse_kl(logits[part].log_softmax(-1), teacher[part]).sum().backward()
    torch.testing.assert_close(logits.grad, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [0, -1])
def test_chunk_size_is_checked(size):
    with pytest.raises(ValueError, match=f"chunk size must be positive, got {size}"):
        F.chunks(3, size)


def test_every_public_name_is_listed():
    assert sorted(F.__all__) == sorted(set(F.__all__))
    assert all(hasattr(F, name) for name in F.__all__)
