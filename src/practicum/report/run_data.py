"""Read a run's folder for its page; every file but recipe.json may be absent or still growing."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from practicum.errors import RecipeError
from practicum.pictures import FOLDER, identify_digest
from practicum.run_dir import parse_row, read_json, read_rows, shapes
from practicum.run_dir.journal import open_journal

MAX_ROLLOUTS = 2000
"""The number of rollouts, spread evenly over the run, that the panels about tokens read."""

MAX_TOKENS = 400_000
"""The number of their tokens, at most, so that long completions cost no more than short ones."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunData:
    """The contents of a run's folder; None or empty if a file is absent.

    `before`, `after` and `teacher` are evaluations as JSON data. `rollouts` are a sample of
    `rollouts_total`. `pictures` are the files of small copies by the ids of pictures.
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
    pictures: Mapping[int, Path]

    @property
    def name(self) -> str:
        """The run's name."""
        return str((self.summary or self.recipe).get("name", self.folder.name))

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.recipe.get("seed", 0))

    @property
    def num_steps(self) -> int:
        """The number of steps that the recipe asks for."""
        return int(self.recipe["train"]["steps"])

    @property
    def last_step(self) -> int:
        """The newest step that is done, or 0."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def is_finished(self) -> bool:
        """True if the run has ended."""
        return self.summary is not None


def is_divergence_estimated(run: RunData) -> bool:
    """Return True if `reverse_kl` is a mean log-ratio of sampled tokens at a step, not exact."""
    return any(row.get("reverse_kl_estimated") for row in run.metrics)


def find_pictures(tokens: Iterable[int], run: RunData) -> list[Path]:
    """Return the files of the pictures that stand among tokens, each once, in order."""
    return [run.pictures[token] for token in dict.fromkeys(tokens) if token in run.pictures]


def read_run(folder: Path, max_rollouts: int = MAX_ROLLOUTS) -> RunData:
    """Read everything that a page shows; RecipeError if the folder holds no run."""
    saved = _read_recipe(folder)
    before = _read_object(folder / "before.json", shapes.BEFORE) or {}
    after = _read_object(folder / "after.json", shapes.AFTER) or {}
    rollouts, total = sample_rows(folder / "rollouts.jsonl", max_rollouts)
    starts = _read_journal(folder / "starts.jsonl", shapes.START)
    doctor = _read_object(folder / "doctor.json", shapes.DOCTOR)
    beside = folder.with_name(f"{folder.name}.doctor.json")
    return RunData(
        folder=folder,
        recipe=saved["recipe"],
        identity=saved.get("identity", {}),
        prompts=saved.get("prompts"),
        changes=saved.get("changes", []),
        summary=_read_object(folder / "summary.json", shapes.SUMMARY),
        before=before.get("student"),
        teacher=before.get("teacher"),
        after=after.get("student"),
        metrics=_read_journal(folder / "metrics.jsonl", shapes.METRICS),
        timings=_read_journal(folder / "timings.jsonl", shapes.TIMINGS),
        alarms=_read_journal(folder / "alarms.jsonl", shapes.ALARM),
        doctor=doctor or _read_object(beside, shapes.DOCTOR),
        rollouts=rollouts,
        rollouts_total=total,
        vocabulary={
            row["id"]: (row["text"], row["control"])
            for row in _read_journal(folder / "vocabulary.jsonl", shapes.VOCABULARY)
        },
        rejected=_read_journal(folder / "rejected.jsonl", shapes.REJECTED),
        starts=starts,
        versions=starts[-1]["versions"] if starts else None,
        pictures={
            identify_digest(path.stem): path for path in sorted((folder / FOLDER).glob("*.jpg"))
        },
    )


def _read_recipe(folder: Path) -> dict[str, Any]:
    path = folder / "recipe.json"
    if not path.is_file():
        missing = "recipe.json is missing" if folder.is_dir() else "there is no such folder"
        raise RecipeError(
            f"{folder} holds no run: {missing}; name the folder of a run, for example runs/NAME"
        )
    return read_json(path, shapes.SHOWN_RUN)


def _read_object(path: Path, shape: TypeAdapter[Any]) -> dict[str, Any] | None:
    """Return a JSON object, or None if the file is missing; CheckpointError if it is damaged."""
    return read_json(path, shape) if path.is_file() else None


def _read_journal(path: Path, shape: TypeAdapter[Any]) -> list[Row]:
    """Return the complete rows of a journal that may be growing; none if there is no file."""
    return list(read_rows(path, shape)) if path.is_file() else []


def sample_rows(
    path: Path, max_rows: int, shape: TypeAdapter[Any] = shapes.ROLLOUT
) -> tuple[list[Row], int]:
    """Return up to `max_rows` rows, spread evenly from first to last, and the number of all rows.

    Only the chosen rows are parsed, so a large file costs little more than reading it.
    """
    if not path.is_file():
        return [], 0
    with open_journal(path) as file:
        # A last line without its end is a row that the run is still writing.
        starts = [0]
        for line in file:
            if not line.endswith(b"\n"):
                break
            starts.append(starts[-1] + len(line))
        count = len(starts) - 1
        indices: Sequence[int] = range(count)
        if count > max_rows:
            # Dividing by one less than the number of rows makes the first and the last one hits.
            indices = [index * (count - 1) // (max_rows - 1) for index in range(max_rows)]
        rows: list[Row] = []
        for index in indices:
            file.seek(starts[index])
            line = file.read(starts[index + 1] - starts[index])
            rows.append(parse_row(path, index + 1, line, shape))
    tokens = sum(len(row["tokens"]) for row in rows)
    # Thinning by a stride keeps the sample even; cutting its end would lose the newest steps.
    if tokens > MAX_TOKENS and len(rows) > 2:
        rows = rows[:: -(-tokens // MAX_TOKENS)]
    return rows, count
