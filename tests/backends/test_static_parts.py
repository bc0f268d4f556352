"""Noise, attention and weights of the static step, and the trial that decides whether a model may use it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.backends.local import trial
from practicum.backends.local.drawing import draw_exponentials, open_random_stream
from practicum.backends.local.language_model import Decoding
from practicum.backends.local.llama_weights import find_llama_weights
from practicum.backends.local.loading import load
from practicum.backends.local.native import name_decoding
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.static import attention, noise
from practicum.backends.local.static.weights import pack_weights
from practicum.backends.local.trial import choose_decoding, find_graph
from practicum.errors import ModelError
from practicum.models.config import ModelConfig

from .folders import model_folder
from .test_native import MODELS, make
from .test_static import PARAMS, assert_alike, requests, sample
from .tiny import tiny

# Noise


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3), st.integers(1, 60_000))
def test_the_noise_is_that_of_the_streams_of_the_cpu(seeds, vocabulary):
    streams = [open_random_stream(seed) for seed in seeds]
    states = torch.stack([noise.read_stream(seed) for seed in seeds])
    for _ in range(3):
        expected = draw_exponentials(streams, vocabulary)
        drawn, states = noise.draw_exponentials_on_device(states, vocabulary)
        torch.testing.assert_close(drawn, expected, rtol=4e-16, atol=0)


def test_the_words_are_those_of_the_twister():
    """The first and the ten thousandth number of the reference program (the C++ standard states the last one)."""
    words = noise._extend(noise.read_stream(5489)[None], 10_000)
    numbers = noise._temper(words[:, noise.WORDS :])[0]
    assert numbers[0].item() == 3_499_211_612
    assert numbers[9_999].item() == 4_123_659_995


# Attention


def build_table(active=(True, True, False)):
    pages = torch.tensor([[4, 1, 6], [2, 5, 0], [0, 0, 0]])
    lengths = torch.tensor([9, 3, 0])
    return attention.PageTable.build(pages, lengths, torch.tensor(active), 4)


def test_a_row_writes_after_its_text_and_rows_without_one_into_page_0():
    table = build_table()
    assert table.cells.tolist() == [4 * 6 + 1, 4 * 2 + 3, 0]
    assert table.key_counts.tolist() == [10, 4, 1]
    assert build_table((False, True, True)).cells.tolist() == [0, 11, 0]


def test_the_flash_kernel_is_given_what_the_mask_computes():
    """Check that the kernel's twin only reads each row's pages, as the kernel's documentation states."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 8, 4, 2, 6, generator=generator)
    queries = torch.randn(3, 4, 6, generator=generator)

    def kernel(queries, keys, values, ends, key_ends, longest, reach, **options):
        assert (longest, reach, options["enable_gqa"]) == (1, 12, True)
        assert ends.tolist() == [0, 1, 2, 3]
        assert key_ends.diff().tolist() == options["seqused_k"].tolist()
        integers = (ends, key_ends, options["seqused_k"], options["block_table"])
        assert {item.dtype for item in integers} == {torch.int32}
        outputs = []
        for row, seen in enumerate(options["seqused_k"].tolist()):
            pages = options["block_table"][row].long()
            states = (store[pages].flatten(0, 1)[:seen].transpose(0, 1) for store in (keys, values))
            outputs.append(
                torch.nn.functional.scaled_dot_product_attention(
                    queries[row][:, None], *states, enable_gqa=True
                )[:, 0]
            )
        return torch.stack(outputs)

    table = build_table()
    torch.testing.assert_close(
        attention.attend_by_flash(queries, keys, values, table, kernel),
        attention.attend_by_mask(queries, keys, values, table),
    )


def test_the_flash_kernel_is_for_16_bits_on_a_cuda_device():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert attention.can_attend_by_flash(cuda, torch.bfloat16, 128) == attention.HAS_PAGES
    assert not attention.can_attend_by_flash(cuda, torch.float32, 128)
    assert not attention.can_attend_by_flash(cuda, torch.bfloat16, 20)
    assert not attention.can_attend_by_flash(cpu, torch.bfloat16, 128)


# Weights


@pytest.mark.parametrize("kind", ["biases", "all biases", "untied"])
def test_texts_of_other_layouts_are_those_of_the_modules(kind):
    model = replace(make(MODELS[kind]), decoding=Decoding.TORCH)
    assert_alike(sample(model), LocalSampler(model, batch_size=4).sample(requests(), PARAMS))


def test_adapters_stay_beside_their_weights():
    model = replace(make(MODELS["biases"], adapters=True), decoding=Decoding.TORCH)
    assert_alike(sample(model), LocalSampler(model, batch_size=4).sample(requests(), PARAMS))


