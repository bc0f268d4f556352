"""Load a language model with its tokenizer from a recipe's settings, and refuse untrusted files.

Only safetensors files are read, and no code from a model folder runs unless the recipe allows it.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import logging as hub_logging
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from practicum.backends.local.adapter_folders import copy_adapter, merge_adapter
from practicum.backends.local.adapters import add_adapters, get_layers
from practicum.backends.local.language_model import Decoding, LanguageModel, find_body, find_decoder
from practicum.backends.local.packing import disable_packing, enable_packing
from practicum.backends.local.pictures import choose_class, open_pictures, refuse_unknown_family
from practicum.backends.local.precision import DTYPES, choose_dtype, prepare_products
from practicum.backends.local.quantising import quantise
from practicum.backends.local.ranks import is_out_of_memory
from practicum.backends.local.rotary import fix_rotations
from practicum.backends.local.trial import choose_decoding, explain_no_sampling
from practicum.backends.local.unused_settings import drop_unused_settings
from practicum.core.waits import show_wait
from practicum.errors import ModelError, ResourceError
from practicum.models.config import ModelConfig, StudentConfig
from practicum.models.devices import explain_missing_operations
from practicum.models.sources import (
    find_base,
    is_adapter_folder,
    locate,
    needs_conversion,
    refuse_encoder_decoder,
)
from practicum.text import Renderer, collect_stop_ids
from practicum.text.tokenizers import (
    UNREADABLE,
    find_stop_ids,
    load_eos_ids,
    load_tokenizer,
    shorten_error,
)

transformers_logging.disable_progress_bar()

DECODING_NEEDS = {
    "native": "the compiled step needs a C compiler, an x86 processor with AVX2, float32 weights",
    "graph": "a captured step needs a CUDA device",
}
"""The requirements of each implementation of decoding that a recipe may ask for."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for use: body and head, its renderer, and the source of its weights.

    `student` holds the settings of a model that `load_student` loaded.
    """

    language_model: LanguageModel
    renderer: Renderer
    source: str
    student: StudentConfig | None = None

    @property
    def context_length(self) -> int:
        """The longest text that the model reads, in tokens."""
        return self.language_model.context_length


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's folder or hub name with its tokenizer, and the device that it is for."""

    source: str
    tokenizer: PreTrainedTokenizerBase
    device: torch.device

    @property
    def vocab_size(self) -> int:
        """The number of the tokenizer's tokens."""
        return max(self.tokenizer.get_vocab().values(), default=-1) + 1

    def check_rows(self, model: PreTrainedModel) -> None:
        """Raise ModelError if a token has no row in the model's embedding."""
        rows = len(model.get_output_embeddings().weight)  # type: ignore[union-attr, arg-type]
        if self.vocab_size > rows:
            raise ModelError(
                f"{self.source}: the tokenizer has {self.vocab_size} tokens but the embedding has "
                f"{rows} rows; use the tokenizer that belongs to these weights"
            )

    def build_renderer(self, config: ModelConfig, model: PreTrainedModel) -> Renderer:
        """Return the renderer of the model's prompts, with its stop tokens."""
        extra_stops = find_stop_ids(self.tokenizer, config.stop, self.source)
        stops = collect_stop_ids(self.tokenizer, [*_find_eos(self.source, model), *extra_stops])
        return Renderer(self.tokenizer, config.system, config.template, config.thinking, stops)


def open_files(config: ModelConfig, scratch_folder: Path | None = None) -> ModelFiles:
    """Find a model's files and read its tokenizer. Raises ModelError."""
    device = choose_device(config)
    source = locate_source(config, scratch_folder)
    rows = check_config(source, config)
    return ModelFiles(source, load_tokenizer(source, config, rows), device)


def load(
    config: ModelConfig,
    scratch_folder: Path | None = None,
    decoding: str = "auto",
    *,
    merge: bool = True,
) -> LoadedModel:
    """Load a model for sampling and scoring; all of its weights are frozen.

    `scratch_folder` holds a from-scratch model, and `decoding` is the backend's setting. An adapter
    folder is merged into its base, or left out if `merge` is False. Raises ModelError if the model
    cannot be used.
    """
    name = config.model if isinstance(config.model, str) else "a model made from scratch"
    with show_wait(f"loading {name}"):
        return _load(config, scratch_folder, decoding, merge=merge)


def load_shared(
    config: ModelConfig,
    bases: dict[tuple[object, ...], LanguageModel],
    scratch_folder: Path | None = None,
    decoding: str = "auto",
) -> LoadedModel:
    """Return a model's base with the model's renderer; `bases` holds the bases loaded so far.

    An adapter folder is not merged. Raises ModelError as `load` does.
    """
    files = open_files(config, scratch_folder)
    # Tokenizers of two adapters may differ in the tokens that they add.
    dtype = choose_dtype(config, files.source, files.device.type)
    key = find_base(files.source), dtype, files.device, files.vocab_size, config.longest_text
    if key not in bases:
        bases[key] = load(config, scratch_folder, decoding, merge=False).language_model
    base = replace(bases[key], tokenizer=files.tokenizer)
    return LoadedModel(base, files.build_renderer(config, base.model), files.source)


