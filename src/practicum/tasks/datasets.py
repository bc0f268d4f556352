"""Prompts from Hugging Face datasets: a hub name, a folder of `save_to_disk`, or data files.

Rows have the same columns and known formats as in the task `jsonl`.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from practicum.errors import DataError, suggest_install
from practicum.ports import Task, TaskContext
from practicum.rows.prompt_reader import Count, PromptReader, RowsConfig, Share, build_prompt_set
from practicum.rows.row_files import ROWS_AT_ONCE, number_rows
from practicum.text.safe import excerpt
from practicum.types import Prompt

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
BUILDERS = {
    ".arrow": "arrow",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
}
"""The reader of datasets for data files of each suffix."""
LONGEST_REASON = 300


class Config(RowsConfig):
    """The dataset, its splits, and the verifier."""

    reads_files: ClassVar[bool] = True
    type: Literal["datasets"] = "datasets"
    path: str = Field(
        description="a hub name, or a folder, a data file or a pattern such as `data/*.parquet`"
    )
    heldout: Count | Share | str = Field(
        default=0.1, description="the number or share of rows to hold out, or a split"
    )
    name: str | None = Field(default=None, description="the dataset's configuration, as `main`")
    split: str = Field(default="train", description="the split to train on")

    def find_problems(self, base_dir: Path) -> list[str]:
        """Return problems of a dataset on this machine; the hub is not asked."""
        problems = self.find_verifier_problems()
        if HUB_NAME.fullmatch(self.path) and not _find_local(self.path, base_dir):
            return problems
        try:
            build(self, TaskContext(0, base_dir))
        except DataError as error:
            problems.append(str(error))
        return problems


def build(config: Config, context: TaskContext) -> Task:
    """Load the dataset; DataError if it cannot be loaded or too many rows are bad."""
    splits = {"train": config.split, "heldout": config.heldout}

    def read_part(reader: PromptReader, part: str) -> list[Prompt]:
        """Return the prompts of one split."""
        split = str(splits[part])
        source = f"{config.path}[{split}]"
        rows = _iterate(load_split(config, split, context.base_dir), source)
        folder = (context.base_dir / config.path).parent
        return reader.read(number_rows(rows), source, part, folder)

    return build_prompt_set(config, context, read_part)


def load_split(config: Config, split: str, base_dir: Path) -> Any:
    """Return a split as a `datasets.Dataset`; DataError if it does not exist."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"task.type: 'datasets' needs the package datasets; {suggest_install('datasets')}"
        ) from error
    place = _find_local(config.path, base_dir)
    if place is None and not HUB_NAME.fullmatch(config.path):
        raise DataError(
            f"{base_dir / config.path}: no such folder or file, and {config.path!r} is no hub name "
            "such as 'openai/gsm8k'; paths are relative to the recipe's folder"
        )
    try:
        if place is None:
            return datasets.load_dataset(config.path, config.name, split=split)
        if place.is_dir() and _is_saved(place):
            return _choose_split(datasets.load_from_disk(str(place)), split, config.path)
        if place.is_dir():
            return datasets.load_dataset(str(place), config.name, split=split)
        builder = _choose_builder(place)
        return datasets.load_dataset(builder, data_files=str(place), split=split)
    except DataError:
        raise
    # Foreign code: datasets raises errors of many kinds, including errors of the packages that it
    # uses.
    except Exception as error:
        reason = excerpt(str(error), most=LONGEST_REASON)
        raise DataError(
            f"{config.path}: split {split!r} cannot be loaded ({type(error).__name__}: {reason}); "
            "check task.path, task.name and task.split"
        ) from error


def _find_local(path: str, base_dir: Path) -> Path | None:
    """Return the folder, the file or the pattern of files that a path names here, or None."""
    place = base_dir / Path(path).expanduser()
    if place.exists():
        return place
    is_pattern = "*" in place.name and any(place.parent.glob(place.name))
    return place if is_pattern else None


def _is_saved(folder: Path) -> bool:
    """Return True for a folder that `save_to_disk` wrote, of one split or of several."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _choose_split(dataset: Any, split: str, path: str) -> Any:
    """Return a split of a saved dataset; one without splits is its own `train`."""
    splits = dataset if isinstance(dataset, Mapping) else {"train": dataset}
    if split not in splits:
        raise DataError(
            f"{path}: no split {split!r}; it has: {', '.join(splits)}; a number or share under "
            "task.heldout holds out some of its rows"
        )
    return splits[split]


def _choose_builder(place: Path) -> str:
    builder = BUILDERS.get(place.suffix.lower())
    if builder is None:
        raise DataError(
            f"{place}: no kind of data file that is known; end its name in one of "
            f"{', '.join(BUILDERS)}"
        )
    return builder


def _iterate(dataset: Any, source: str) -> Iterator[Any]:
    """Yield the rows as Arrow holds them: images and audio are not decoded.

    DataError if a batch of rows cannot be read, such as one with dates beyond Python's.
    """
    count = 0
    try:
        for table in dataset.with_format("arrow").iter(batch_size=ROWS_AT_ONCE):
            rows = table.to_pylist()
            yield from rows
            count += len(rows)
    # Foreign code: a damaged file shows only now, with errors of many kinds.
    except Exception as error:
        reason = excerpt(str(error), most=LONGEST_REASON)
        raise DataError(
            f"{source}: the rows after row {count} cannot be read ({type(error).__name__}: "
            f"{reason}); check the files, or convert that column"
        ) from error
