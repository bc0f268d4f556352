"""The result of a run or a pipeline, as a program, a person and a notebook read it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from practicum.report.cards import describe_summary, render_card, render_run_card
from practicum.report.tables import build_stage_rows
from practicum.run_dir import RunDir, read_json, read_rows, shapes, shorten_path


@dataclass(frozen=True, slots=True, repr=False)
class RunResult:
    """The folder of a run or of a pipeline, and the content of its summary.json."""

    folder: Path
    summary: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "RunResult":
        """Return the result of a run or of a pipeline that another process has finished."""
        run_dir = RunDir(folder)
        is_pipeline = run_dir.pipeline_json.is_file()
        shape = shapes.PIPELINE_SUMMARY if is_pipeline else shapes.SUMMARY
        return cls(folder, read_json(run_dir.summary_json, shape))

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


def _read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [dict(row) for row in read_rows(RunDir(folder).metrics_jsonl, shapes.METRICS)]
