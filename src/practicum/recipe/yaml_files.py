"""Recipe files: find them, read their YAML, and merge it over the recipe that they extend."""

import difflib
import os
import re
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from practicum.core.packaged import find_base, list_recipe_files, list_recipe_names
from practicum.errors import RecipeError
from practicum.models.sources import is_gguf
from practicum.recipe.short_forms import expand_models

LARGEST_RECIPE = 1 << 18
"""Bytes; packaged recipes have at most a few thousand, and dense text takes seconds to read."""

DEEPEST_RECIPE = 64
"""Levels of nested mappings and lists; a recipe needs about ten."""

LONGEST_REASON = 400

FILE_KEYS = {
    "extends": "the recipe that provides the method: a file, relative to this file's folder, or a packaged name; "
    "its `setting` and its description are not inherited",
    "setting": "the models, task, rates, lengths and batches for a method: the name of a packaged pair, a file, or "
    "a mapping with changes to the setting that it `extends`: see [settings](settings.md)",
    "stages": "the stages of a [pipeline](pipelines.md), each a recipe that overrides the shared keys of the file",
}
"""Keys of a file that are not fields of a recipe; they are resolved when the file is read."""


RUN_RECIPE = "recipe.json"
"""The file of a run folder with the complete recipe of the run, under the key `recipe`."""


def find_recipe(source: str | Path) -> Path:
    """Return the file of a recipe: a path, a run folder, or a packaged name such as `quickstart`."""
    if os.path.isfile(os.path.join(source, RUN_RECIPE)):
        return Path(source, RUN_RECIPE)
    if os.path.isfile(source):  # unlike Path.is_file, also False for names that no file can have
        return Path(source)
    name = str(source).removeprefix("recipes/").removesuffix(".yaml")
    if name in list_recipe_names():
        return list_recipe_files()[name]
    raise RecipeError(
        f"no recipe {str(source)[:100]!r}: not a file, not a run folder and not a packaged recipe; "
        f"{_suggest_recipe(str(source))}practicum ls recipes --like WORD searches the packaged ones"
    )


def _suggest_recipe(source: str) -> str:
    """Return a question with the packaged name or the YAML file that is most like the source."""
    # A packaged name is often written without its folder, and a file with a letter wrong.
    names = {name.rpartition("/")[2]: name for name in list_recipe_names()}
    names |= {name: name for name in names.values()}
    folder = Path(source[:LONGEST_REASON]).parent
    if folder.is_dir():
        names |= {str(path): str(path) for path in folder.glob("*.yaml")}
    matches = difflib.get_close_matches(source, names, n=1)
    return f"did you mean {names[matches[0]]!r}? " if matches else ""


def expand_file(path: Path) -> dict[str, Any]:
    """Return the data of a recipe file with short forms written out and model paths resolved."""
    return expand_section(read_yaml(path), find_base(path))


