"""`practicum doctor`: print a diagnosis in a terminal."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from practicum.recipe import load_recipe
from practicum.runs.console import Console, JsonConsole, show_progress
from practicum.studies.doctor import CheckResult, Diagnosis, doctor
from practicum.studies.doctor.findings import format_interval
from practicum.text import make_printable

LOUD = {"warn": "WARN", "fail": "FAIL", "not applicable": "-"}


def examine_recipe(
    source: str,
    overrides: Sequence[str],
    prompts: int,
    samples: int,
    out: Path | None,
    console: Console,
) -> int:
    """Examine a recipe, print and write the diagnosis; return the exit code of its verdict."""
    recipe = load_recipe(source, overrides)
    path = Path("runs") / f"{recipe.name}.doctor.json" if out is None else out
    with show_progress(console):
        diagnosis = doctor(recipe, prompts=prompts, samples=samples)
    page = diagnosis.write(path)
    verdict = diagnosis.verdict
    show(diagnosis, source, overrides, console)
    # A terminal has the table already; a program gets the same findings as data.
    for_programs = {"diagnosis": diagnosis.to_json()} if isinstance(console, JsonConsole) else {}
    console.finish(
        {"verdict": verdict.word, "written": str(path), "page": str(page), **for_programs}
    )
    return verdict.exit_code


def show(diagnosis: Diagnosis, source: str, overrides: Sequence[str], console: Console) -> None:
    """Print a table of all checks, the findings that did not pass, and the verdict."""
    rows = [
        [
            result.check.id,
            result.check.name,
            LOUD.get(result.outcome.status, result.outcome.status),
            format_interval(result.outcome.value, result.outcome.unit),
        ]
        for result in diagnosis.results
    ]
    console.table(
        f"{diagnosis.name}: {diagnosis.prompts} prompts, {diagnosis.samples} answers each",
        ["", "check", "", "number"],
        rows,
    )
    for result in diagnosis.results:
        if result.outcome.status != "pass":
            _show_finding(result, console)
    verdict = diagnosis.verdict
    console.event(f"{verdict.word}: {verdict.meaning}")
    for line in verdict.because:
        console.event(make_printable(f"because {line}"))
    console.event(make_printable(f"SFT, OPD or RL? {verdict.advice}"))
    if diagnosis.changes and verdict.word == "GO-WITH-CHANGES":
        words = [source, *overrides, *diagnosis.changes]
        console.event(make_printable(f"with all changes: practicum run {shlex.join(words)}"))


def _show_finding(result: CheckResult, console: Console) -> None:
    """Print a finding, the answers that it needs, and the fix."""
    finding, title = result.outcome, f"{result.check.id} {result.check.name}"
    console.event(make_printable(f"{title}, {finding.status}: {finding.sentence}"))
    if finding.rollouts_needed:
        console.event(f"-> it needs about {finding.rollouts_needed} answers: raise --prompts")
    if finding.fix:
        console.event(make_printable(f"-> write {shlex.join(finding.fix)}"))
