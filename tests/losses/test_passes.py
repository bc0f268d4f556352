"""The tokens of some rows of a batch are found without reading all tokens."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.losses.passes import find_tokens


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.data())
def test_the_places_are_those_of_a_comparison_with_every_token(counts, data):
    rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    chosen = data.draw(st.lists(st.integers(0, len(counts) - 1), min_size=1))
    expected = torch.cat([(rows == row).nonzero()[:, 0] for row in chosen])
    assert torch.equal(find_tokens(rows, chosen), expected)
