"""What a run's folder holds, read for the page; every file but recipe.json may be absent or still growing."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from practicum.errors import RecipeError
from practicum.run_dir import parse_row, read_json, read_rows, shapes

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
    changes: list[Row]
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
    before = _object(folder / "before.json", shapes.BEFORE) or {}
    after = _object(folder / "after.json", shapes.AFTER) or {}
    rollouts, total = sampled_rows(folder / "rollouts.jsonl", most_rollouts)
    starts = rows(folder / "starts.jsonl", shapes.START)
    doctor = _object(folder / "doctor.json", shapes.DOCTOR)
    return RunData(
        folder=folder,
        recipe=saved["recipe"],
        identity=saved.get("identity", {}),
        prompts=saved.get("prompts"),
        changes=saved.get("changes", []),
        summary=_object(folder / "summary.json", shapes.SUMMARY),
        before=before.get("student"),
        teacher=before.get("teacher"),
        after=after.get("student"),
        metrics=rows(folder / "metrics.jsonl", shapes.METRICS),
        timings=rows(folder / "timings.jsonl", shapes.TIMINGS),
        alarms=rows(folder / "alarms.jsonl", shapes.ALARM),
        doctor=doctor or _object(folder.with_name(f"{folder.name}.doctor.json"), shapes.DOCTOR),
        rollouts=rollouts,
        rollouts_total=total,
        vocabulary={
            row["id"]: (row["text"], row["control"])
            for row in rows(folder / "vocabulary.jsonl", shapes.VOCABULARY)
        },
        rejected=rows(folder / "rejected.jsonl", shapes.REJECTED),
        starts=starts,
        versions=starts[-1]["versions"] if starts else None,
    )


def _recipe(folder: Path) -> dict[str, Any]:
    path = folder / "recipe.json"
    if not path.is_file():
        missing = "recipe.json is missing" if folder.is_dir() else "there is no such folder"
        raise RecipeError(
            f"{folder} holds no run: {missing}; name the folder of a run, for example runs/NAME"
        )
    return read_json(path, shapes.SHOWN_RUN)


def _object(path: Path, shape: TypeAdapter[Any]) -> dict[str, Any] | None:
    """Return a JSON object, or None where there is no file; CheckpointError where it is damaged."""
    return read_json(path, shape) if path.is_file() else None


def rows(path: Path, shape: TypeAdapter[Any]) -> list[Row]:
    """Return the whole rows of a journal that may be growing; none where there is no file."""
    return list(read_rows(path, shape)) if path.is_file() else []


def sampled_rows(
    path: Path, most: int, shape: TypeAdapter[Any] = shapes.ROLLOUT
) -> tuple[list[Row], int]:
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
        chosen = (
            range(count)
            if count <= most
            else [place * (count - 1) // (most - 1) for place in range(most)]
        )
        found: list[Row] = []
        values = 0
        for place in chosen:
            file.seek(starts[place])
            found.append(
                parse_row(path, place + 1, file.read(starts[place + 1] - starts[place]), shape)
            )
            values += len(found[-1]["tokens"])
    if values > MOST_VALUES and len(found) > 2:
        stride = -(-values // MOST_VALUES)
        found = found[::stride]
    return found, count
