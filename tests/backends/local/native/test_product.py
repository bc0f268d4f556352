"""The compiled product with a packed weight: the matrix product, and each row on its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from practicum.backends.local.native.library import load_library
from practicum.backends.local.native.product import pack_product

LIBRARY = load_library()

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="needs a C compiler and vectors")


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 9),
    columns=st.integers(1, 130),
    depth=st.integers(1, 70),
    seed=st.integers(0, 99),
    has_bias=st.booleans(),
)
def test_it_is_the_product_whatever_the_other_rows_and_the_threads(
    rows, columns, depth, seed, has_bias
):
    assert LIBRARY is not None
    stream = torch.Generator().manual_seed(seed)
    weight = torch.randn(columns, depth, generator=stream)
    bias = torch.randn(columns, generator=stream) if has_bias else None
    states = torch.randn(rows, depth, generator=stream)
    product = pack_product(LIBRARY, weight, bias)
    result = product(states)
    expected = torch.nn.functional.linear(
        states.double(), weight.double(), None if bias is None else bias.double()
    )
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-4)
    for number, row in enumerate(states):
        assert torch.equal(product(row), result[number])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 3)
        assert torch.equal(product(states), result)


def test_states_of_any_shape_and_order_in_memory():
    assert LIBRARY is not None
    product = pack_product(LIBRARY, torch.eye(5, 3), None)
    states = torch.randn(2, 3, 4, 3).transpose(1, 2)
    assert torch.equal(product(states)[..., :3], states)
