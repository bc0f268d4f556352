"""Say what follows from the cells: exponents, the best split of operations, and pairs of cells that differ in one thing.

`summarise_law` computes everything as JSON, and `render_law` writes it as tables, without a fit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.page import render_table
from laboratory.scaling.cells import AUTHORS, list_cells
from laboratory.scaling.law import (
    EXPONENTS,
    RESAMPLES,
    Fit,
    Row,
    build_table,
    choose_form,
    find_best_size,
    find_nearest,
    fit,
    predict_errors,
    read_features,
)
from practicum.core.randomness import seed_of
from practicum.statistics import Interval
from practicum.statistics.intervals import bootstrap

READINGS = ("error", "modelling", "generation")
"""The errors of a model; see `laboratory.scaling.chain.measure_errors`."""

BUDGETS = (1e10, 1e11, 1e12)
"""Operations for which the best split is reported."""

PAIRS: dict[str, dict[str, Any]] = {
    "the teacher's answers over the student's": {"author": "teacher"},
    "forward KL over reverse KL": {"divergence": "forward_kl"},
    "4 answers per prompt over 1": {"answers": 4},
    "16 answers per prompt over 1": {"answers": 16},
}
"""The things in which two cells differ: on policy, reverse KL and one answer per prompt are the baseline."""

Pair = tuple[Row, Row]


@dataclass(frozen=True, slots=True)
class Trend:
    """The change of the logarithm of a ratio of errors with the logarithm of a size.

    `crossing` is the size at which the ratio is 1, where the slope's interval excludes 0.
    """

    slope: Interval
    crossing: Interval | None


def select_cells(rows: Sequence[Row], **facts: Any) -> list[Row]:
    """Return the cells of the grid with these facts; else on policy, with reverse KL and one answer per prompt."""
    facts = {"author": "student", "divergence": "reverse_kl", "answers": 1, **facts}
    grid = [row for row in rows if row["part"] == "grid"]
    return [row for row in grid if all(row[key] == value for key, value in facts.items())]


def list_pairs(rows: Sequence[Row], **facts: Any) -> list[Pair]:
    """Return cells with these facts, each with the baseline that has the same models and tokens."""
    baselines = {_locate(row): row for row in select_cells(rows)}
    cells = select_cells(rows, **facts)
    return [(row, baselines[_locate(row)]) for row in cells if _locate(row) in baselines]


def _locate(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("draw", "student", "teacher", "quality", "tokens"))


def measure_pairs(pairs: Sequence[Pair], reading: str) -> list[tuple[Row, float]]:
    """Return the baseline of each pair, and the logarithm of the ratio of the errors."""
    return [
        (baseline, math.log(row["after"][reading] / baseline["after"][reading]))
        for row, baseline in pairs
    ]


def fit_trend(pairs: Sequence[Pair], reading: str, *, relative: bool, seed: int = 0) -> Trend:
    """Fit the logarithm of the ratio of errors to the size, the tokens and the teacher's error, by least squares.

    The size is the student's parameters, relative to the teacher's if `relative`. The crossing is for the mean tokens and error of
    a teacher. Resamples draw settings with all their pairs.
    """
    measured = measure_pairs(pairs, reading)
    rows = [row for row, _ in measured]
    ratios = torch.tensor([ratio for _, ratio in measured], dtype=torch.float64)
    table = build_table(rows, reading)
    size = (table.features + table.means)[:, 0]
    if relative:
        size = size - (table.features + table.means)[:, 1]
    columns = torch.stack(
        [torch.ones_like(size), size, table.features[:, 2], table.features[:, 3]], dim=1
    )
    generator = torch.Generator().manual_seed(seed_of(seed, "trend"))
    settings = torch.tensor(table.settings)
    count = int(settings.max()) + 1
    resampled = []
    for _ in range(RESAMPLES):
        picks = torch.randint(count, (count,), generator=generator)
        weights = torch.bincount(picks, minlength=count)[settings].double()
        resampled.append(_solve(columns, ratios, weights))
    best = _solve(columns, ratios, torch.ones_like(ratios))
    many = torch.stack(resampled)
    slope = Interval.of_resamples(best[1].item(), many[:, 1])
    if slope.low <= 0 <= slope.high:
        return Trend(slope, None)
    crossings = (-many[:, 0] / many[:, 1]).exp()
    return Trend(slope, Interval.of_resamples(math.exp(-best[0] / best[1]), crossings))


def _solve(columns: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    root = weights.sqrt()
    # A resample of few settings can lack a level, so that the solution is not unique.
    return torch.linalg.lstsq(root[:, None] * columns, root * values, driver="gelsd").solution


def fit_authors(
    rows: Sequence[Row], resamples: int = RESAMPLES
) -> dict[str, tuple[Fit, dict[str, float]]]:
    """Return the fit for the answers of each author, and how far each form misses the widest student."""
    fits = {}
    for author in AUTHORS:
        cells = select_cells(rows, author=author)
        if cells:
            form, misses = choose_form(cells, "error")
            fits[author] = (fit(form, build_table(cells, "error"), resamples), misses)
    return fits


def predict_larger(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return the error of each larger cell with its 80 % interval, by the cell's name.

    A cell has the parameters of a cell of the same width among the rates, as many tokens as it asks for, and the measured error of
    its teacher.
    """
    fits = fit_authors(rows)
    parameters = {row["student"]: row["student_parameters"] for row in rows}
    teachers = {
        (row["draw"], row["teacher"], row["quality"]): row for row in rows if row["part"] == "grid"
    }
    predictions = {}
    for cell in list_cells("larger"):
        teacher = teachers[cell.draw, cell.teacher, cell.quality]
        row = {
            "student_parameters": parameters[cell.student],
            "learned_tokens": cell.tokens,
            **{key: teacher[key] for key in ("teacher_parameters", "teacher_errors")},
        }
        (interval,) = predict_errors(fits[cell.author][0], [row], "error")
        predictions[cell.name] = _list_ends(interval)
    return predictions


