"""Layers in float64 show whether the compiled program is wrong, or whether the modules only round."""

import copy

import pytest
import torch

from backends.test_native import MODELS, make
from practicum.backends.local import trial
from practicum.backends.local.language_model import LanguageModel, find_layers
from practicum.backends.local.native import load_library
from practicum.backends.local.trial import BOUND, can_decode_natively
from practicum.backends.local.wide import compute_by_forward, compute_in_float64

TEXTS = [(3, 1, 4, 1, 5, 6), (2, 7, 1)]


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_layers_in_float64_are_those_of_a_double_model(kind: str) -> None:
    language_model = make(MODELS[kind])
    before = copy.deepcopy(language_model.model.state_dict())
    wide = compute_in_float64(language_model, TEXTS)
    double = LanguageModel(copy.deepcopy(language_model.model).double(), language_model.vocab_size)
    expected = compute_by_forward(double, TEXTS)
    torch.testing.assert_close(wide[0].double(), expected[0].double(), rtol=0, atol=1e-5)
    for name, weight in language_model.model.state_dict().items():
        assert weight.equal(before[name]) and weight.dtype == torch.float32
    plain = compute_by_forward(language_model, TEXTS)
    torch.testing.assert_close(plain[0], wide[0], rtol=0, atol=1e-4)


def test_modules_that_round_by_more_than_the_bound_do_not_refuse_the_program(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SmolLM2 in float32 is 1.1e-4 nats from float64 on some processors; the program is nearer."""
    if load_library() is None:
        pytest.skip("no compiled program on this processor")
    rounded = _round(compute_by_forward)
    for name in ("_measure_native_step", "_measure_scores"):
        measure = getattr(trial, name)
        defaults = (rounded,) if measure.__defaults__ else ()
        monkeypatch.setattr(measure, "__defaults__", defaults)
    monkeypatch.setattr(trial, "_has_native_twin", lambda model: True)
    assert can_decode_natively(make())
    assert not caplog.records
    other = make()
    layer = find_layers(other.model)[0]  # type: ignore[index]
    layer.register_forward_hook(lambda module, arguments, output: 1.01 * output)
    assert not can_decode_natively(other)
    assert "the compiled program differs by" in caplog.text


def _round(compute: trial.Forward) -> trial.Forward:
    def compute_rounded(*arguments):  # type: ignore[no-untyped-def]
        logprobs = compute(*arguments)
        return logprobs + 3 * BOUND * (-1.0) ** torch.arange(logprobs.shape[-1])

    return compute_rounded