def _load(
    config: ModelConfig, scratch_folder: Path | None, decoding: str, *, merge: bool
) -> LoadedModel:
    """Load a model and check that it can be used."""
    files = open_files(config, scratch_folder)
    source, tokenizer = files.source, files.tokenizer
    language_model = read_model(source, config, files.vocab_size, files.device, merge=merge)
    files.check_rows(language_model.model)
    check_finite(language_model.model, source)
    try:
        with explain_missing_operations():
            language_model.check_split()
    except (RuntimeError, IndexError) as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        # An architecture's code fails if sizes in its configuration contradict each other. The code
        # of a decoder saved without its encoder (Bart, Marian) may fail at its cache.
        raise ModelError(
            f"{source}: {type(language_model.model).__name__} fails on a short text "
            f"({shorten_error(error)}); check the sizes in config.json, or use another architecture"
        ) from error
    quantise(language_model, config, source)
    reason = explain_no_sampling(language_model)
    language_model = replace(
        language_model,
        no_sampling_reason=reason,
        tokenizer=tokenizer,
        decoding=Decoding.TORCH if reason else choose_decoding(language_model, decoding),
    )
    if language_model.decoding is Decoding.TORCH and decoding in DECODING_NEEDS:
        raise ModelError(
            f"{source}: backend.decoding is {decoding}, but {DECODING_NEEDS[decoding]} and a "
            "Llama-like model; set decoding: auto"
        )
    return LoadedModel(language_model, files.build_renderer(config, language_model.model), source)


def add_pictures(loaded: LoadedModel, decoding: str = "auto") -> LoadedModel:
    """Return a model that also reads the pictures of prompts, one text per row, if it can.

    Raises ModelError if its processor cannot be used, or if the backend's `decoding` needs packed texts.
    """
    pictures = open_pictures(find_base(loaded.source), loaded.renderer.tokenizer)
    if pictures is None:
        return loaded
    if decoding in DECODING_NEEDS:
        raise ModelError(
            f"{loaded.source}: backend.decoding is {decoding}, which reads no pictures; set decoding: auto"
        )
    # Packed attention would also replace the attention of the vision tower.
    model = disable_packing(loaded.language_model)
    return replace(
        loaded,
        language_model=replace(model, pictures=pictures, decoding=Decoding.TORCH),
        renderer=replace(loaded.renderer, pictures=pictures.open_reader()),
    )


def locate_source(config: ModelConfig, scratch_folder: Path | None) -> str:
    """Return the folder or hub name of the weights, and show the conversion of a packaged model."""
    if isinstance(config.model, str) and needs_conversion(config.model):
        with show_wait("converting it to safetensors, once"):
            return locate(config, scratch_folder)
    return locate(config, scratch_folder)


def read_model(
    source: str,
    config: ModelConfig,
    vocab_size: int,
    device: torch.device,
    packs: int | None = None,
    *,
    merge: bool = True,
) -> LanguageModel:
    """Read a model from its folder to a device, with all weights frozen.

    `packs` is its `max_packed_tokens` if it is already known; otherwise it is measured. With
    `merge`, an adapter folder is merged into its base.
    """
    dtype = choose_dtype(config, source, device.type)
    model = _load_weights(find_base(source), config, DTYPES[dtype])
    drop_unused_settings(model, source)
    if merge and is_adapter_folder(source):
        model = merge_adapter(model, source)
    model.requires_grad_(False)
    model.eval()
    model.to(device)  # type: ignore[arg-type]
    prepare_products(config, model, device)
    language_model = LanguageModel(model, vocab_size, autocast=dtype == "bfloat16")
    return enable_packing(fix_length(language_model, config), packs)


def fix_length(language_model: LanguageModel, config: ModelConfig) -> LanguageModel:
    """Return the model with rotary frequencies that are fixed for all texts of a run."""
    context = language_model.context_length
    longest = min(config.longest_text or context, context)
    return replace(language_model, longest_text=fix_rotations(language_model.model, longest))


def load_student(
    config: StudentConfig, seed: int, scratch_folder: Path | None = None, decoding: str = "auto"
) -> LoadedModel:
    """Load a trainable model: all of its weights, its last layers, or adapters seeded by `seed`.

    If the model is an adapter folder and the recipe trains adapters, they start as that adapter.
    Raises ModelError as `load` does, and also if the model cannot be sampled from or if the
    adapters of an adapter folder differ from the recipe.
    """
    loaded = load(config, scratch_folder, decoding, merge=config.lora is None)
    if loaded.language_model.no_sampling_reason:
        raise ModelError(
            f"{loaded.language_model.no_sampling_reason}; use another architecture, or this one as "
            "a teacher that only scores"
        )
    set_trainable(loaded.language_model.model, config, seed, loaded.source)
    if config.lora is not None and is_adapter_folder(loaded.source):
        copy_adapter(loaded.source, loaded.language_model.model)
    return replace(loaded, student=config)


