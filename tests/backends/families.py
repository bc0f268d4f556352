"""Tiny models of every causal architecture that transformers ships, and the features that work with each; see docs/models.md.

`python -m tests.backends.families` tries them all, each in its own process, and stores the outcome in families.json, from
which the page is generated. It takes an hour. With names or model types it only tries these; with `missing` it only tries
architectures that have no outcome yet: `python -m tests.backends.families SmolLM3 gemma3_text`. Architectures without a name
here are not resumed, exported or adapted.

Each model has the defaults of its config except for sizes: one layer for each position in the period of the lists that differ
between layers, and thresholds such as a window so short that the texts cross them.
"""

import contextlib
import copy
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from practicum.backends.local.export import export
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.loading import LoadedModel, load, load_student, set_trainable
from practicum.backends.local.packing import compute_hidden_states
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.trainer import LocalTrainer
from practicum.errors import PracticumError
from practicum.models.config import Lora, StudentConfig
from practicum.objective import Objective, Sampled
from practicum.ports import AdamParams
from practicum.text import build_character_tokenizer
from practicum.types import SampleRequest, SamplingParams, ScoreRequest

from .tiny import VOCABULARY, data_for, random_tokens, rollouts

OUTCOME = Path(__file__).with_suffix(".json")
COLUMNS = ("load", "pack", "sample", "score", "learn", "resume", "export", "lora")
NAMED = COLUMNS[5:]
"""The columns that are only tried with the named families."""
NOT_YET = "not tried yet: `python -m tests.backends.families missing`"
"""The columns: `load` as a student, `pack`: whether texts are packed end to end, `lora`: one step of adapters, exported."""

TINY = {
    "vocab_size": VOCABULARY + 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FEWEST_LAYERS, MOST_LAYERS = 2, 8
SHORT = 8
"""The number of tokens that replaces each threshold of a config; texts are longer."""

THRESHOLDS = (
    "sliding_window",
    "attention_chunk_size",
    "original_max_position_embeddings",
    "floor_scale",
    "window_size",
    "attention_window_size",
    "local_attention_window_size",
    "block_size",
)
SIZES = {
    "head_dim": 8,
    "n_embd": 32,
    "n_head": 4,
    "d_model": 32,
    "n_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_attention_heads": 4,
    "shared_intermediate_size": 16,
    "intermediate_size_mlp": 48,
    "state_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY + 8,
    "dropout": 0.0,
    "activation_dropout": 0.0,
    "residual_dropout": 0.0,
    "embedding_dropout": 0.0,
}
"""Sizes of further architectures; only sizes that the config has are set."""

MOST_PARAMETERS = 20_000_000
"""A model that stays larger than this is not tried."""

SECONDS = 150
"""The maximum seconds for one architecture in the whole table."""

LEFT_OUT = object()
"""Replacements for settings of `TINY` that a config does not accept."""

ENDLESS = {"max_position_embeddings": LEFT_OUT}
NO_DROPOUT = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MAMBA2 = {
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}


@dataclass(frozen=True)
class Family:
    """An architecture: its name on the page, transformers' `model_type`, and the settings of its config in addition to `TINY`."""

    name: str
    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)


