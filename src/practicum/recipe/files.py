"""Recipe files: where they are found, and their YAML over what they extend."""

import importlib.resources
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from practicum.core.calls import did_you_mean
from practicum.errors import RecipeError

LARGEST_RECIPE = 1 << 18
"""Bytes; packaged recipes have at most a few thousand, and denser text takes seconds to read."""


DEEPEST_RECIPE = 64
"""Mappings and lists within each other; a recipe needs about ten."""


LONGEST_REASON = 400


DEEPEST_EXTENDS = 8


def find_recipe(source: str | Path) -> Path:
    """The file of a recipe: a path, or the name of a packaged one such as `quickstart`."""
    if os.path.isfile(source):  # unlike Path.is_file, also False for names that no file can have
        return Path(source)
    name = str(source).removeprefix("recipes/").removesuffix(".yaml")
    if name in recipe_names():
        return packaged_recipes() / f"{name}.yaml"
    raise RecipeError(
        f"no recipe {str(source)[:100]!r}: not a file and not a packaged recipe; {did_you_mean(str(source), recipe_names())}"
    )


def packaged_recipes() -> Path:
    """The folder of the recipes that come with the package (the repository's own in a checkout)."""
    installed = Path(str(importlib.resources.files("practicum"))) / "packaged_recipes"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[3] / "recipes"


def recipe_names() -> list[str]:
    """The packaged recipes, as `practicum run` takes them; not those to be extended."""
    folder = packaged_recipes()
    names = sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))
    return [name for name in names if not name.startswith("base/")]


def read_recipe(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The data of a recipe file, merged over the recipe that it `extends`.

    Relative paths start at the folder of the file that has the task.
    """
    data, folder = read_yaml(path), path.parent.resolve()
    for role in ("student", "teacher", "reference", "stages"):
        _anchor_models(data.get(role), folder)
    if "task" in data:
        data.setdefault("base_dir", str(folder))
    parent = data.pop("extends", None)
    if parent is not None:
        file = folder / str(parent)
        if not file.is_file():
            raise RecipeError(
                f"{path}: extends {str(parent)!r}, and there is no such file; it is relative to {folder}"
            )
        if file in above or len(above) > DEEPEST_EXTENDS:
            raise RecipeError(f"{path}: extends {str(parent)!r}, which extends this one again")
        data = merged(read_recipe(file, (*above, path.resolve())), data)
    data.setdefault("base_dir", str(folder))
    return data


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`: mappings merge, anything else replaces, and so does a mapping of another `type`."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping) and _same_type(below, value):
            result[key] = merged(below, value)
        else:
            result[key] = value
    return result


def _same_type(below: Mapping[str, Any], over: Mapping[str, Any]) -> bool:
    if {"losses", "stage"} & (below.keys() | over.keys()):  # `model: {stage: NAME}` is whole
        return False
    return over.get("type", below.get("type")) == below.get("type")


def _anchor_models(section: Any, folder: Path) -> None:
    """Let relative model folders start at the recipe's folder, as its other paths do."""
    for inner in section if isinstance(section, list) else ():
        _anchor_models(inner, folder)
    if not isinstance(section, dict):
        return
    model = section.get("model")
    if isinstance(model, str) and (folder / model).is_dir():
        section["model"] = str(folder / model)
    for inner in section.values():
        _anchor_models(inner, folder)


class StrictLoader(yaml.SafeLoader):
    """YAML without what hides mistakes, repeated keys and aliases, and without deep nesting, whose reading takes seconds."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node that is no alias and is not nested too deeply."""
        line = self.peek_event().start_mark.line + 1
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError(f"line {line}: aliases (*name) are not read; write the value out")
        self._check_depth(self._depth, line)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        """Read an opening bracket; the scanner reads many of them ahead before the first node is composed."""
        self._check_depth(self.flow_level, self.line + 1)
        super().fetch_flow_collection_start(TokenClass)

    @staticmethod
    def _check_depth(depth: int, line: int) -> None:
        if depth > DEEPEST_RECIPE:
            raise yaml.YAMLError(
                f"line {line}: nested more than {DEEPEST_RECIPE} deep; a recipe is about ten"
            )

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Make a mapping whose keys differ."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        mapping = super().construct_mapping(node, deep)  # it refuses keys that cannot be counted
        if len(mapping) < len(keys):
            twice = min(str(key) for key, times in Counter(keys).items() if times > 1)
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: key {twice!r} stands twice")
        return mapping


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; RecipeError where it is not one."""
    try:
        if path.stat().st_size > LARGEST_RECIPE:
            raise RecipeError(f"{path}: larger than {LARGEST_RECIPE >> 10} KiB, so not a recipe")
        data = yaml.load(path.read_text(encoding="utf-8"), StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read ({error})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(
            f"{path}: not YAML ({' '.join(str(error).split())[:LONGEST_REASON]})"
        ) from error
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise RecipeError(
            f"{path}: a recipe is a mapping of names such as `student:` and `teacher:`"
        )
    return data
