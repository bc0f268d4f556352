"""List the recipe keys that no packaged recipe, no page or no test uses.

    python -m benchmarks keys

A recipe or a test writes a key if it contains the name anywhere; a page writes it if it contains the name as code. Generated tables
on pages list every key, so they do not count.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measuring import format_table
from practicum.core.packaged import list_recipe_files
from practicum.recipe.json_schema import build_schema

ROOT = Path(__file__).resolve().parents[1]
GENERATED = re.compile(r"<!-- generated: .*?<!-- end of generated -->", re.DOTALL)


def main() -> None:
    """Print the number of keys, and the keys that no recipe writes."""
    keys = set(_yield_keys(build_schema()))
    recipes = _list_words(
        _strip_comments(path.read_text("utf-8")) for path in list_recipe_files().values()
    )
    pages = _list_words(
        code
        for path in (ROOT / "docs").glob("*.md")
        for code in re.findall(
            r"```.*?```|`[^`]+`", GENERATED.sub("", path.read_text("utf-8")), re.DOTALL
        )
    )
    tests = _list_words(path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py"))
    rows = [
        [key, "yes" if key in pages else "no", "yes" if key in tests else "no"]
        for key in sorted(keys - recipes)
    ]
    print(f"{len(keys)} names of keys, {len(rows)} of them in no packaged recipe:")
    print(format_table(["key", "on a page", "in a test"], rows))
    unused = [key for key, *places in rows if places == ["no", "no"]]
    print(f"in no recipe, no page and no test: {', '.join(unused) or 'none'}")


def _yield_keys(schema: Any) -> Iterator[str]:
    """Yield the names of all properties in a JSON Schema."""
    if isinstance(schema, list):
        for part in schema:
            yield from _yield_keys(part)
    elif isinstance(schema, dict):
        properties = schema.get("properties", {})
        yield from properties
        for name, part in schema.items():
            yield from _yield_keys(list(properties.values()) if name == "properties" else part)


def _strip_comments(text: str) -> str:
    return re.sub(r"(^|\s)#.*", "", text)


def _list_words(texts: Any) -> set[str]:
    return {word for text in texts for word in re.findall(r"\w+", text)}


if __name__ == "__main__":
    main()