FAMILIES = (
    Family("Llama", "llama"),
    Family("Qwen2", "qwen2"),
    Family("Qwen3", "qwen3"),
    Family("Qwen3-MoE", "qwen3_moe", EXPERTS),
    Family("Qwen3-Next", "qwen3_next", EXPERTS),
    Family("Qwen3.5 text", "qwen3_5_text"),
    Family("Mistral", "mistral"),
    Family("Ministral 3", "ministral3"),
    Family("Mixtral", "mixtral", EXPERTS),
    Family("MiniMax", "minimax", EXPERTS),
    Family("Gemma", "gemma"),
    Family("Gemma 2", "gemma2"),
    Family("Gemma 3", "gemma3_text"),
    Family("Phi", "phi", NO_DROPOUT),
    Family("Phi-3", "phi3", NO_DROPOUT),
    Family("OLMo 2", "olmo2"),
    Family("OLMo 3", "olmo3"),
    Family("OLMoE", "olmoe", EXPERTS),
    Family("Cohere", "cohere"),
    Family("Cohere 2", "cohere2"),
    Family("Granite", "granite", {"logits_scaling": 2.0}),
    Family("Granite-MoE", "granitemoe", EXPERTS),
    Family(
        "Granite 4 hybrid",
        "granitemoehybrid",
        {
            **EXPERTS,
            **MAMBA2,
            "shared_intermediate_size": 16,
            "num_hidden_layers": 2,
            "layer_types": ["mamba", "attention"],
        },
    ),
    Family("Bamba", "bamba", {**MAMBA2, "num_hidden_layers": 2, "attn_layer_indices": [1]}),
    Family("Jamba", "jamba", {**EXPERTS, "mamba_d_state": 8, "num_hidden_layers": 8}),
    Family("Falcon-H1", "falcon_h1", {**MAMBA2, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5}),
    Family(
        "LFM2",
        "lfm2",
        {
            "num_hidden_layers": 2,
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
        },
    ),
    Family("Mamba", "mamba", {**ENDLESS, "state_size": 8, "expand": 2}),
    Family(
        "Mamba 2",
        "mamba2",
        {**ENDLESS, "state_size": 8, "expand": 2, "num_heads": 8, "n_groups": 1, "chunk_size": 8},
    ),
    Family("Falcon-Mamba", "falcon_mamba", {**ENDLESS, "state_size": 8, "expand": 2}),
    Family("RWKV", "rwkv", {"attention_hidden_size": 32}),
    Family(
        "RecurrentGemma",
        "recurrent_gemma",
        {"lru_width": 32, "num_hidden_layers": 3},
    ),
    Family("Falcon", "falcon", {**NO_DROPOUT, "alibi": False, "head_dim": LEFT_OUT}),
    Family("Falcon with ALiBi", "falcon", {**NO_DROPOUT, "alibi": True, "head_dim": LEFT_OUT}),
    Family("Bloom", "bloom", {**NO_DROPOUT, **ENDLESS}),
    Family("MPT", "mpt", {**ENDLESS, "max_seq_len": 256}),
    Family("GPT-2", "gpt2", NO_DROPOUT),
    Family(
        "GPT-Neo",
        "gpt_neo",
        {**NO_DROPOUT, "num_hidden_layers": 2, "attention_types": [[["global", "local"], 1]]},
    ),
    Family("GPT-NeoX", "gpt_neox", NO_DROPOUT),
    Family("GPT-J", "gptj", {**NO_DROPOUT, "rotary_dim": 4}),
    Family("OPT", "opt", {"dropout": 0.0, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    Family("GPT-OSS", "gpt_oss", EXPERTS),
    Family("Llama 4 text", "llama4_text", {**EXPERTS, "intermediate_size_mlp": 48}),
    Family("StarCoder 2", "starcoder2", {"residual_dropout": 0.0, "embedding_dropout": 0.0}),
    Family("StableLM", "stablelm", NO_DROPOUT),
    Family("SmolLM3", "smollm3"),
    Family("EXAONE 4", "exaone4", {"sliding_window": 8, "sliding_window_pattern": 4}),
    Family("GLM-4", "glm4"),
    Family("GLM-4-MoE", "glm4_moe", {**EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1}),
    Family(
        "DeepSeek-V3",
        "deepseek_v3",
        {
            **EXPERTS,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "head_dim": 4,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
    ),
    Family("Hunyuan", "hunyuan_v1_dense"),
    Family("Seed-OSS", "seed_oss", {**NO_DROPOUT, "residual_dropout": 0.0}),
    Family("ERNIE 4.5", "ernie4_5"),
    Family("Arcee", "arcee"),
    Family("Apertus", "apertus"),
    Family("Helium", "helium"),
    Family("HyperCLOVA X", "hyperclovax", {"logits_scaling": 2.0}),
)


def list_families() -> list[Family]:
    """Return the named families, and every other causal architecture of transformers by its model type."""
    named = {family.model_type for family in FAMILIES}
    others = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - named)
    return [*FAMILIES, *(Family(model_type, model_type) for model_type in others)]


def config_of(family: Family) -> PreTrainedConfig:
    """Return the config of a tiny model of the family: its defaults except for sizes and thresholds."""
    settings = {**TINY, **(family.settings or _find_sizes(family.model_type))}
    settings = {key: value for key, value in settings.items() if value is not LEFT_OUT}
    if "num_hidden_layers" not in settings:
        settings["num_hidden_layers"] = _count_layers(family.model_type, settings)
    described = AutoConfig.for_model(family.model_type, **settings).to_dict()
    return AutoConfig.for_model(family.model_type, **settings, **_shorten(described, settings))


def _find_sizes(model_type: str) -> dict[str, Any]:
    """Return small values for the sizes of an architecture that has no settings here."""
    described = AutoConfig.for_model(model_type).to_dict()
    small = {**SIZES, **EXPERTS, **MAMBA2, **NO_DROPOUT}
    sizes: dict[str, Any] = {key: value for key, value in small.items() if key in described}
    left_out = {
        key: LEFT_OUT for key in ("head_dim", "max_position_embeddings") if key not in described
    }
    return {**sizes, **left_out}


def _count_layers(model_type: str, settings: Mapping[str, Any]) -> int:
    """Return the layers of one period of each list that differs between layers."""
    many = 24
    described = AutoConfig.for_model(
        model_type, **{**settings, "num_hidden_layers": many}
    ).to_dict()
    lists = [v for v in described.values() if isinstance(v, list | tuple) and len(v) == many]
    periods = [
        next(
            n
            for n in range(1, many + 1)
            if all(values[place] == values[place % n] for place in range(many))
        )
        for values in lists
    ]
    return min(max([FEWEST_LAYERS, *periods]), MOST_LAYERS)


def _shorten(described: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return short values for the thresholds of a config and of its rotations."""
    changes: dict[str, Any] = {
        name: SHORT
        for name, value in described.items()
        if name in THRESHOLDS and value and name not in settings
    }
    rotation = described.get("rope_parameters")
    if isinstance(rotation, dict) and "rope_parameters" not in settings:
        changes["rope_parameters"] = {
            key: {**part, **_shorten(part, {})} if isinstance(part, dict) else part
            for key, part in {**rotation, **_shorten(rotation, {})}.items()
        }
    return changes


def build(family: Family, folder: Path) -> Path:
    """Write a tiny model of the family with seeded random weights, and a tokenizer with fewer tokens than the model has rows."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(family))
    model.save_pretrained(folder)
    shutil.copytree(_tokenizer(), folder, dirs_exist_ok=True)
    return folder


@cache
def _tokenizer() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="practicum-families-"))
    tokenizer = build_character_tokenizer(
        "".join(chr(ord("0") + place) for place in range(VOCABULARY - 7))
    )
    assert len(tokenizer) == VOCABULARY
    tokenizer.save_pretrained(folder)
    return folder


def outcome(family: Family, folder: Path) -> dict[str, str]:
    """Return the outcome of each of `COLUMNS`: "yes", "no", or a short reason; of a refused student, the columns that work."""
    base = build(family, folder / "base")
    config = StudentConfig(model=str(base))
    found = {"model_type": family.model_type}
    with _noting(found, "load"):
        student = load_student(config, 0)
    if found["load"] != "yes":
        with _noting(found, "score"):
            score(load(config).language_model)
        return found
    found["pack"] = "yes" if student.language_model.max_packed_tokens else "no"
    # A resumed run reads the file again. A copy in memory would have other addresses, which change the last digit on some
    # processors: weights in a file are aligned to 8 bytes, copies to 64.
    is_named = family in FAMILIES
    began, adapted = (
        (load_student(config, 0), copy.deepcopy(student)) if is_named else (student, student)
    )
    trials = {
        "sample": lambda: sample(student.language_model),
        "score": lambda: score(student.language_model),
        "learn": lambda: learn(student.language_model),
        "resume": lambda: resume(student.language_model, began.language_model),
        "export": lambda: exported(student, folder / "full"),
        "lora": lambda: with_adapters(adapted, config, folder / "lora"),
    }
    for column, trial in trials.items():
        if column in NAMED and not is_named:
            continue
        with _noting(found, column):
            trial()
    return found


@contextlib.contextmanager
def _noting(found: dict[str, str], column: str) -> Iterator[None]:
    try:
        yield
    except PracticumError as error:
        text = str(error).partition(": ")[2] or str(error)
        found[column] = re.sub(r" \([^)]*\)", "", text.partition(";")[0])
    except Exception as error:  # any error in a model's code is an outcome
        found[column] = f"fails with {type(error).__name__}"
    else:
        found[column] = "yes"


def forward_alone(
    model: LanguageModel, prompt: tuple[int, ...], tokens: tuple[int, ...]
) -> torch.Tensor:
    """Return the log-probabilities of tokens by the plain forward pass of transformers, for a single text."""
    logits = model.model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, :, :VOCABULARY]
    predicting = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : len(prompt) + len(tokens) - 1]
    return predicting.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def sample(model: LanguageModel) -> None:
    """Check exact log-probabilities: more requests than rows, unequal lengths, one prompt twice, a common beginning."""
    common = random_tokens(18, 99)
    prompts = [
        common[: 18 * (number % 2)] + random_tokens(3 + 5 * number % 13, number)
        for number in range(4)
    ]
    requests = [
        SampleRequest(prompt, number) for number, prompt in enumerate([*prompts, prompts[0]])
    ]
    params = SamplingParams(9, stop_ids=frozenset({2, 17, 30, 41}))
    samples = LocalSampler(model, batch_size=4).sample(requests, params)
    with torch.no_grad():
        for request, drawn in zip(requests, samples, strict=True):
            expected = forward_alone(model, request.prompt_tokens, tuple(drawn.tokens.tolist()))
            torch.testing.assert_close(drawn.policy_logprobs, expected, rtol=1e-4, atol=1e-4)


