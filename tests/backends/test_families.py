"""The features of each architecture are as docs/models.md says, generated from `families.json`."""

import json
import warnings

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .families import COLUMNS, NOT_YET, OUTCOME, SHORT, config_of, list_families, try_family

MECHANISMS = {
    "Qwen3": "texts that are packed, decoded by the compiled step",
    "Ministral 3": "queries scaled by their position",
    "SmolLM3": "layers without rotary positions",
    "Gemma 3": "windows in some layers",
    "GPT-OSS": "sinks of attention, and a rotation that is stretched",
    "Llama 4 text": "attention in chunks, and a body under another name",
    "LFM2": "states of convolutions",
    "Bamba": "recurrent states",
    "DeepSeek-V3": "latent attention, and experts",
    "Bloom": "biases in place of positions",
    "RWKV": "a refusal",
}
"""The families of `make test`, and properties that only they have. `make slow` tries them all."""
SHORTEST = ("Qwen3", "SmolLM3", "Ministral 3", "LFM2")
"""The families of `make check`."""

WRITTEN = json.loads(OUTCOME.read_text(encoding="utf-8"))


def list_marks(name: str) -> list[pytest.MarkDecorator]:
    if name in SHORTEST:
        return []
    return [pytest.mark.long if name in MECHANISMS else pytest.mark.slow]


def test_every_causal_architecture_of_transformers_has_its_outcome():
    assert list(WRITTEN) == [family.name for family in list_families()]
    assert {found["model_type"] for found in WRITTEN.values()} == set(
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    ) | {family.model_type for family in list_families()}
    assert all(set(found) <= {"model_type", "not run", *COLUMNS} for found in WRITTEN.values())


def test_configs_have_their_defaults_a_full_period_and_short_thresholds():
    families = {family.name: family for family in list_families()}
    smollm3, gemma3, ministral3, llama4 = (
        config_of(families[name]).to_dict()
        for name in ("SmolLM3", "Gemma 3", "Ministral 3", "Llama 4 text")
    )
    assert smollm3["no_rope_layers"] == [1, 1, 1, 0]
    assert gemma3["layer_types"].count("full_attention") == 1 and len(gemma3["layer_types"]) == 6
    assert gemma3["sliding_window"] == llama4["attention_chunk_size"] == SHORT
    assert llama4["no_rope_layers"] == [1, 1, 1, 0] * 2 and llama4["floor_scale"] == SHORT
    assert ministral3["rope_parameters"]["original_max_position_embeddings"] == SHORT
    assert ministral3["rope_parameters"]["llama_4_scaling_beta"] == 0.1


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=list_marks(family.name)) for family in list_families()],
    ids=lambda family: family.name.replace(" ", "-"),
)
def test_the_outcome_is_as_written_down(family):
    if WRITTEN[family.name].get("not run") == NOT_YET:
        pytest.skip(NOT_YET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own warning about configs as small as these
        assert try_family(family) == WRITTEN[family.name]
