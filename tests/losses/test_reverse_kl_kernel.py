"""The chunk of the compiled reverse KL against the chunk in torch."""

from dataclasses import fields

import pytest
import torch

from practicum.backends.local.native.library import load_library
from practicum.backends.local.native.loss import NativeReverseKL
from practicum.functional.chunked import BufferPool
from practicum.functional.head import Head
from practicum.losses import build_chunk, build_token_batch, compile_objective
from practicum.losses.closed_form import Fused
from practicum.losses.reverse_kl_kernel import MIN_COLUMNS, KernelReverseKL
from practicum.objective import Objective
from practicum.types import TeacherSignal

from .test_sides import batch

WIDTH = 6
library = load_library()
pytestmark = pytest.mark.skipif(library is None, reason="no compiler, or other vectors")


def build_kernel() -> NativeReverseKL:
    assert library is not None
    return NativeReverseKL(library)


@pytest.mark.parametrize("choice", [{}, {"weights": "entropy_top(0.5)"}], ids=str)
def test_a_chunk_says_what_that_in_torch_says(choice: dict[str, str]) -> None:
    objective = Objective.model_validate(choice)
    tokens = build_token_batch(batch(), objective)
    generator = torch.Generator().manual_seed(0)
    count = len(tokens.tokens)
    weights = torch.randn(2, MIN_COLUMNS + 3, WIDTH, generator=generator)
    hidden = torch.randn(2, count, WIDTH, generator=generator)
    signal = TeacherSignal(hidden=hidden[1], head=Head(weights[1], MIN_COLUMNS + 1))
    chunks, gradients, heads = [], [], []
    for kernel in (build_kernel(), None):
        head = Head(torch.nn.Parameter(weights[0].clone()), MIN_COLUMNS + 1, scale=0.7)
        both = signal, TeacherSignal()
        chunk = build_chunk(
            head, hidden[0], both, tokens, compile_objective(objective), BufferPool(kernel)
        )
        chunks.append((chunk, chunk.get_distributions(torch.arange(0, count, 2))))
        gradients.append(chunk.backward([torch.linspace(-1.0, 1.0, count)]))
        heads.append(head.weight.grad)
    assert [type(chunk) for chunk, _ in chunks] == [KernelReverseKL, Fused]
    (mine, my_pair), (other, other_pair) = chunks
    assert my_pair is not None and other_pair is not None
    for one, two in zip(
        (*my_pair, gradients[0], heads[0]), (*other_pair, gradients[1], heads[1]), strict=True
    ):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-5)
    for field in fields(mine.values[0]):
        one, two = (getattr(chunk.values[0], field.name) for chunk in (mine, other))
        assert (one is None) == (two is None), field.name
        if one is not None:
            assert torch.allclose(one.double(), two.double(), rtol=1e-5, atol=1e-5), field.name


@pytest.mark.parametrize(
    "choice",
    [
        {"divergence": "forward_kl"},
        {"losses": [{}, {"signal": "entropy"}]},
        {"clip": "loss(0.6)"},
        {"estimator": "score_function(gamma=1)"},
    ],
    ids=str,
)
def test_other_objectives_keep_their_way(choice: dict[str, object]) -> None:
    objective = Objective.model_validate(choice)
    tokens = build_token_batch(batch(), objective)
    weight = torch.randn(MIN_COLUMNS, WIDTH)
    hidden = torch.randn(len(tokens.tokens), WIDTH)
    signal = TeacherSignal(hidden=hidden, head=Head(weight, MIN_COLUMNS))
    both, pool = (signal, TeacherSignal()), BufferPool(build_kernel())
    chunk = build_chunk(
        Head(weight, MIN_COLUMNS), hidden, both, tokens, compile_objective(objective), pool
    )
    assert not isinstance(chunk, KernelReverseKL)