def score(model: LanguageModel) -> None:
    """Check the log-probabilities of given tokens, several texts at once."""
    texts = _texts()
    answers = LocalSampler(model).score(texts, Sampled())
    with torch.no_grad():
        for text, answer in zip(texts, answers, strict=True):
            expected = forward_alone(model, text.prompt_tokens, text.tokens)
            torch.testing.assert_close(answer.logprobs, expected, rtol=1e-4, atol=1e-4)


def _texts() -> list[ScoreRequest]:
    return [
        ScoreRequest(random_tokens(2 + 3 * row, row), random_tokens(4 + row, 50 + row))
        for row in range(3)
    ]


def learn(model: LanguageModel, texts: list[ScoreRequest] | None = None) -> None:
    """Check that gradients of texts in one batch equal the gradients of transformers' forward over each."""
    model.model.eval()
    texts = texts or _texts()
    weights = [weight for weight in model.model.parameters() if weight.requires_grad]
    targets = torch.tensor([token for text in texts for token in text.tokens])
    together = (
        model.head().logprobs(compute_hidden_states(model, texts)).gather(1, targets[:, None]).sum()
    )
    alone = sum(forward_alone(model, text.prompt_tokens, text.tokens).sum() for text in texts)
    found, expected = (
        torch.cat(
            [
                part.flatten()
                for part in torch.autograd.grad(value, weights, allow_unused=True)
                if part is not None
            ]
        )
        for value in (together, alone)
    )
    assert (found - expected).norm() <= 1e-4 * expected.norm(), "another gradient"


