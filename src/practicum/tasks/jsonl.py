"""Prompts from files of rows: JSON Lines, a JSON list, CSV, TSV or Parquet, chosen by the suffix.

A row has `prompt` or `messages`, and may have `system`, `images`, `choices`, `id`, `answer`, `response` (a
full worked answer), `reasoning_content`, `domain`, `teacher` and `privileged` (an object of texts
for a teacher only). `columns` maps these fields to other column names; the forms in
`practicum.rows.formats` are known. Rows that cannot be used are written to `rejected.jsonl` with
their number and the reason.
"""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from practicum.errors import DataError
from practicum.ports import Task, TaskContext
from practicum.rows.prompt_reader import Count, PromptReader, RowsConfig, Share, build_prompt_set
from practicum.rows.row_files import HOPELESS_ROW, read_rows
from practicum.types import Prompt

Files = Path | tuple[Path, ...]


class Config(RowsConfig):
    """The files, the choice of held-out prompts, and the verifier."""

    reads_files: ClassVar[bool] = True
    type: Literal["jsonl"] = "jsonl"
    path: Files = Field(
        description="the file or files of training rows; relative to the recipe's folder"
    )
    heldout: Count | Share | Files = Field(
        default=0.1,
        description="the number or share of rows to hold out, or files of held-out rows",
    )
    max_row_bytes: int = Field(
        default=1 << 20, ge=1, le=HOPELESS_ROW, description="longer rows are rejected"
    )

    def find_problems(self, base_dir: Path) -> list[str]:
        """Return problems of the files and of the verifier, one line each."""
        problems = self.find_verifier_problems()
        reader = PromptReader(self)
        for part, place in (("train", self.path), ("heldout", self.heldout)):
            for path in _list_files(place, base_dir):
                try:
                    self.read_file(reader, path, part)
                except DataError as error:
                    problems.append(str(error))
        return problems

    def read_file(self, reader: PromptReader, path: Path, part: str) -> list[Prompt]:
        """Return the prompts of one file; DataError if too many of its rows are bad."""
        return reader.read(read_rows(path, self.max_row_bytes), str(path), part, path.parent)


def build(config: Config, context: TaskContext) -> Task:
    """Read the files; DataError if too many rows are bad or none is good."""
    places = {"train": config.path, "heldout": config.heldout}

    def read_part(reader: PromptReader, part: str) -> list[Prompt]:
        """Return the prompts of the files of one part."""
        paths = _list_files(places[part], context.base_dir)
        return [prompt for path in paths for prompt in config.read_file(reader, path, part)]

    return build_prompt_set(config, context, read_part)


def _list_files(place: Files | int | float, base_dir: Path) -> list[Path]:
    """Return the files of a part of the task; none if its rows are chosen from the train part."""
    if isinstance(place, int | float):
        return []
    paths = place if isinstance(place, tuple) else (place,)
    return [base_dir / path.expanduser() for path in paths]
