"""The packaged recipes by name, found without importing what reads them."""

import importlib.resources
from pathlib import Path


def locate_packaged_recipes() -> Path:
    """Return the folder of the packaged recipes; in a checkout, the repository's `recipes`."""
    installed = Path(str(importlib.resources.files("practicum"))) / "packaged_recipes"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[3] / "recipes"


def list_recipe_names() -> list[str]:
    """Return the names of the packaged recipes that can run, without settings."""
    folder = locate_packaged_recipes()
    names = sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))
    return [name for name in names if not name.startswith("settings/")]
