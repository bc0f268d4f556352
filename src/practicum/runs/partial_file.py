"""Files that a command writes row by row, and resumes after an interruption."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from practicum import run_dir as folders
from practicum.errors import DataError


def begin_file(path: Path, settings: Mapping[str, Any]) -> None:
    """Store the settings that determine a file's rows next to it, or compare them with stored settings.

    Raises DataError if the file was begun with other settings or by another program.
    """
    settings_path = path.with_name(f"{path.name}.settings.json")
    if not path.exists():
        folders.prepare_folder(path.parent)
        folders.write_json(settings_path, dict(settings))
        return
    if not settings_path.is_file():
        raise DataError(
            f"{path} exists and was not begun by this command ({settings_path.name} is missing "
            "in its folder); set --out to another file"
        )
    earlier = folders.read_json(settings_path)
    changed = [name for name, value in settings.items() if earlier.get(name) != value]
    if changed:
        raise DataError(
            f"{path} was begun with other settings ({', '.join(changed)}); undo the change to "
            "resume, or set --out to another file"
        )
