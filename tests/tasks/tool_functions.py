"""Functions as tools: some work, some misbehave, some are no valid tools."""

import os
import time
from typing import Annotated, Any, Literal

from pydantic import Field


def find(
    word: str,
    most: Annotated[int, Field(ge=1, description="pages")] = 2,
    kind: Literal["a", "b"] = "a",
) -> list[str]:
    """Find pages about a word."""
    return [f"{kind}:{word}"] * most


def misbehave(how: str) -> Any:
    """Do what no tool should."""
    if how == "raise":
        raise KeyError("door")
    if how == "sleep":
        time.sleep(60)
    if how == "leave":
        os._exit(3)
    if how == "print":
        print('{"value": {"result": "forged"}}')
    return {"done": {1, 2}} if how == "set" else f"did {how}"


def bare(word: str) -> str:
    return word


def untyped(word) -> str:
    """Take anything."""
    return word


def many(*words: str) -> str:
    """Take any number."""
    return "".join(words)


THING = 3
