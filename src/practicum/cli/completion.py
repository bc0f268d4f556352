"""Complete the word that is typed in a shell; no slow library is imported here."""

import glob
from pathlib import Path

from practicum.core.packaged import list_recipe_names


def complete_recipe(incomplete: str) -> list[str]:
    """Return the packaged recipes, YAML files and folders that begin with a word."""
    folder, _, start = incomplete.rpartition("/")
    paths = Path(folder or ".").glob(f"{glob.escape(start)}*")
    files = [f"{path}/" if path.is_dir() else str(path) for path in paths]
    files = [file for file in files if file.endswith(("/", ".yaml", ".yml"))]
    return [name for name in [*list_recipe_names(), *sorted(files)] if name.startswith(incomplete)]
