"""Compare a written model or adapter folder with the student that it was written from.

The folder is read once, like every model folder, into CPU memory: in addition to the student, this
takes the size of the exported weights. Both models then score one short text.
"""

from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.loading import LoadedModel, load_student, read_model
from practicum.core.waits import show_wait
from practicum.errors import ModelError
from practicum.models.config import ModelConfig
from practicum.models.sources import is_adapter_folder
from practicum.text.tokenizers import load_tokenizer

PROBE_TEXT = (
    "def area(r):\n    return 3.14 * r ** 2  # 12 tiles cost $3.40\n\n"
    "The quick brown fox jumps over the lazy dog. Größe: 7,5 m. 你好 世界!"
)
"""Code, prose, numbers and letters of several scripts."""

PROBE_TOKENS = 128
"""The longest probe, in tokens."""

SPREAD_TOKENS = 32
"""The number of tokens, in equal steps through the vocabulary, that follow the text."""

EXACT_TOLERANCE = 1e-5
"""The largest divergence in float32, in nats per token.

Adding an adapter to its weights rounds them: 6e-9 in a model of 30 layers. All other exports hold
exactly the student's numbers. For comparison, changing all weights of that model by 1e-3 gives 6e-3
nats.
"""

ROUNDED_TOLERANCE = 0.05
"""The largest divergence in bfloat16, in nats per token.

A merged weight is rounded to 8 bits, and so is each product: 2e-3 in a model of 30 layers. If
rounding changes the chosen experts, the divergence of a token can be ten times as large.
"""


def check_export(loaded: LoadedModel, folder: Path) -> None:
    """Raise ModelError unless a written folder has the student's tokens and log-probabilities."""
    student = loaded.language_model
    dtype = "bfloat16" if student.model.dtype == torch.bfloat16 else "float32"
    # The folder's Python code is the student's code, which has already run.
    is_allowed = student.model.is_remote_code()
    config = ModelConfig(model=str(folder), dtype=dtype, device="cpu", trust_remote_code=is_allowed)
    with show_wait("reading it again to compare it with the student"):
        probe = _check_tokenizer(loaded, config)
        exported = _read_folder(loaded, config)
        exported.check_split()
        # A student in bfloat16 keeps trained weights in float32 and rounds them in each product.
        exported = replace(exported, autocast=student.autocast)
        divergence = _measure_divergence(student, exported, probe)
    tolerance = EXACT_TOLERANCE if student.is_exact else ROUNDED_TOLERANCE
    # `not <=` instead of `>`: NaN is refused too.
    if not divergence <= tolerance:
        raise ModelError(
            f"the written model is not the trained student of {loaded.source} (KL divergence "
            f"{divergence:.2g} nats per token on a short text, and rounding explains {tolerance:g}); "
            "check that its config.json belongs to its weights"
        )


def _read_folder(loaded: LoadedModel, config: ModelConfig) -> LanguageModel:
    """Read the written folder; rounded weights under an adapter are rounded again."""
    folder, settings, student = str(config.model), loaded.student, loaded.language_model
    if settings is not None and settings.quantization is not None and is_adapter_folder(folder):
        return load_student(
            settings.model_copy(update={"model": folder, "device": "cpu"}), seed=0
        ).language_model
    device, packs = torch.device("cpu"), student.max_packed_tokens
    return read_model(folder, config, student.vocab_size, device, packs)


def _check_tokenizer(loaded: LoadedModel, config: ModelConfig) -> list[int]:
    """Return the tokens of the probe; ModelError if the written tokenizer has others."""
    tokenizer, exported = loaded.renderer.tokenizer, load_tokenizer(str(config.model), config)
    probe = tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]
    exported_probe = exported(PROBE_TEXT, add_special_tokens=False)["input_ids"]
    if exported_probe != probe or exported.get_vocab() != tokenizer.get_vocab():
        raise ModelError(
            f"the written tokenizer is not the student's of {loaded.source} (they read a short text "
            f"as {len(exported_probe)} and {len(probe)} tokens); use a tokenizer.json that transformers "
            "writes as it reads it"
        )
    vocab_size = loaded.language_model.vocab_size
    spread = torch.linspace(0, vocab_size - 1, SPREAD_TOKENS).long().tolist()
    return [*probe, *spread][: min(PROBE_TOKENS, loaded.context_length)]


@torch.no_grad()
def _measure_divergence(student: LanguageModel, exported: LanguageModel, probe: list[int]) -> float:
    """Return KL(student || exported) in nats, the mean over the probe's tokens."""
    student.model.eval()
    expected, actual = _score(student, probe), _score(exported, probe)
    return (expected.exp() * (expected - actual)).sum(dim=-1).mean().item()


def _score(model: LanguageModel, tokens: list[int]) -> Float[Tensor, "T V"]:
    """Return the log-probabilities after each token."""
    ids = torch.tensor([tokens], device=model.device)
    hidden = model.body(ids, torch.ones_like(ids, dtype=torch.bool))
    return model.head().logprobs(hidden)[0].cpu()
