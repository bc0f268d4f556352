"""The static step fits a CUDA graph: fixed shapes and addresses, no wait, no number from the host."""

import pytest
import torch

from practicum.types import SampleRequest, SamplingParams

from .captures import NotStatic, StrictCapture
from .test_static import STOPS, assert_alike, finish, open_loop, sample
from .tiny import random_tokens, tiny

DISTRIBUTIONS = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "nucleus": {"temperature": 0.7, "top_p": 0.8, "top_k": 9},
    "banned": {"banned_ids": frozenset({5, 9})},
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_replays_are_the_captured_step(name):
    """Check that each operation keeps its shape and address at every token, and gives the same completions."""
    params = SamplingParams(12, stop_ids=STOPS, **DISTRIBUTIONS[name])
    capture, model = StrictCapture(), tiny("qwen3")
    samples = sample(model, params, capture=capture, window=4)
    assert capture.replays >= 12
    assert_alike(samples, sample(model, params))


def test_few_steps_are_captured_for_many_completions():
    """Check one capture for each power of two of rows and of pages, and again when the stores have grown."""
    asked = [SampleRequest(random_tokens(5 + row % 9, row), row) for row in range(40)]
    capture = StrictCapture()
    loop = open_loop(tiny(), SamplingParams(20, stop_ids=STOPS), 8, asked, capture=capture)
    finish(loop.run(8))
    growths = loop._program.pool.version
    assert growths <= 3
    assert len(capture.captured) <= 4 + 3 + 2 * growths
    assert {len(lines) for lines in capture.captured} == {len(capture.captured[0])}


@pytest.mark.parametrize(
    ("texts", "tokens"),
    [
        pytest.param(2, 250, marks=pytest.mark.long, id="short"),
        pytest.param(16, 2000, marks=pytest.mark.slow, id="long"),
    ],
)
def test_nothing_grows_over_many_tokens(texts, tokens):
    """Check the same operations at the first token and at the last, in stores of a previously known size."""
    capture = StrictCapture()
    asked = [SampleRequest(random_tokens(5, row), row) for row in range(texts)]
    loop = open_loop(tiny(), SamplingParams(251), 2, asked, capture=capture, page_tokens=256)
    finish(loop.run(2))
    assert capture.replays >= tokens
    assert len(capture.captured) == 1
    assert len(loop._program.pool.keys[0]) == 3


@pytest.mark.parametrize(
    "step",
    [
        lambda tensor: tensor.sum().item(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: tensor.nonzero(),
        lambda tensor: torch.tensor([1.0]) + tensor,
        lambda tensor: torch.rand(3),
    ],
    ids=["number", "mask", "nonzero", "number of the host", "generator"],
)
def test_the_capture_refuses_what_a_graph_cannot_hold(step):
    with pytest.raises(NotStatic):
        StrictCapture()(lambda: step(torch.ones(3)))


def test_the_capture_sees_another_shape_and_another_address():
    tensors = [torch.ones(3)]
    replay = StrictCapture()(lambda: tensors[0].add_(1.0))
    replay()
    tensors[0] = tensors[0].clone()
    with pytest.raises(NotStatic):
        replay()
    growing = [torch.ones(3)]
    replay = StrictCapture()(lambda: growing[0] * 2)
    growing[0].resize_(2)
    with pytest.raises(NotStatic):
        replay()
