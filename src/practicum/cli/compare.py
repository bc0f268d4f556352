"""`practicum compare`: several methods side by side."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from practicum.errors import DataError, PracticumError
from practicum.runs.progress import open_console, show_progress
from practicum.studies.compare import ComparisonSettings, run_comparison
from practicum.studies.compare.fitting import QUANTITIES, RESULTS, Law, LawPoint, fit, read_runs


def compare_arms(words: Sequence[str], settings: ComparisonSettings, as_json: bool) -> None:
    """Run the comparison and print its table.

    Raises PracticumError (exit code 1) after the table if runs failed.
    """
    with closing(open_console(as_json=as_json)) as console, show_progress(console):
        comparison = run_comparison(words, settings, console)
    failed = len(comparison.failures)
    if failed:
        raise PracticumError(
            f"{failed} of {failed + len(comparison.outcomes)} runs failed, and the table does "
            "not include them; --resume tries them again"
        )


def fit_law(folders: Sequence[str], as_json: bool) -> None:
    """Fit a scaling law to the runs below the folders and print it.

    Raises DataError if the runs do not suffice.
    """
    law = fit(*_read_points([Path(folder) for folder in folders]))
    with closing(open_console(as_json=as_json)) as console:
        console.table("exponents", *_list_exponents(law))
        for name, reason in law.left_out.items():
            console.event(f"no exponent for {name}: it {reason}")
        floor = law.floor_interval
        terms = " + ".join(
            f"{term.coefficient:.3g} ({term.quantity} / {term.geometric_mean:.3g})^-{term.exponent:.3g}"
            for term in law.exponents
        )
        error = "1 - accuracy" if law.result == "accuracy" else law.result
        console.finish(
            {
                "law": f"{error} = {law.floor:.3g} + {terms}",
                "floor": f"{law.floor:.3g} [{floor.low:.3g}, {floor.high:.3g}]",
                "runs": f"{law.runs}, half of them within {law.typical_miss:.1%} of the law",
            }
        )


def _read_points(folders: Sequence[Path]) -> tuple[list[LawPoint], str]:
    """Return the runs by accuracy, or by divergence from the teacher if none has an accuracy."""
    # Accuracy first: it is the goal of a run, and tasks without a verifier have no accuracy.
    try:
        return read_runs(folders, RESULTS[0]), RESULTS[0]
    except DataError:
        return read_runs(folders, RESULTS[1]), RESULTS[1]


def _list_exponents(law: Law) -> tuple[list[str], list[list[str]]]:
    """Return a header and one row per quantity, with the interval over resampled runs."""
    rows = [
        [
            term.quantity,
            QUANTITIES[term.quantity],
            f"{term.exponent:.3f}",
            f"[{term.interval.low:.3f}, {term.interval.high:.3f}]",
            "yes" if term.is_resolved else "no: the data do not show it",
        ]
        for term in law.exponents
    ]
    return ["quantity", "", "exponent", "95 % over runs", "resolved"], rows
