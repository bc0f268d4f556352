"""Model folders on disk: a good one, and folders with faults."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from practicum.backends.local.scratch import build_scratch_model
from practicum.models.config import ScratchConfig

ALPHABET = "abcdefgh"
TOKENS = 7 + len(ALPHABET)


def model_folder(folder: Path, **settings) -> Path:
    """Return a from-scratch model folder with 15 tokens, two layers and width 32."""
    build_scratch_model(
        folder,
        ScratchConfig(**{"hidden_size": 32, "layers": 2, "heads": 4, **settings}),
        ALPHABET,
        [],
    )
    return folder


def change_weights(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    weights = {name: value.clone() for name, value in load_file(path).items()}
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def change_json(path: Path, **changes) -> None:
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, **changes}))