def _step(trainer: LocalTrainer, number: int) -> None:
    """Do one step away from the current distribution of the model."""
    data = data_for(trainer.language_model, rollouts()[:2])
    for datum in data:
        assert datum.signal.hidden is not None
        datum.signal.hidden.add_(torch.linspace(-1.0, 1.0, datum.signal.hidden.shape[1]))
    trainer.forward_backward(data, Objective(), number)
    assert trainer.optim_step(AdamParams(0.01))["skipped"] == 0
    trainer.language_model.model.eval()


def resume(model: LanguageModel, began: LanguageModel) -> None:
    """Check that two steps equal, bit for bit, one step, saved and loaded into the initial model, and a second step."""
    trainer, again = LocalTrainer(model), LocalTrainer(began)
    _step(trainer, 0)
    again.load_state(copy.deepcopy(trainer.save_state()))
    for twin in (trainer, again):
        _step(twin, 1)
    for name, weight in trainer.save_state()["student"].items():
        assert torch.equal(weight, again.save_state()["student"][name]), f"{name} differs"


def with_adapters(student: LoadedModel, config: StudentConfig, folder: Path) -> None:
    """Do one step of only the adapters, and export them."""
    lora = config.model_copy(update={"lora": Lora(rank=4)})
    student.language_model.model.requires_grad_(False)
    set_trainable(student.language_model.model, lora, 0, student.source)
    _step(LocalTrainer(student.language_model), 0)
    exported(student, folder)


