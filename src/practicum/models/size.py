"""Count a model's parameters without loading it: from the headers of its files, or from its name."""

import json
import math
import re
from pathlib import Path

NAMED_SIZE = re.compile(r"(?<![\d.a-z])(\d+(?:\.\d+)?)(m|b)(?![a-z])", re.IGNORECASE)
"""A number of parameters in the name of a model, such as `0.6B` or `135m`."""

LONGEST_HEADER = 1 << 27
"""Bytes; the header of the largest published file has a few million."""


def count_parameters(model: str, folder: Path) -> tuple[int | None, str]:
    """Return the number of a model's parameters, and how it was found; None if it was not.

    `model` is a name, or a folder relative to `folder`. The files of a folder are counted; of other
    models the number in their name is read.
    """
    for place in (folder / Path(model).expanduser(), Path(model).expanduser()):
        counted = _count_in_files(place)
        if counted:
            return counted, f"{_format(counted)} parameters in its files"
    named = NAMED_SIZE.search(model.rpartition("/")[2])
    if named is None:
        return None, "its size is unknown"
    parameters = round(float(named[1]) * (1e6 if named[2].lower() == "m" else 1e9))
    return parameters, f"{_format(parameters)} parameters by its name"


def _count_in_files(folder: Path) -> int:
    """Return the parameters in the safetensors files of a folder, or of its adapter's base; else 0."""
    try:
        paths = list(folder.glob("*.safetensors"))
        if (folder / "adapter_config.json").is_file():
            base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
            return count_parameters(str(base["base_model_name_or_path"]), folder)[0] or 0
        return sum(map(_count_in_header, paths))
    # A folder that cannot be read is refused where it is loaded, with the reason.
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0


def _count_in_header(path: Path) -> int:
    """Return the entries of all tensors of a safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LONGEST_HEADER:
            raise ValueError("no safetensors file")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("no safetensors file")
    return sum(
        math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
    )


def _format(parameters: int) -> str:
    if parameters < 1e8:
        return f"{parameters / 1e6:.3g} million"
    return f"{parameters / 1e9:.3g} billion"
