"""The packaged recipes by name, found without importing the recipe reader.

They are in the folder of recipes. A recipe that needs a part of one method is in the folder of the
method: `methods/METHOD/recipes/papers/NAME.yaml` has the name `papers/NAME`.
"""

import importlib.resources
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path


def locate_packaged_recipes() -> Path:
    """Return the folder of the packaged recipes; in a checkout, the repository's `recipes`."""
    installed = _locate_package() / "packaged_recipes"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[3] / "recipes"


def list_recipe_files() -> Mapping[str, Path]:
    """Return the files of all packaged recipes and settings by name, in order."""
    return _list_files(locate_packaged_recipes(), _locate_package())


def list_recipe_names() -> list[str]:
    """Return the names of the packaged recipes that can run, without settings."""
    return [name for name in list_recipe_files() if not name.startswith("settings/")]


def name_recipe(file: Path) -> str | None:
    """Return the name of a packaged file, such as `papers/gkd`, or None for any other file."""
    return _name_files(locate_packaged_recipes(), _locate_package()).get(file.resolve())


def find_base(file: Path) -> Path:
    """Return the folder at which the relative paths of a recipe start: the folder of the file.

    The paths of a method's packaged recipe start at `recipes/papers`.
    """
    file, folder = file.resolve(), locate_packaged_recipes().resolve()
    if file.is_relative_to(folder) or name_recipe(file) is None:
        return file.parent
    # Not at `recipes/FAMILY`: if all recipes of a family are in methods, the folder is missing.
    return folder / "papers"


@lru_cache(maxsize=1)
def _list_files(recipes: Path, package: Path) -> dict[str, Path]:
    """Return the files of some folders, cached: listing all recipes needs them twice per recipe."""
    folders = [recipes, *package.glob("methods/*/recipes")]
    files = {
        str(file.relative_to(folder).with_suffix("")): file.resolve()
        for folder in folders
        for file in folder.rglob("*.yaml")
    }
    return dict(sorted(files.items()))


@lru_cache(maxsize=1)
def _name_files(recipes: Path, package: Path) -> dict[Path, str]:
    return {file: name for name, file in _list_files(recipes, package).items()}


def _locate_package() -> Path:
    return Path(str(importlib.resources.files("practicum")))
