"""The result of a run or a pipeline, as a program, a person and a notebook read it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from practicum.core.options import spell_options
from practicum.errors import CheckpointError, ResourceError
from practicum.recipe import Recipe
from practicum.report.cards import describe_summary, render_card, render_run_card
from practicum.report.tables import build_stage_rows, describe_lost_rows
from practicum.run_dir import RunDir, read_json, read_rows, shapes, shorten_path
from practicum.runs.progress import show_progress


@dataclass(frozen=True, slots=True, repr=False)
class RunResult:
    """The folder of a run or of a pipeline, and the content of its summary.json.

    `recipe` is the recipe of a run of this process, with its objects of Python.
    """

    folder: Path
    summary: dict[str, Any]
    recipe: Recipe | None = None

    @classmethod
    def read(cls, folder: Path) -> "RunResult":
        """Return the result of a run or of a pipeline that another process has finished."""
        run_dir = RunDir(folder)
        is_pipeline = run_dir.pipeline_json.is_file()
        shape = shapes.PIPELINE_SUMMARY if is_pipeline else shapes.SUMMARY
        return cls(folder, read_json(run_dir.summary_json, shape))

    @property
    def lost_rows(self) -> dict[str, int]:
        """The number of rows that could not be written, by the path of the journal in the folder."""
        parts = self.summary.get("stages", [{**self.summary, "folder": ""}])
        return {
            str(Path(part["folder"], name)): count
            for part in parts
            for name, count in part.get("lost_rows", {}).items()
        }

    def check_rows(self) -> None:
        """Raise ResourceError if rows of a journal could not be written."""
        if self.lost_rows:
            raise ResourceError(
                f"{shorten_path(self.folder)}: the run is complete, but "
                f"{describe_lost_rows(self.lost_rows)}; check the disk"
            )

    def metrics(self) -> list[dict[str, Any]]:
        """Return a row of metrics for each step; `pandas.DataFrame(result.metrics())` is a table.

        The rows of a pipeline also name their `stage`.
        """
        if "stages" not in self.summary:
            return _read_metrics(self.folder)
        return [
            {"stage": stage["name"], **row}
            for stage in self.summary["stages"]
            for row in _read_metrics(self.folder / stage["folder"])
        ]

    def rollouts(
        self,
        *,
        step: int | None = None,
        top: int = 0,
        limit: int | None = None,
        progress: bool = True,
    ) -> list[dict[str, Any]]:
        """Return a row for each rollout, of one step or of all; `pandas.DataFrame` takes the rows.

        Each row has the tokens as ids and as text, the student's log-probabilities when it sampled
        them, mask, authors and reward. With `top=5`, the newest checkpoint and the teacher are
        loaded, and the first `limit` rows (64 by default) also have the top five tokens of both at
        each position. The rows of a pipeline also name their `stage`.
        """
        # Imported here: the models' modules are slow to import.
        from practicum.runs.rollout_rows import list_rollout_rows

        with show_progress(progress=progress):
            if "stages" not in self.summary:
                return list_rollout_rows(
                    self.folder, step=step, top=top, limit=limit, recipe=self.recipe
                )
            return [
                {"stage": stage["name"], **row}
                for stage in self.summary["stages"]
                for row in list_rollout_rows(
                    self.folder / stage["folder"], step=step, top=top, limit=limit
                )
            ]

    def __repr__(self) -> str:
        return f"RunResult({shorten_path(self.folder)}: {self._describe()})"

    def _repr_html_(self) -> str:
        """Return the verdict and the evaluations for a notebook."""
        name, folder = str(self.summary["name"]), shorten_path(self.folder)
        if "stages" not in self.summary:
            return render_run_card(name, folder, self.summary)
        columns = ["after", "accuracy", *self.summary["domains"], "steps", "ended"]
        rows = build_stage_rows(self.summary) if self.summary["accuracy"] else []
        place = f"report.html is in {folder}"
        return render_card(f"{name}: {self._describe()}", [place], columns, rows)

    def _describe(self) -> str:
        if "stages" in self.summary:
            return f"a pipeline of {len(self.summary['stages'])} stages"
        return describe_summary(self.summary)


def load_run(folder: str | Path) -> RunResult:
    """Return the result of a finished run or pipeline from its folder.

    Raises RecipeError if there is no such folder, and CheckpointError if the run is not finished.
    """
    run_dir = RunDir.open(Path(folder))
    if not run_dir.summary_json.is_file():
        raise CheckpointError(
            f"{folder}: the run is not finished, so it has no summary.json; resume it with "
            f"{spell_options(resume=True)}"
        )
    return RunResult.read(run_dir.path)


def _read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [dict(row) for row in read_rows(RunDir(folder).metrics_jsonl, shapes.METRICS)]