def load_by_role(
    config: ModelConfig, seed: int, scratch_folder: Path | None = None, decoding: str = "auto"
) -> LoadedModel:
    """Load a student as `load_student` does, and any other model as `load` does."""
    if isinstance(config, StudentConfig):
        return load_student(config, seed, scratch_folder, decoding)
    return load(config, scratch_folder, decoding)


def set_trainable(model: PreTrainedModel, config: StudentConfig, seed: int, source: str) -> None:
    """Make the weights that the recipe names trainable, in float32.

    Raises ModelError if the recipe names more layers than the model has, or an encoder that it lacks.
    """
    layers = model.config.get_text_config().num_hidden_layers
    count = config.trainable_layers or layers
    if count > layers:
        raise ModelError(f"student.trainable_layers is {count}, but {source} has {layers} layers")
    decoder, body = find_decoder(model), find_body(model)
    if config.train_encoder and decoder is body:
        raise ModelError(f"student.train_encoder: {source} reads only text; remove the key")
    if config.lora is not None:
        add_adapters(model, config.lora, seed, list(range(layers - count, layers)))
    elif config.trainable_layers is None:
        model.requires_grad_(True)
        if decoder is not body and not config.train_encoder:
            body.requires_grad_(False)
            decoder.requires_grad_(True)
    else:
        for layer in list(get_layers(model))[layers - count :]:
            layer.requires_grad_(True)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def check_config(source: str, config: ModelConfig) -> int | None:
    """Return the rows of the embedding by config.json; None if an adapter may have added some.

    Raises ModelError if config.json is not a readable model config, here or on the hub.
    """
    base = find_base(source)
    verbosity = hub_logging.get_verbosity()
    # The hub's client logs each retry; the error below reports the failure in one line.
    hub_logging.set_verbosity_error()
    try:
        described = AutoConfig.from_pretrained(base, trust_remote_code=config.trust_remote_code)
    except UNREADABLE as error:
        problem = "config.json is missing or cannot be used"
        remedy = ""
        if not Path(base).is_dir():
            problem = f"no folder, and the hub gave no config.json of {base}"
            remedy = "; check the name, the network and HF_TOKEN, or give the model's folder"
        raise ModelError(f"{source}: {problem} ({shorten_error(error)}){remedy}") from error
    finally:
        hub_logging.set_verbosity(verbosity)
    refuse_encoder_decoder(source, described.to_dict())
    refuse_unknown_family(source, described.model_type)
    # The tokenizer of an adapter may have tokens whose rows are in the adapter.
    if is_adapter_folder(source):
        return None
    return described.get_text_config().to_dict().get("vocab_size")


def _load_weights(source: str, config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    verbosity = transformers_logging.get_verbosity()
    # transformers reports missing weights as a table; the error below reports them in one line.
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        settings, _ = PretrainedConfig.get_config_dict(source)
        loaded: Any = choose_class(settings.get("model_type", "")).from_pretrained(
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
                f"{source}: the weights do not fit in memory ({shorten_error(error)})"
            ) from error
        raise ModelError(
            f"{source}: the weights could not be loaded ({shorten_error(error)})"
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    model, report = loaded
    missing = sorted(report["missing_keys"])
    mismatched = sorted(str(key[0]) for key in report["mismatched_keys"])
    if missing or mismatched:
        raise ModelError(
            f"{source}: {len(missing)} weights are missing and {len(mismatched)} have another "
            f"shape than config.json says (first: {(missing + mismatched)[0]}); the files do not "
            "belong together"
        )
    return model


def check_finite(model: PreTrainedModel, source: str) -> None:
    """Raise ModelError if a weight (of a sharded model: this rank's rows) is not finite."""
    for name, weight in model.named_parameters():
        rows = weight.to_local() if isinstance(weight, DTensor) else weight
        # Minimum and maximum both propagate NaN, and take a fourteenth of the time of checking each
        # number.
        extremes = torch.stack(torch.aminmax(rows)) if rows.numel() else rows
        if not torch.isfinite(extremes).all():
            raise ModelError(
                f"{source}: weight {name} holds NaN or infinite values; download or convert the "
                "model again"
            )


def choose_device(config: ModelConfig) -> torch.device:
    """Return the device that a recipe asks for. Raises ModelError if it does not exist."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ModelError(
            "device is 'cuda', but no CUDA device is available; set device: auto or cpu"
        )
    if config.device == "mps":
        if not torch.backends.mps.is_available():
            raise ModelError(
                "device is 'mps', but this torch or this machine has no MPS; set device: auto or cpu"
            )
        return torch.device("mps")
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def _find_eos(source: str, model: PreTrainedModel) -> list[int]:
    eos = load_eos_ids(source)
    if eos is None:
        eos = model.config.get_text_config().eos_token_id
    return [eos] if isinstance(eos, int) else list(eos or [])
