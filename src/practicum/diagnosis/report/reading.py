"""What a run's folder holds, read for the page; every file but recipe.json may be absent or still growing."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from practicum.errors import CheckpointError, RecipeError
from practicum.run_dir import read_json

MOST_ROLLOUTS = 2000
"""So many rollouts, spread evenly over the run, are read for the panels about tokens."""

MOST_VALUES = 400_000
"""So many tokens of them, at most, so that long answers cost no more than short ones."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunData:
    """A run as its folder tells it; None or empty where a file is not there.

    `before`, `after` and `teacher` are evaluations as JSON data. `rollouts` are a sample of `rollouts_total`.
    """

    folder: Path
    recipe: Row
    identity: Mapping[str, str]
    prompts: Mapping[str, int] | None
    summary: Row | None
    before: Row | None
    teacher: Row | None
    after: Row | None
    metrics: list[Row]
    timings: list[Row]
    alarms: list[Row]
    doctor: Row | None
    rollouts: list[Row]
    rollouts_total: int
    vocabulary: Mapping[int, tuple[str, bool]]
    rejected: list[Row]
    starts: list[Row]
    versions: Row | None

    @property
    def name(self) -> str:
        """The run's name."""
        return str((self.summary or self.recipe).get("name", self.folder.name))

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.recipe.get("seed", 0))

    @property
    def steps(self) -> int:
        """How many steps the recipe asks for."""
        return int(self.recipe["train"]["steps"])

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.summary is not None


def read_run(folder: Path, most_rollouts: int = MOST_ROLLOUTS) -> RunData:
    """Everything a page is made of; RecipeError where the folder holds no run."""
    saved = _recipe(folder)
    before, after = _object(folder / "before.json") or {}, _object(folder / "after.json") or {}
    rollouts, total = sampled_rows(folder / "rollouts.jsonl", most_rollouts)
    starts: list[Row] = list(rows(folder / "starts.jsonl"))
    return RunData(
        folder=folder,
        recipe=saved["recipe"],
        identity=saved.get("identity", {}),
        prompts=saved.get("prompts"),
        summary=_object(folder / "summary.json"),
        before=before.get("student"),
        teacher=before.get("teacher"),
        after=after.get("student"),
        metrics=list(rows(folder / "metrics.jsonl")),
        timings=list(rows(folder / "timings.jsonl")),
        alarms=list(rows(folder / "alarms.jsonl")),
        doctor=_object(folder / "doctor.json") or _object(folder.with_name(f"{folder.name}.doctor.json")),
        rollouts=rollouts,
        rollouts_total=total,
        vocabulary={row["id"]: (row["text"], row["control"]) for row in rows(folder / "vocabulary.jsonl")},
        rejected=list(rows(folder / "rejected.jsonl")),
        starts=starts,
        versions=starts[-1]["versions"] if starts else None,
    )


def _recipe(folder: Path) -> dict[str, Any]:
    path = folder / "recipe.json"
    if not path.is_file():
        missing = "recipe.json is missing" if folder.is_dir() else "there is no such folder"
        raise RecipeError(f"{folder} holds no run: {missing}; name the folder of a run, for example runs/NAME")
    saved = read_json(path)
    if not isinstance(saved, dict) or not isinstance(saved.get("recipe"), dict):
        raise CheckpointError(f"{path} holds no recipe; restore it or start a new run")
    return saved


def _object(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None where there is none; CheckpointError where the file holds something else."""
    if not path.is_file():
        return None
    value = read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object; restore it or remove it")
    return value


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole rows of a journal that may be growing; none where there is no file."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            yield _row(path, number, line)


def sampled_rows(path: Path, most: int) -> tuple[list[Row], int]:
    """At most `most` rows, spread evenly from the first to the last, and how many there are.

    Only the chosen ones are parsed, so a large file costs little more than reading it.
    """
    if not path.is_file():
        return [], 0
    with path.open("rb") as file:
        starts = [0]
        for line in file:
            if not line.endswith(b"\n"):
                break
            starts.append(starts[-1] + len(line))
        count = len(starts) - 1
        chosen = range(count) if count <= most else [place * (count - 1) // (most - 1) for place in range(most)]
        found: list[Row] = []
        values = 0
        for place in chosen:
            file.seek(starts[place])
            found.append(_row(path, place + 1, file.read(starts[place + 1] - starts[place])))
            values += len(found[-1]["tokens"])
    if values > MOST_VALUES and len(found) > 2:
        stride = -(-values // MOST_VALUES)
        found = found[::stride]
    return found, count


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise CheckpointError(f"{path} line {number} is not a JSON object; remove the line and try again")
    return row
