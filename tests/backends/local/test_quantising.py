"""Weights with fewer bits have the format's values and size, and do not depend on where they are kept."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from backends.folders import model_folder
from practicum.backends.local.language_model import LanguageModel, find_body
from practicum.backends.local.loading import load
from practicum.backends.local.quantising import quantise, simulate_nvfp4
from practicum.backends.local.residency import build_scorer
from practicum.errors import ModelError
from practicum.models.config import ScorerConfig
from practicum.models.quantization import QUANTIZATIONS, count_weight_bytes
from practicum.objective import Full
from practicum.ports import SampleRequest
from practicum.teachers.model import compute_fingerprint
from practicum.types import SamplingParams, ScoreRequest

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The sizes of E2M1 by their code; an even code has an even mantissa."""

REQUESTS = [ScoreRequest((3, 4, 5), (6, 7, 8, 9)), ScoreRequest((5,), (4,))]
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 15}
TAKES = {"int8": 0.02, "nf4": 0.3, "nvfp4": 0.3}
"""Nats that the largest difference of a tiny random model's log-probabilities may have."""


def list_e4m3() -> list[float]:
    """List the finite sizes of E4M3 by their code: four bits of exponent with a bias of 7, three of mantissa."""
    sizes = []
    for exponent, mantissa in itertools.product(range(16), range(8)):
        if (exponent, mantissa) == (15, 7):
            continue  # the code of NaN
        sizes.append(
            mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        )
    return sizes


def choose(size: float, table) -> float:
    """Return the nearest entry; of two equally near entries, the entry with the even code."""
    best = min(range(len(table)), key=lambda code: (abs(table[code] - size), code % 2))
    return table[best]


def slow_nvfp4(weight: Tensor) -> Tensor:
    """Compute NVFP4 of a matrix, number by number in double precision."""
    whole = max(abs(number) for row in weight.tolist() for number in row) / (6 * 448)
    scales = list_e4m3()
    rows = []
    for row in weight.tolist():
        values = []
        for start in range(0, len(row), 16):
            block = row[start : start + 16]
            scale = choose(max(map(abs, block)) / 6 / whole, scales) * whole
            for number in block:
                size = choose(abs(number) / scale, E2M1) * scale if scale else 0.0
                values.append(size if number >= 0 else -size)
        rows.append(values)
    return torch.tensor(rows)


def scorer(folder: Path, **settings):
    config = ScorerConfig.model_validate({"model": str(folder), "device": "cpu", **settings})
    return build_scorer(load(config), config, batch_size=2, chunk_tokens=3)


def logprobs(folder: Path, **settings) -> Tensor:
    signals = scorer(folder, **settings).score(REQUESTS, Full())
    return torch.cat([signal.head.logprobs(signal.states) for signal in signals])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("bits") / "model")


@pytest.mark.parametrize("columns", [16, 40, 5])
def test_nvfp4_has_the_values_that_its_tables_give(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    # Rows of very different sizes, so that scales underflow too.
    sizes = torch.tensor([[1.0], [1e-2], [1e-7], [3.0]])
    weight = torch.randn(4, columns, generator=generator) * sizes
    torch.testing.assert_close(simulate_nvfp4(weight), slow_nvfp4(weight), rtol=1e-6, atol=0)


def test_nvfp4_rounds_ties_to_even_and_keeps_what_it_has() -> None:
    row = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -2.5, 6.0, 0.0, 0, 0, 0, 0, 0, 0]])
    rounded = simulate_nvfp4(row)
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -2.0, 6.0])
    torch.testing.assert_close(rounded[0, :9], expected)
    assert simulate_nvfp4(rounded).equal(rounded)
    assert simulate_nvfp4(torch.zeros(2, 20)).equal(torch.zeros(2, 20))


def test_nvfp4_is_that_of_torchao_bit_for_bit() -> None:
    peer = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    weight *= torch.logspace(-3, 1, 64)[:, None]
    whole = peer.per_tensor_amax_to_scale(weight.abs().amax())
    theirs = peer.NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=whole)
    assert simulate_nvfp4(weight).equal(theirs.dequantize(torch.float32))


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_scores_change_by_rounding_and_alike_wherever_the_weights_are(
    folder: Path, name: str
) -> None:
    if name != "nvfp4":
        pytest.importorskip("torchao")
    exact, rounded = logprobs(folder), logprobs(folder, quantization=name)
    assert 0 < (rounded - exact).abs().max() < TAKES[name]
    for residency in ("swap", "disk"):
        assert logprobs(folder, quantization=name, residency=residency).equal(rounded)
    half = logprobs(folder, quantization=name, dtype="bfloat16")
    assert (half - rounded).abs().max() < 0.1
    writer = scorer(folder, quantization=name)
    sample = writer.sample([SampleRequest((3, 4), 1)], SamplingParams(4))[0]
    again = writer.score([ScoreRequest((3, 4), tuple(sample.tokens.tolist()))], Full())[0]
    scored = again.head.logprobs(again.states).gather(1, sample.tokens[:, None])[:, 0]
    torch.testing.assert_close(scored, sample.policy_logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_the_bytes_are_those_that_a_plan_counts(folder: Path, name: str) -> None:
    pytest.importorskip("torchao")
    config = ScorerConfig.model_validate(
        {"model": str(folder), "device": "cpu", "quantization": name}
    )
    model = load(config).language_model.model
    layers = [part for part in find_body(model).modules() if isinstance(part, torch.nn.Linear)]
    stored = 0
    for layer in layers:
        names, _ = layer.weight.__tensor_flatten__()
        stored += sum(getattr(layer.weight, part).nbytes for part in names)
    linear = sum(layer.weight.numel() for layer in layers)
    # Scales, and the tables of each tensor, are a large part of a tiny model.
    assert stored == pytest.approx(count_weight_bytes(linear, linear, 4, name), rel=0.25)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LlamaForCausalLM(LlamaConfig(hidden_size=12, intermediate_size=20, **SIZES)),
         "layers.0.self_attn.q_proj has 144 weights, and quantization nf4 needs a multiple of 64"),
        (lambda: GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=15)),
         "not in torch linear layers"),
    ],
    ids=["no whole blocks", "transposed maps"],
)  # fmt: skip
def test_a_model_that_cannot_be_rounded_is_refused(build, message: str) -> None:
    config = ScorerConfig.model_validate({"model": "m", "quantization": "nf4"})
    with pytest.raises(ModelError, match=message):
        quantise(LanguageModel(build(), 15), config, "m")


def test_the_format_is_part_of_a_store_of_scores(folder: Path) -> None:
    keys = {
        compute_fingerprint(ScorerConfig.model_validate({"model": str(folder), "quantization": q}))
        for q in (None, *QUANTIZATIONS)
    }
    assert len(keys) == 4


def test_shared_bases_stay_exact() -> None:
    settings = {"model": "x", "quantization": "int8", "residency": "shared"}
    with pytest.raises(ValueError, match="leave one of them out"):
        ScorerConfig.model_validate(settings)