def summarise_law(
    rows: Sequence[Row], predictions: Mapping[str, Sequence[float]], resamples: int = RESAMPLES
) -> dict[str, Any]:
    """Return everything that the tables need, as JSON."""
    fits = fit_authors(rows, resamples)
    return {
        "cells": sum(row["part"] == "grid" for row in rows),
        "all_cells": len(list_cells("grid")),
        "fits": {author: _describe_fit(*fitted) for author, fitted in fits.items()},
        "split": _describe_split(fits["student"][0]),
        "pairs": _describe_pairs(rows),
        "trends": _describe_trends(rows),
        "larger": [
            {
                "name": row["name"],
                "width": row["student"],
                "error": row["after"]["error"],
                "predicted": predictions[row["name"]],
                "nearest": _read_nearest(rows, row),
            }
            for row in rows
            if row["part"] == "larger"
        ],
    }


def _read_nearest(rows: Sequence[Row], row: Row) -> float:
    """Return the error of the cell of the grid that is nearest to a larger cell."""
    table = build_table(select_cells(rows, author=row["author"]), "error")
    return find_nearest(table, read_features([row], "error")).exp().item()


def _describe_fit(fitted: Fit, misses: Mapping[str, float]) -> dict[str, Any]:
    return {
        "form": fitted.form.name,
        "cells": len(fitted.misses),
        "typical_miss": fitted.misses.abs().median().item(),
        "misses": dict(misses),
        "exponents": {name: _list_ends(fitted.get_exponent(name)) for name in EXPONENTS},
    }


def _describe_split(fitted: Fit) -> list[dict[str, Any]]:
    teacher, quality = (fitted.table.means[place].exp().item() for place in (1, 3))
    return [
        {
            "operations": budget,
            "teacher": teacher,
            "size": _list_ends(find_best_size(fitted, budget, teacher, quality)),
        }
        for budget in BUDGETS
    ]


def _describe_pairs(rows: Sequence[Row]) -> list[dict[str, Any]]:
    described = []
    for title, facts in PAIRS.items():
        pairs = list_pairs(rows, **facts)
        for width in sorted({baseline["student"] for _, baseline in pairs}):
            chosen = [pair for pair in pairs if pair[1]["student"] == width]
            ratios = {reading: _average_ratio(chosen, reading) for reading in READINGS}
            described.append({"title": title, "width": width, "pairs": len(chosen), **ratios})
    return described


