"""From what a recipe says about a model to a language model with its tokenizer, refusing what cannot be trusted.

Only safetensors are read and no code from a model folder runs, unless the recipe says so.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from practicum.backends.local.adapters import add_adapters, layers_of
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.packing import enable_packing
from practicum.backends.local.trial import why_unsampled
from practicum.errors import ModelError, ResourceError
from practicum.models.config import ModelConfig, StudentConfig
from practicum.models.sources import locate
from practicum.text import Renderer, stop_ids
from practicum.text.tokenizers import UNREADABLE, load_tokenizer, named_eos, named_tokens, one_line

transformers_logging.disable_progress_bar()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for use: its two halves, its renderer, and the place its weights came from."""

    language_model: LanguageModel
    renderer: Renderer
    source: str

    @property
    def context_length(self) -> int:
        """The longest text that it reads."""
        return self.language_model.context_length


def load(config: ModelConfig, scratch_folder: Path | None = None) -> LoadedModel:
    """Load a model for sampling and scoring; nothing of it learns.

    Raises ModelError with what is wrong with the folder. `scratch_folder` is where a from-scratch model was made.
    """
    device = torch.device("cuda" if _wants_cuda(config) else "cpu")
    source = locate(config, scratch_folder)
    check_config(source, config)
    tokenizer = load_tokenizer(source, config)
    vocabulary = max(tokenizer.get_vocab().values(), default=-1) + 1
    language_model = read_model(source, config, vocabulary, device)
    model = language_model.model
    rows = len(language_model.head().weight)
    if vocabulary > rows:
        raise ModelError(
            f"{source}: the tokenizer has {vocabulary} tokens but the embedding has {rows} rows; "
            "use the tokenizer that belongs to these weights"
        )
    _check_finite(model, source)
    language_model.check_split()
    language_model = replace(
        language_model, unsampled=why_unsampled(language_model), tokenizer=tokenizer
    )
    named = named_tokens(tokenizer, config.stop, source)
    stops = stop_ids(tokenizer, [*_generation_eos(source, model), *named])
    renderer = Renderer(
        tokenizer,
        system=config.system,
        template=config.template,
        thinking=config.thinking,
        stop_ids=stops,
    )
    return LoadedModel(language_model, renderer, source)


def read_model(
    source: str,
    config: ModelConfig,
    vocab_size: int,
    device: torch.device,
    packs: int | None = None,
) -> LanguageModel:
    """A model as its folder holds it, on a device; nothing of it learns. `packs`: its `packs_up_to` where it is known."""
    model = _weights(source, config)
    model.requires_grad_(False)
    model.eval()
    model.to(device)  # type: ignore[arg-type]
    language_model = LanguageModel(model, vocab_size, autocast=config.dtype == "bfloat16")
    return enable_packing(language_model, packs)


def load_student(
    config: StudentConfig, seed: int, scratch_folder: Path | None = None
) -> LoadedModel:
    """Load a model that learns: all of it, its last layers, or adapters seeded by `seed`.

    Raises ModelError as `load` does, and where the model cannot be sampled from.
    """
    loaded = load(config, scratch_folder)
    if loaded.language_model.unsampled:
        raise ModelError(
            f"{loaded.language_model.unsampled}; use another architecture, or this one as a teacher that only scores"
        )
    set_trainable(loaded.language_model.model, config, seed, loaded.source)
    return loaded


def set_trainable(model: PreTrainedModel, config: StudentConfig, seed: int, source: str) -> None:
    """Let the weights that the recipe names require a gradient, in float32; ModelError where it names more than there are."""
    layers = model.config.get_text_config().num_hidden_layers
    count = config.trainable_layers or layers
    if count > layers:
        raise ModelError(f"student.trainable_layers is {count}, but {source} has {layers} layers")
    if config.lora is not None:
        add_adapters(model, config.lora, seed, list(range(layers - count, layers)))
    elif config.trainable_layers is None:
        model.requires_grad_(True)
    else:
        for layer in list(layers_of(model))[layers - count :]:
            layer.requires_grad_(True)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def check_config(source: str, config: ModelConfig) -> None:
    """Raise ModelError where config.json cannot be read as that of a model."""
    try:
        AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    except UNREADABLE as error:
        raise ModelError(
            f"{source}: config.json is missing or cannot be used ({one_line(error)})"
        ) from error


def _weights(source: str, config: ModelConfig) -> PreTrainedModel:
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)  # its report is a table; ours is one line
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are reported here, by name
        )
    except UNREADABLE as error:
        if "DefaultCPUAllocator" in str(error) or isinstance(error, MemoryError):
            raise ResourceError(
                f"{source}: the weights do not fit in memory ({one_line(error)})"
            ) from error
        raise ModelError(
            f"{source}: the weights could not be loaded ({one_line(error)})"
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    model, report = loaded
    missing = sorted(report["missing_keys"])
    mismatched = sorted(str(key[0]) for key in report["mismatched_keys"])
    if missing or mismatched:
        raise ModelError(
            f"{source}: {len(missing)} weights are missing and {len(mismatched)} have another shape than config.json says "
            f"(first: {(missing + mismatched)[0]}); the files do not belong together"
        )
    return model


def _check_finite(model: PreTrainedModel, source: str) -> None:
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise ModelError(
                f"{source}: weight {name} holds NaN or infinite values; download or convert the model again"
            )


def _wants_cuda(config: ModelConfig) -> bool:
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ModelError(
            "device is 'cuda', but no CUDA device is available; write device: auto or cpu"
        )
    return available and config.device != "cpu"


def _generation_eos(source: str, model: PreTrainedModel) -> list[int]:
    named = named_eos(source)
    eos = named if named is not None else model.config.get_text_config().eos_token_id
    return [eos] if isinstance(eos, int) else list(eos or [])
