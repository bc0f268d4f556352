"""The compiled attention of segments against its definition in float64, at both vector widths."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from practicum.backends.local.native.library import VECTORS
from practicum.backends.local.native.packed import NativeSegments

from .programs import open_program

ROOT, CHILD = range(5), range(60, 61)
CASES = {
    "one": ([[range(173)]], 3, 3, 64, 64),
    "tree": (
        [
            [ROOT],
            [ROOT, range(5, 60)],
            [ROOT, CHILD],
            [ROOT, CHILD, range(61, 150)],
            [range(150, 151)],
        ],
        *(6, 2, 64, 32),
    ),
    "long root": ([[range(300)], [range(300), range(300, 420)]], 4, 1, 128, 128),
    "few vectors": ([[range(70)], [range(70), range(70, 90)]], 2, 1, 16, 48),
}
"""The positions of each segment and the positions before it, query heads, groups, and the widths of keys and values."""


Build = Callable[[list[list[range]]], NativeSegments]


@pytest.fixture(params=VECTORS)
def build_segments(request: pytest.FixtureRequest) -> Build:
    """Build segments for one vector width."""
    return partial(NativeSegments.build, open_program(request.param))


def draw(name: str) -> tuple[list[list[range]], list[torch.Tensor]]:
    """Draw queries, keys, values and a gradient, as the strided views that a model makes of them."""
    paths, heads, groups, width, value_width = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    tokens = paths[-1][-1].stop
    shapes = [(heads, width), (groups, width), (groups, value_width), (heads, value_width)]
    return paths, [
        torch.randn(count, tokens, wide, generator=generator).transpose(0, 1)
        for count, wide in shapes
    ]


def attend(segments: NativeSegments, states: list[torch.Tensor]) -> torch.Tensor:
    queries, keys, values = states
    return segments.attend(queries, keys, values, 0.3)


def attend_exactly(paths: list[list[range]], states: list[torch.Tensor]) -> torch.Tensor:
    """Attend with a mask, one segment at a time."""
    queries, keys, values = states
    outputs = []
    for path in paths:
        seen, own = [torch.tensor([i for span in part for i in span]) for part in (path, path[-1:])]
        k, v = (
            x[seen].repeat_interleave(queries.shape[1] // x.shape[1], 1) for x in (keys, values)
        )
        scores = 0.3 * torch.einsum("qhd,khd->hqk", queries[own], k)
        hidden = torch.arange(len(seen)) > torch.arange(len(seen) - len(own), len(seen))[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_the_definition(
    build_segments: Build, name: str
) -> None:
    paths, (*states, gradient) = draw(name)
    single = [state.requires_grad_() for state in states]
    exact = [state.detach().double().requires_grad_() for state in states]
    outputs, expected = attend(build_segments(paths), single), attend_exactly(paths, exact)
    assert torch.allclose(outputs.double(), expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(outputs, single, gradient)
    for one, other in zip(
        gradients, torch.autograd.grad(expected, exact, gradient.double()), strict=True
    ):
        assert torch.allclose(one.double(), other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


def test_bits_depend_on_neither_threads_nor_other_segments(build_segments: Build) -> None:
    paths, (*states, gradient) = draw("tree")
    single, threads = [state.requires_grad_() for state in states], torch.get_num_threads()

    def compute(some: list[list[range]]) -> list[torch.Tensor]:
        outputs = attend(build_segments(some), single)
        rows = [i for path in some for i in path[-1]]
        return [outputs[rows], *torch.autograd.grad(outputs[rows], single, gradient[rows])]

    together, root = compute(paths), compute([[ROOT]])
    torch.set_num_threads(3)
    try:
        shared = compute(paths)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(shared, together, strict=True))
    assert torch.equal(root[0], together[0][: len(ROOT)])
    # The queries of a segment do not depend on the segments below it.
    assert torch.equal(root[1][: len(ROOT)], together[1][: len(ROOT)])


@pytest.mark.parametrize("which", range(3))
def test_a_number_that_is_none_reaches_the_outputs_that_see_it(
    build_segments: Build, which: int
) -> None:
    paths, (*states, _) = draw("one")
    states[which] = states[which].clone()
    states[which][100] = torch.nan
    outputs = attend(build_segments(paths), states)
    # Queries are multiplied six at a time, with the keys of the last one.
    assert outputs[:95].isfinite().all()
    assert outputs[100].isnan().all()
    assert which == 0 or outputs[100:].isnan().all()


def test_other_states_are_left_to_torch(build_segments: Build) -> None:
    segments = build_segments([[ROOT]])
    heads = torch.zeros(5, 2, 64)
    assert segments.can_attend(heads, heads, 0.0)
    assert not segments.can_attend(heads, heads, 0.1), "dropout"
    assert not segments.can_attend(heads.bfloat16(), heads.bfloat16(), 0.0)
    assert not segments.can_attend(heads[..., :60], heads, 0.0)