def expand_section(recipe_data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a recipe's data with short forms written out, and model paths relative to `folder` absolute."""
    expanded = expand_models(recipe_data, folder)
    for role in ("student", "teacher", "reference", "stages"):
        _resolve_model_paths(expanded.get(role), folder)
    return expanded


def find_parent(path: Path, parent: str) -> Path:
    """Return the file that a recipe extends: relative to the recipe, or a packaged recipe by name."""
    file = path.parent.resolve() / parent
    # `Path.is_file` would raise OSError for a name that is too long.
    if os.path.isfile(file):
        return file
    if parent in list_recipe_names():
        return list_recipe_files()[parent]
    raise RecipeError(
        f"{path}: extends {parent!r:.200}: neither a file, relative to {path.parent.resolve()}, nor a "
        f"packaged recipe; {_suggest_recipe(parent)}practicum ls recipes lists the packaged ones"
    )


def merge_recipes(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the entries of `over`.

    Mappings merge. Any other value is replaced, and so is a mapping with a different `type`.
    """
    result = dict(base)
    for key, new in over.items():
        old = result.get(key)
        if isinstance(new, Mapping) and isinstance(old, Mapping) and _can_merge(old, new):
            new = merge_recipes(old, new)
        result[key] = new
    return result


def _can_merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    # A list of terms and `model: {stage: NAME}` are complete: the keys of a term, or of a
    # from-scratch model, have no meaning next to them.
    if {"losses", "stage"} & (old.keys() | new.keys()):
        return False
    return new.get("type", old.get("type")) == old.get("type")


def _resolve_model_paths(section: Any, folder: Path) -> None:
    """Make model folders and files relative to the recipe's folder absolute, in place."""
    for inner in section if isinstance(section, list) else ():
        _resolve_model_paths(inner, folder)
    if not isinstance(section, dict):
        return
    model = section.get("model")
    if isinstance(model, str) and (os.path.isdir(folder / model) or is_gguf(str(folder / model))):
        section["model"] = str(folder / model)
    for inner in section.values():
        _resolve_model_paths(inner, folder)


BOOLEAN = "tag:yaml.org,2002:bool"


class StrictLoader(yaml.SafeLoader):
    """A YAML loader that refuses repeated keys, aliases and deep nesting.

    Repeated keys and aliases hide mistakes, and deep nesting takes seconds to read. As in YAML 1.2,
    only true and false are booleans, so `sandbox: off` is a text.
    """

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node; refuse an alias or a node that is nested too deeply."""
        line = self.peek_event().start_mark.line + 1
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError(f"line {line}: aliases (*name) are not read; write the value out")
        self._check_depth(self._depth, line)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        """Read an opening bracket; refuse it if it is nested too deeply."""
        # The scanner reads many brackets ahead, before `compose_node` sees the first.
        self._check_depth(self.flow_level, self.line + 1)
        super().fetch_flow_collection_start(TokenClass)

    @staticmethod
    def _check_depth(depth: int, line: int) -> None:
        if depth > DEEPEST_RECIPE:
            raise yaml.YAMLError(
                f"line {line}: nested more than {DEEPEST_RECIPE} deep; a recipe is about ten"
            )

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; refuse a repeated key."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        mapping = super().construct_mapping(node, deep)  # refuses unhashable keys, so Counter works
        if len(mapping) < len(keys):
            twice = min(str(key) for key, times in Counter(keys).items() if times > 1)
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: key {twice!r} occurs twice")
        return mapping


StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != BOOLEAN]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
StrictLoader.add_implicit_resolver(
    BOOLEAN, re.compile("(true|True|TRUE|false|False|FALSE)$"), "tTfF"
)


@lru_cache(maxsize=512)
def _parse(text: str) -> Any:
    """Return the content of a YAML text; many recipes extend the same few."""
    return yaml.load(text, StrictLoader)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises RecipeError if the file holds no mapping."""
    try:
        if path.stat().st_size > LARGEST_RECIPE:
            raise RecipeError(f"{path}: larger than {LARGEST_RECIPE >> 10} KiB, so not a recipe")
        # A copy, since callers merge into it.
        document = deepcopy(_parse(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read ({error})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(
            f"{path}: not YAML ({' '.join(str(error).split())[:LONGEST_REASON]})"
        ) from error
    if document is None:
        raise RecipeError(
            f"{path}: the file is empty; write a recipe into it, for example `extends: quickstart`"
        )
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise RecipeError(
            f"{path}: a recipe is a mapping of names such as `student:` and `teacher:`"
        )
    recipe_data = document.get("recipe") if path.name == RUN_RECIPE else None
    return recipe_data if isinstance(recipe_data, dict) else document


def parse_value(text: str) -> Any:
    """Return the value that a text is in YAML, or the text itself if it is no YAML."""
    try:
        return yaml.load(text, StrictLoader)
    # Calls such as `jsd(0.3)` are also YAML; any other text is left to the schema.
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