def test_an_adapter_too_small_for_bfloat16_is_not_lost():
    """Use factors of a thousandth of a step, which would not change weights of bfloat16."""
    model = replace(make(adapters=True), autocast=True)
    for name, weight in model.model.named_parameters():
        if "lora_" in name:
            weight.data = weight.data * 1e-3
        else:
            weight.data = weight.data.bfloat16()
    packed = pack_weights(model)
    first = packed.layers[0].qkv
    assert (packed.dtype, first.weight.dtype, packed.wide) == (torch.bfloat16,) * 3
    rows = torch.randn(4, 42, generator=torch.Generator().manual_seed(0)).bfloat16()
    adapted = torch.nn.functional.linear(torch.nn.functional.linear(rows, first.down), first.up)
    layer = model.model.base_model.layers[0].self_attn.q_proj
    expected = layer.lora_B["default"](layer.lora_A["default"](rows.float()))
    expected = expected * layer.scaling["default"]
    assert expected.abs().min() > 0
    torch.testing.assert_close(
        adapted[:, : expected.shape[1]].float(), expected, rtol=0.05, atol=1e-7
    )


def test_what_learns_is_rounded_once_and_norms_stay_as_wide_as_they_are():
    model = replace(make(MODELS["head norms"]), autocast=True)
    packed = pack_weights(model)
    layer = packed.layers[0]
    assert packed.wide == layer.input_norm.dtype == layer.key_norm.dtype == torch.float32
    assert layer.qkv.weight.dtype == layer.down.weight.dtype == torch.bfloat16
    model.model.base_model.embed_tokens.bfloat16()
    packed = pack_weights(model)
    assert (packed.wide, packed.layers[0].input_norm.dtype) == (torch.bfloat16, torch.float32)


# The trial


@pytest.mark.parametrize("kind", ["llama", "biases", "head norms"])
def test_the_trial_takes_llama_like_models(kind):
    model = make(MODELS[kind])
    assert find_graph(model) is Decoding.MASKED_GRAPH
    assert find_graph(replace(model, autocast=True)) is Decoding.MASKED_GRAPH


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "gemma3_text"},
        {"model_type": "granite", "residual_multiplier": 0.5},
        {"hidden_act": "gelu"},
    ],
)
def test_the_trial_leaves_other_models_to_their_modules(settings):
    assert find_graph(make(settings)) is Decoding.TORCH


def test_a_kernel_that_refuses_is_passed_over(monkeypatch, caplog):
    def refuse(*states):
        raise RuntimeError("paged keys\nare not for this device")

    monkeypatch.setitem(trial_attention(), Decoding.FLASH_GRAPH, refuse)
    monkeypatch.setattr(trial, "list_graphs", lambda model, width: list(trial_attention()))
    assert find_graph(tiny()) is Decoding.MASKED_GRAPH
    (record,) = caplog.records
    assert "does not work on this device (paged keys" in record.message
    assert "\n" not in record.message


def test_a_kernel_that_computes_something_else_is_passed_over(monkeypatch, caplog):
    monkeypatch.setitem(
        trial_attention(), Decoding.FLASH_GRAPH, lambda queries, *states: torch.ones_like(queries)
    )
    monkeypatch.setattr(trial, "list_graphs", lambda model, width: list(trial_attention()))
    assert find_graph(tiny()) is Decoding.MASKED_GRAPH
    assert "differ by" in caplog.text


def trial_attention():
    from practicum.backends.local.static import ATTENTION

    return ATTENTION


def test_the_way_is_a_part_of_the_identity():
    model = tiny()
    assert name_decoding(model) == "torch"
    for way in (Decoding.FLASH_GRAPH, Decoding.MASKED_GRAPH):
        assert name_decoding(replace(model, decoding=way)) == way.value


def test_a_graph_is_for_cuda_devices(tmp_path):
    assert choose_decoding(tiny("gemma3"), "graph") is Decoding.TORCH
    folder = model_folder(tmp_path / "model")
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(
        ModelError, match=r"decoding is graph, but a captured step needs a CUDA dev"
    ):
        load(ModelConfig(model=str(folder)), decoding="graph")


def test_names_of_adapters_do_not_make_another_model_llama_like():
    model = make(adapters=True).model
    assert find_llama_weights(model) is not None
    separate = find_llama_weights(model, merge=False)
    assert "self_attn.q_proj.adapter_up" in separate.layers[0]
    assert "self_attn.k_proj.adapter_up" not in separate.layers[0]
