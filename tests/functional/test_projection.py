"""A distribution carried over to another vocabulary: the explicit matrix, with rows that sum to 1, and its invariants."""

import pytest
import torch

from practicum.functional.divergences import DIVERGENCES
from practicum.functional.projection import decay_weights, project

KEPT = torch.tensor([0, 2, 3])
SPELLED = torch.tensor([1, 1, 1, 4, 5, 5])
COLUMNS = torch.tensor([6, 0, 7, 3, 8, 6])
PLACES = torch.tensor([0, 1, 2, 0, 0, 1])
WIDTH = 9


def matrix(decay: float) -> torch.Tensor:
    """Build W by loops: its rows are the tokens, its columns the tokens of the target vocabulary."""
    dense = torch.zeros(6, WIDTH, dtype=torch.float64)
    for token in KEPT.tolist():
        dense[token, token] = 1.0
    for token, column, place in zip(
        SPELLED.tolist(), COLUMNS.tolist(), PLACES.tolist(), strict=True
    ):
        parts = [decay**other for other in PLACES[token == SPELLED].tolist()]
        dense[token, column] += decay**place / sum(parts)
    return dense


def carry(logprobs: torch.Tensor, decay: float) -> torch.Tensor:
    weights = decay_weights(SPELLED, PLACES, 6, decay)
    return project(logprobs, KEPT, SPELLED, COLUMNS, weights, WIDTH)


@pytest.mark.parametrize("decay", [0.0, 0.3, 1.0])
def test_it_is_a_product_with_a_matrix_whose_rows_sum_to_one(decay: float) -> None:
    dense = matrix(decay)
    torch.testing.assert_close(dense.sum(-1), torch.ones(6, dtype=torch.float64))
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    carried = carry(logits.log_softmax(-1), decay)
    torch.testing.assert_close(carried, logits.softmax(-1) @ dense)
    torch.testing.assert_close(carried.sum(-1), torch.ones(4, dtype=torch.float64))


def test_carrying_both_over_never_raises_an_f_divergence() -> None:
    generator = torch.Generator().manual_seed(1)
    pair = [
        (2 * torch.randn(50, 6, generator=generator, dtype=torch.float64)).log_softmax(-1)
        for _ in range(2)
    ]
    carried = [carry(logprobs, 0.4).log() for logprobs in pair]
    for name in ("forward_kl", "reverse_kl", "jsd", "tvd"):
        entry = DIVERGENCES[name]
        assert (entry.value(*carried) <= entry.value(*pair) + 1e-12).all()


def test_its_gradient_is_that_of_small_changes() -> None:
    logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda raw: carry(raw.log_softmax(-1), 0.3), (logits.requires_grad_(),)
    )


def test_a_decay_outside_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\], got 2"):
        carry(torch.zeros(1, 6), 2.0)
