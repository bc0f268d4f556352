"""A folder with a file of rows, and the task that reads it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from practicum.core.notes import show_notes
from practicum.ports import Task, TaskContext
from practicum.tasks.jsonl import Config, build
from practicum.types import Prompt


class Folder:
    """Writes rows into a folder and builds the task of a recipe in that folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.said: list[str] = []

    def write(self, *rows: bytes, name: str = "rows.jsonl") -> None:
        (self.path / name).write_bytes(b"\n".join(rows) + b"\n")

    def task(self, seed: int = 0, **settings: Any) -> Task:
        config = Config.model_validate({"path": "rows.jsonl", "heldout": 0, **settings})
        with show_notes(self.said.append):
            return build(config, TaskContext(seed, self.path, self.path / "rejected.jsonl"))

    def rejected(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (self.path / "rejected.jsonl").read_text().splitlines()
        ]


def write_lines(folder: Folder, rows: Sequence[Any], name: str = "rows.jsonl") -> None:
    folder.write(*(json.dumps(row).encode() for row in rows), name=name)


def read_one(folder: Folder, row: Mapping[str, Any], **settings: Any) -> Prompt:
    write_lines(folder, [row])
    (prompt,) = folder.task(**settings).train_prompts()
    return prompt
