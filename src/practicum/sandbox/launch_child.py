"""Run a module in a sandboxed process: `python -P launch_child.py PLACES MODULE [ARGUMENT ...]`.

PLACES is a JSON object with the folder or file of packages and modules outside Python's own folders.
Each is found there by its name, so the folder around it need not be readable. Standard library only.
"""

import importlib.machinery
import importlib.util
import json
import os
import runpy
import sys
from typing import Any


class PlaceFinder:
    """Finds top-level packages and modules at given places; see `importlib.abc.MetaPathFinder`."""

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a package or module with a place, None for others."""
        place = self._places.get(name)
        if place is None:
            return None
        if not os.path.isdir(place):
            return importlib.util.spec_from_file_location(name, place)
        file = os.path.join(place, "__init__.py")
        if os.path.isfile(file):
            return importlib.util.spec_from_file_location(
                name, file, submodule_search_locations=[place]
            )
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [place]
        return spec


if __name__ == "__main__":
    sys.meta_path.insert(0, PlaceFinder(json.loads(sys.argv[1])))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
