"""The compiled program between the products of a layer, against its definition in float64."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from practicum.backends._sharded.guarding import guard_layers
from practicum.backends.local.graph import activation_checkpointing
from practicum.backends.local.language_model import Decoding, LanguageModel, patch_forwards
from practicum.backends.local.native import layer, library
from practicum.backends.local.native.library import VECTORS
from practicum.backends.local.packing import compute_hidden_states
from practicum.types import ScoreRequest

from .programs import open_program
from .tiny import random_tokens, tiny


@pytest.fixture(params=VECTORS)
def part(request: pytest.FixtureRequest) -> Any:
    """Return a layer without modules, for one vector width."""
    return layer._Layer(open_program(request.param), 0, {}, 0.1)


def draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).requires_grad_()


def assert_alike(
    compute: Callable[..., torch.Tensor],
    define: Callable[..., torch.Tensor],
    inputs: list[torch.Tensor],
) -> None:
    """Compare values and gradients with a definition in float64, and bits over threads."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = compute(*inputs), define(*exact)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    gradients = torch.autograd.grad(out, inputs, direction, retain_graph=True)
    pairs = zip(
        (out.detach(), *gradients),
        (expected.detach(), *torch.autograd.grad(expected, exact, direction.double())),
        strict=True,
    )
    for one, other in pairs:
        assert torch.allclose(one.double(), other, rtol=1e-5, atol=2e-6 * float(other.abs().max()))
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        shared = compute(*inputs), *torch.autograd.grad(out, inputs, direction)
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(shared, (out, *gradients), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(7, 42), (1, 1), (5, 3, 16)])
def test_a_norm_is_that_of_the_definition(part: Any, shape: tuple[int, ...]) -> None:
    assert_alike(
        lambda x, weight: layer._Norm.apply(x, weight, part),
        lambda x, weight: x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight,
        [draw(*shape), draw(shape[-1])],
    )


@pytest.mark.parametrize("shape", [(7, 42), (1, 1), (3, 64)])
def test_a_gate_is_that_of_the_definition(part: Any, shape: tuple[int, int]) -> None:
    assert_alike(
        lambda gates, ups: layer._Gate.apply(gates, ups, part),
        lambda gates, ups: torch.nn.functional.silu(gates) * ups,
        [draw(*shape), 9 * draw(*shape).detach().requires_grad_()],
    )


@pytest.mark.parametrize("shape", [(7, 3, 10), (1, 1, 2), (5, 2, 64)])
def test_a_rotation_is_that_of_the_definition(part: Any, shape: tuple[int, int, int]) -> None:
    tokens, _, width = shape
    angles = draw(tokens, width // 2).detach().repeat(1, 2)

    def define(heads: torch.Tensor) -> torch.Tensor:
        first, second = heads.chunk(2, dim=-1)
        cosines, sines = angles.double().cos()[:, None], angles.double().sin()[:, None]
        return heads * cosines + torch.cat([-second, first], dim=-1) * sines

    assert_alike(
        lambda heads: layer._Rotation.apply(heads, angles.cos(), angles.sin(), part),
        define,
        [draw(*shape)],
    )


def test_a_number_that_is_none_stays_one(part: Any) -> None:
    states = draw(3, 42).detach()
    states[1, 5] = torch.nan
    assert layer._Norm.apply(states, torch.ones(42), part)[1].isnan().all()
    assert layer._Gate.apply(states, torch.ones(3, 42), part)[1, 5].isnan()


def read(model: LanguageModel, decoding: Decoding) -> list[torch.Tensor]:
    """Return the states and gradients of packed texts with a common beginning."""
    root = random_tokens(40, 1)
    texts = [
        ScoreRequest((*root, 5), random_tokens(9, 3)),
        ScoreRequest((*root, 6), random_tokens(70, 4)),
        ScoreRequest(root, random_tokens(1, 5)),
        ScoreRequest(random_tokens(5, 6), random_tokens(20, 7)),
    ]
    weights = list(model.model.base_model.parameters())
    states = compute_hidden_states(replace(model, decoding=decoding), texts)
    direction = torch.randn(states.shape, generator=torch.Generator().manual_seed(0))
    return [states.detach(), *torch.autograd.grad((states * direction).sum(), weights)]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("head_width", [8, 32])
def test_a_model_reads_packed_texts_as_through_its_modules(
    architecture: str, head_width: int
) -> None:
    if library.load_library() is None:
        pytest.skip("no compiler, or other vectors")
    model = tiny(architecture, head_width=head_width)
    native, twin = (read(model, decoding) for decoding in (Decoding.NATIVE, Decoding.TORCH))
    assert not torch.equal(native[0], twin[0]), "the program was not used"
    for one, other in zip(native, twin, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


def test_a_layer_that_something_else_computes_is_left_alone() -> None:
    made = library.load_library()
    if made is None:
        pytest.skip("no compiler, or other vectors")
    model = tiny()
    first = model.model.base_model.get_submodule("layers.0")

    def pass_on(states: torch.Tensor, **_: Any) -> torch.Tensor:
        return states

    with patch_forwards({first: pass_on}), layer.use_native_layers(made, model):
        assert first.forward is pass_on


def test_layers_that_are_guarded_and_computed_again_give_the_same_gradient() -> None:
    if library.load_library() is None:
        pytest.skip("no compiler, or other vectors")
    model = tiny(head_width=32)
    plain = read(model, Decoding.NATIVE)
    guard = guard_layers(model, lambda error: None)
    with activation_checkpointing(model, True), guard:
        again = read(model, Decoding.NATIVE)
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


def test_dropout_is_left_to_the_modules() -> None:
    made = library.load_library()
    if made is None:
        pytest.skip("no compiler, or other vectors")
    model = tiny(dropout=0.5)
    model.model.train()
    with layer.use_native_layers(made, model):
        assert not any("forward" in module.__dict__ for module in model.model.modules())
