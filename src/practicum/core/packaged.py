"""The packaged recipes by name, found without importing what reads them."""

import importlib.resources
from functools import lru_cache
from pathlib import Path


def locate_packaged_recipes() -> Path:
    """Return the folder of the packaged recipes; in a checkout, the repository's `recipes`."""
    installed = Path(str(importlib.resources.files("practicum"))) / "packaged_recipes"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[3] / "recipes"


def list_recipe_names() -> list[str]:
    """Return the names of the packaged recipes that can run, without settings."""
    return list(_list_names(locate_packaged_recipes()))


@lru_cache(maxsize=1)
def _list_names(folder: Path) -> tuple[str, ...]:
    """Return the same of a folder; a list of all recipes asks for it twice for each."""
    names = sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))
    return tuple(name for name in names if not name.startswith("settings/"))