def exported(student: LoadedModel, folder: Path) -> None:
    """Check that transformers reads the export and gives the logits of the student."""
    export(student, folder)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    ids = torch.tensor([random_tokens(9, 3)])
    with torch.no_grad():
        torch.testing.assert_close(
            plain(ids).logits, student.language_model.model(ids).logits, rtol=1e-4, atol=1e-4
        )


def explain_not_run(family: Family) -> str:
    """Return why a family cannot be tried as a tiny model; empty if it can."""
    try:
        config = config_of(family)
        if "text_config" in config.to_dict():
            return "has other parts than a language model"
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # any error in a config's or a model's code is an outcome
        return f"a tiny model fails with {type(error).__name__}"
    size = sum(weight.numel() for weight in model.parameters())
    return "" if size <= MOST_PARAMETERS else f"a tiny model still has {size:.1e} weights"


def try_family(family: Family) -> dict[str, str]:
    """Return the outcome of a family, or why it was not run, from a process that may end early."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "outcome.json"
        process = os.fork()
        if not process:
            try:
                reason = explain_not_run(family)
                found = (
                    {"model_type": family.model_type, "not run": reason}
                    if reason
                    else outcome(family, Path(folder))
                )
                answer.write_text(json.dumps(found), encoding="utf-8")
            finally:
                os._exit(0)
        deadline = time.monotonic() + SECONDS
        while not os.waitpid(process, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                break
            time.sleep(0.05)
        if answer.is_file():
            return json.loads(answer.read_text(encoding="utf-8"))
    return {
        "model_type": family.model_type,
        "not run": f"took more than {SECONDS} s, or ended early",
    }


def write(names: list[str]) -> None:
    """Try the named families, or all, and store the outcome of each immediately."""
    stored = json.loads(OUTCOME.read_text(encoding="utf-8")) if OUTCOME.is_file() else {}
    families = list_families()
    if names == ["missing"]:
        names = [
            family.name
            for family in families
            if stored.get(family.name, {"not run": NOT_YET}).get("not run") == NOT_YET
        ]
    for family in families:
        if names and not {family.name, family.model_type} & set(names):
            continue
        stored[family.name] = found = try_family(family)
        values = [value for value in found.values() if value != "yes"]
        print(family.name, *values, sep=", ", flush=True)
        known = {
            each.name: stored.get(each.name, {"model_type": each.model_type, "not run": NOT_YET})
            for each in families
        }
        OUTCOME.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    write(sys.argv[1:])