def _average_ratio(pairs: Sequence[Pair], reading: str) -> list[float]:
    """Return the geometric mean of the ratios with its interval."""
    logs = torch.tensor([ratio for _, ratio in measure_pairs(pairs, reading)])
    return [math.exp(end) for end in _list_ends(bootstrap(logs, seed=0))]


def _describe_trends(rows: Sequence[Row]) -> dict[str, Any]:
    trends = {}
    for title, relative in (
        ("the teacher's answers over the student's", True),
        ("forward KL over reverse KL", False),
    ):
        pairs = list_pairs(rows, **PAIRS[title])
        if pairs:
            trends[title] = asdict(fit_trend(pairs, "error", relative=relative))
    return trends


def _list_ends(interval: Interval) -> list[float]:
    return [interval.mean, interval.low, interval.high]


def render_law(summary: Mapping[str, Any]) -> str:
    """Render a summary as tables."""
    parts = [
        f"{summary['cells']} of the {summary['all_cells']} cells of the grid have run.",
        _render_exponents(summary["fits"]),
        _render_split(summary["split"]),
        _render_pairs(summary["pairs"]),
        _render_larger(summary["larger"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _render_exponents(fits: Mapping[str, Any]) -> str:
    names = list(fits)
    rows = [
        [about, *(f"{Interval(*fits[name]['exponents'][quantity]):.2f}" for name in names)]
        for quantity, about in EXPONENTS.items()
    ]
    rows.append(["form", *(fits[name]["form"] for name in names)])
    rows.append(
        ["half of the cells within", *(f"{fits[name]['typical_miss']:.1%}" for name in names)]
    )
    forms = list(next(iter(fits.values()))["misses"])
    rows += [
        [
            f"miss on the widest student: {form}",
            *(f"{fits[name]['misses'][form]:.3f}" for name in names),
        ]
        for form in forms
    ]
    return render_table(["exponent of", *(f"answers of the {name}" for name in names)], rows)


def _render_split(split: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for row in split:
        size = Interval(*row["size"])
        parts = 2 * size.mean, 2 * row["teacher"], 6 * size.mean
        shares = (f"{part / sum(parts):.0%}" for part in parts)
        rows.append([f"{row['operations']:.0e}", f"{size:.2g}", *shares])
    return render_table(
        ["operations", "best parameters of the student", "rollout", "teacher", "update"], rows
    )


def _render_pairs(pairs: Sequence[Mapping[str, Any]]) -> str:
    """Render a row per ratio and a column per width; only the divergences differ by the kind of error."""
    widths = sorted({row["width"] for row in pairs})
    table = []
    for title, facts in PAIRS.items():
        by_width = {row["width"]: row for row in pairs if row["title"] == title}
        for reading in READINGS if "divergence" in facts else READINGS[:1]:
            cells = (
                f"{Interval(*by_width[width][reading]):.2f}" if width in by_width else ""
                for width in widths
            )
            name = title if reading == READINGS[0] else f"{title}, {reading}"
            table.append([name, *cells])
    head = ["ratio of errors", *(f"width {width}" for width in widths)]
    return render_table(head, table) if pairs else ""


def count_held(larger: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of larger cells whose error is inside the predicted interval."""
    return sum(row["predicted"][1] <= row["error"] <= row["predicted"][2] for row in larger)


def average_miss(larger: Sequence[Mapping[str, Any]], guess: str) -> float:
    """Return the mean miss, in logarithms, of `predicted` or of the `nearest` cell."""
    guesses = (row[guess][0] if guess == "predicted" else row[guess] for row in larger)
    misses = [
        abs(math.log(value / row["error"])) for value, row in zip(guesses, larger, strict=True)
    ]
    return sum(misses) / len(misses)


def _render_larger(larger: Sequence[Mapping[str, Any]]) -> str:
    if not larger:
        return ""
    widths = sorted({row["width"] for row in larger})
    rows = []
    for width in widths:
        cells = [row for row in larger if row["width"] == width]
        misses = (f"{average_miss(cells, guess):.3f}" for guess in ("predicted", "nearest"))
        rows.append([f"width {width}", f"{count_held(cells)} of {len(cells)}", *misses])
    head = [
        "larger cells",
        "inside the 80 % interval",
        "miss of the law",
        "miss of the nearest cell",
    ]
    return render_table(head, rows)
