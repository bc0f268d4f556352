"""The products of a head: summed in float32 for operands of any dtype, and differentiated by hand."""

import pytest
import torch

from practicum.functional.chunked import sum_products
from practicum.functional.head import Head
from practicum.functional.products import BLOCK_ROWS, add_outer, project, project_back

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_round_their_operands_and_not_their_sums(dtype: torch.dtype):
    """Check more rows than one block, and values so large that a result of 8 bits would be far off."""
    hidden, rows, gradient = draw(5, 16), 4 * draw(BLOCK_ROWS + 3, 16), draw(5, BLOCK_ROWS + 3)
    rows = rows.to(dtype)
    exact = hidden.to(dtype).double() @ rows.double().T
    product = project(hidden, rows)
    assert product.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(product.double(), exact, rtol=1e-5, atol=1e-4)
    room = torch.empty_like(product)
    assert project(hidden, rows, room) is room and room.equal(product)
    back = project_back(gradient, rows)
    assert back.dtype == product.dtype
    wanted = gradient.to(dtype).double() @ rows.double()
    torch.testing.assert_close(back.double(), wanted, rtol=1e-4, atol=1e-3)
    total = torch.ones(len(rows), 16, dtype=product.dtype)
    add_outer(total, gradient, hidden, dtype)
    wanted = 1 + gradient.to(dtype).double().T @ hidden.to(dtype).double()
    torch.testing.assert_close(total.double(), wanted, rtol=1e-5, atol=1e-4)


def test_logits_of_a_bfloat16_head_are_those_of_its_weights_and_not_of_eight_bits():
    """Check large logits: in bfloat16, logits of 30 are off by 0.06, and log-probabilities by as much."""
    weight, hidden = 2 * draw(300, 64).bfloat16(), draw(7, 64, seed=1).bfloat16()
    head, exact = Head(weight, 300), Head(weight.double(), 300)
    assert head.logits(hidden).dtype == torch.float32
    error = (head.logprobs(hidden) - exact.logprobs(hidden.double())).abs().max()
    assert error < 1e-4
    room = torch.empty(7, 300)
    assert head.logits(hidden, lambda: room) is room
    assert (room - exact.logits(hidden.double())).abs().max() < 1e-4


@pytest.mark.parametrize("bias", [False, True])
def test_a_head_that_learns_multiplies_a_rounded_copy_and_moves_the_weights_themselves(bias: bool):
    weight = torch.nn.Parameter(draw(40, 8))
    shift = torch.nn.Parameter(draw(40, seed=2)) if bias else None
    hidden = draw(2, 3, 8, seed=1).requires_grad_()
    head = Head(weight, 30, shift, scale=0.5, operand=weight.detach()[:30].bfloat16())
    coefficients = draw(2, 3, 30, seed=3)
    (head.logprobs(hidden) * coefficients).sum().backward()
    rounded = weight.detach().bfloat16().double().requires_grad_()
    states = hidden.detach().bfloat16().double().requires_grad_()
    wide = None if shift is None else shift.detach().double()
    exact = Head(rounded, 30, wide, scale=0.5)
    (exact.logprobs(states) * coefficients).sum().backward()
    for mine, theirs in ((weight.grad, rounded.grad), (hidden.grad, states.grad)):
        assert mine is not None and theirs is not None and mine.dtype == torch.float32
        assert (mine - theirs).norm() < 0.01 * theirs.norm()
    assert weight.grad is not None and weight.grad[30:].abs().max() == 0


def test_both_ways_to_differentiate_a_rounded_head_agree():
    weights = [torch.nn.Parameter(draw(40, 8)) for _ in range(2)]
    heads = [Head(w, 30, scale=0.5, operand=w.detach()[:30].bfloat16()) for w in weights]
    hidden, gradient = draw(6, 8, seed=1).requires_grad_(), draw(6, 30, seed=2)
    heads[0].logits(hidden).backward(gradient)
    closed = heads[1].backward(hidden.detach(), gradient.clone())
    torch.testing.assert_close(closed, hidden.grad)
    torch.testing.assert_close(weights[1].grad, weights[0].grad)


@pytest.mark.parametrize("rows", [0, 1, 4, 11])
def test_products_are_summed_without_a_matrix_as_with_one(rows: int) -> None:
    first, second = torch.randn(2, rows, 37, generator=torch.Generator().manual_seed(rows))
    assert sum_products(first, second).equal((first * second).sum(dim=-1))
