"""Run the cells of the scaling law, fit the law, and predict the larger cells before they run.

    python -m laboratory.scaling rates --place FOLDER [--record]
    python -m laboratory.scaling grid --place FOLDER [--record]
    python -m laboratory.scaling predict --record
    python -m laboratory.scaling larger --place FOLDER [--record]
    python -m laboratory.scaling fit [--record]

The parts come in this order: `rates` chooses the learning rate of each width and author, `grid` has the cells of the fit, and
`larger` has larger cells, which do not run before `predict` has recorded what the fit expects of them. Each finished cell is one
line of FOLDER/cells.jsonl; a second command runs only the missing ones. `--record` puts the lines into
results/scaling_cells.jsonl, from which `predict` and `fit` read, and their results next to it.
"""

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from laboratory.scaling.cells import RATES, Cell, build_rate_cell, list_cells, play
from laboratory.scaling.law import Row
from laboratory.scaling.summary import predict_larger, render_law, summarise_law
from practicum import run_dir
from practicum.errors import DataError, PracticumError

RESULTS = Path(__file__).resolve().parents[2] / "results"
ROWS = RESULTS / "scaling_cells.jsonl"
PREDICTIONS = RESULTS / "scaling_predictions.json"
SUMMARY = RESULTS / "scaling_law.json"


def main() -> None:
    """Run a part, or fit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("rates", "grid", "predict", "larger", "fit"))
    parser.add_argument("--place", type=Path, help="folder of models and finished cells")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--count", type=int, help="run at most this many cells")
    parser.add_argument("--record", action="store_true", help="write into the folder results")
    options = parser.parse_args()
    if options.part in ("predict", "fit"):
        report(options.part, options.record)
        return
    if options.part == "larger" and not PREDICTIONS.is_file():
        parser.error("the larger cells have no predictions yet; run `predict --record` first")
    if options.place is None:
        parser.error("--place is needed, for models and finished cells")
    path = options.place.absolute() / "cells.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {row["name"]: row for row in (*read_cells(), *read_cells(path))}
    while cells := list_missing(options.part, rows)[: options.count]:
        print(f"{options.part}: {len(cells)} cells to run", flush=True)
        for row in run_cells(cells, rows, path.parent / "models", options.jobs):
            rows[row["name"]] = row
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            errors = (f"{row[time]['error']:.4f}" for time in ("before", "after", "teacher_errors"))
            print(row["name"], *errors, f"{row['seconds']} s", flush=True)
        if options.record:
            lines = [json.dumps(rows[name]) + "\n" for name in sorted(rows)]
            ROWS.write_text("".join(lines), encoding="utf-8")
        if options.count:
            return


def report(part: str, record: bool) -> None:
    """Predict the larger cells, or fit and summarise all cells; print the result and record it if asked to."""
    rows = read_cells()
    if part == "predict":
        if any(row["part"] == "larger" for row in rows):
            raise SystemExit(
                "some of the larger cells have run, so they can no longer be predicted"
            )
        path, content = PREDICTIONS, predict_larger(rows)
        print(json.dumps(content, indent=1))
    else:
        predictions = run_dir.read_json(PREDICTIONS) if PREDICTIONS.is_file() else {}
        path, content = SUMMARY, summarise_law(rows, predictions)
        print(render_law(content))
    if record:
        run_dir.write_json(path, content)


def read_cells(path: Path = ROWS) -> list[dict[str, Any]]:
    """Return the finished cells of a file; none if there is no file."""
    return list(run_dir.read_rows(path)) if path.is_file() else []


def list_missing(part: str, rows: Mapping[str, Row]) -> list[Cell]:
    """Return the cells of a part that have not run; for rates, also the next ones where the best rate is at an edge."""
    cells = list_cells(part)
    missing = [cell for cell in cells if cell.name not in rows]
    if part != "rates" or missing:
        return missing
    return [cell for cell in list_wider_rates(cells, rows) if cell.name not in rows]


def list_wider_rates(cells: Sequence[Cell], rows: Mapping[str, Row]) -> list[Cell]:
    """Return a cell beyond each best rate that is the largest or the smallest of its width and author."""
    wider = []
    for student, author in dict.fromkeys((cell.student, cell.author) for cell in cells):
        tried = _list_tried(rows.values(), student, author)
        best = _find_best(tried)
        rates = [row["rate"] for row in tried]
        step = (best == max(rates)) - (best == min(rates))
        place = RATES.index(best) + step
        if step and 0 <= place < len(RATES):
            wider.append(build_rate_cell(student, author, RATES[place]))
    return wider


def choose_rate(cell: Cell, rows: Mapping[str, Row]) -> float:
    """Return the learning rate of a cell: its own, or the best of its width and author.

    Raises DataError if no rate was tried.
    """
    if cell.rate is not None:
        return cell.rate
    tried = _list_tried(rows.values(), cell.student, cell.author)
    if not tried:
        raise DataError(
            f"no learning rate was tried for width {cell.student}; run the part `rates` first"
        )
    return _find_best(tried)


def _list_tried(rows: Iterable[Row], student: int, author: str) -> list[Row]:
    return [
        row
        for row in rows
        if (row["part"], row["student"], row["author"]) == ("rates", student, author)
    ]


def _find_best(tried: Sequence[Row]) -> float:
    return min(tried, key=lambda row: row["after"]["error"])["rate"]


def run_cells(
    cells: Sequence[Cell], rows: Mapping[str, Row], models: Path, jobs: int
) -> Iterator[dict[str, Any]]:
    """Yield the row of each cell as it ends, draw after draw, and the longest cells first."""
    longest = sorted(cells, key=lambda cell: (cell.draw, -cell.student * cell.tokens))
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        tasks = [pool.submit(play, cell, choose_rate(cell, rows), models) for cell in longest]
        try:
            for task in as_completed(tasks):
                yield task.result()
        finally:
            # After an error or an interrupt, cells that have not begun do not run: their rows would be lost.
            pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    try:
        main()
    except PracticumError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
