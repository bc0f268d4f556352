"""`practicum compare`: several methods side by side."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from practicum.errors import DataError, PracticumError
from practicum.runs.console import open_console
from practicum.studies.compare import Settings, compare
from practicum.studies.compare.fitting import QUANTITIES, RESULTS, Law, LawPoint, fit, read_runs


def compare_arms(words: Sequence[str], settings: Settings, as_json: bool) -> None:
    """Run the comparison and show it; PracticumError, exit code 1, after the table where some runs failed."""
    with closing(open_console(as_json=as_json)) as console:
        found = compare(words, settings, console)
    if found.failures:
        total = len(found.failures) + len(found.outcomes)
        raise PracticumError(
            f"{len(found.failures)} of {total} runs failed, and the table stands without them; --resume tries them again"
        )


def fit_law(folders: Sequence[str], as_json: bool) -> None:
    """Fit a scaling law to the runs below the folders and print it; DataError where they cannot carry one."""
    paths = [Path(folder) for folder in folders]
    law = fit(*_with_results(paths))
    with closing(open_console(as_json=as_json)) as console:
        console.table("exponents", *_exponents(law))
        for name, reason in law.left_out.items():
            console.event(f"no exponent for {name}: it {reason}")
        floor = law.floor_interval
        terms = " + ".join(
            f"{term.part:.3g} ({term.quantity} / {term.middle:.3g})^-{term.value:.3g}"
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


def _with_results(folders: Sequence[Path]) -> tuple[list[LawPoint], str]:
    """The runs with accuracies, or where there are none with divergences from the teacher."""
    try:
        return read_runs(folders, RESULTS[0]), RESULTS[0]
    except DataError:
        return read_runs(folders, RESULTS[1]), RESULTS[1]


def _exponents(law: Law) -> tuple[list[str], list[list[str]]]:
    """One row a quantity: its exponent with its interval over resampled runs, and whether the data resolve it."""
    rows = [
        [
            term.quantity,
            QUANTITIES[term.quantity],
            f"{term.value:.3f}",
            f"[{term.interval.low:.3f}, {term.interval.high:.3f}]",
            "yes" if term.resolved else "no: the data do not say",
        ]
        for term in law.exponents
    ]
    return ["quantity", "", "exponent", "95 % over runs", "resolved"], rows
