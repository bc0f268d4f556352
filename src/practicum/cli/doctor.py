"""`practicum doctor`: print a diagnosis in a terminal."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from practicum.recipe import load_recipe
from practicum.run_dir import prepare_folder
from practicum.runs.console import Console, JsonConsole
from practicum.runs.progress import show_progress
from practicum.studies.doctor import SHOWN_METHODS, CheckResult, Diagnosis, doctor
from practicum.studies.doctor.diagnosis import list_fixes, name_file
from practicum.studies.doctor.findings import STATUS_ORDER, describe_skipped, format_interval
from practicum.text import make_printable

LOUD = {"warn": "WARN", "fail": "FAIL"}


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
        prepare_folder(name_file(path, recipe.name).parent)
        diagnosis = doctor(recipe, prompts=prompts, samples=samples)
    path, page = diagnosis.write(path)
    verdict = diagnosis.verdict
    show(diagnosis, source, overrides, console)
    # A terminal has the table and the verdict already; a program gets the same findings as data.
    for_programs = (
        {"verdict": verdict.word, "diagnosis": diagnosis.to_json()}
        if isinstance(console, JsonConsole)
        else {}
    )
    console.finish({**for_programs, "written": str(path), "page": str(page)})
    return verdict.exit_code


def show(diagnosis: Diagnosis, source: str, overrides: Sequence[str], console: Console) -> None:
    """Print a table of the checks, the findings that did not pass, and the verdict.

    Checks that do not apply are one line for each reason.
    """
    applicable = [
        result for result in diagnosis.results if result.outcome.status != "not applicable"
    ]
    applicable.sort(key=lambda result: STATUS_ORDER.index(result.outcome.status))
    rows = [
        [
            result.check.id,
            result.check.name,
            LOUD.get(result.outcome.status, result.outcome.status),
            format_interval(result.outcome.value, result.outcome.unit),
        ]
        for result in applicable
    ]
    console.table(
        f"{diagnosis.name}: {diagnosis.prompts} prompts, {diagnosis.samples} answers each",
        ["", "check", "", "number"],
        rows,
    )
    findings = [result for result in applicable if result.outcome.status != "pass"]
    for result in findings:
        _show_finding(result, console)
    skipped = [(r.check.id, r.outcome.status, r.outcome.sentence) for r in diagnosis.results]
    for line in describe_skipped(skipped):
        console.event(make_printable(line))
    verdict = diagnosis.verdict
    console.event(f"{verdict.word}: {verdict.meaning}")
    # A finding that is already shown above is only named; one that passed has its sentence here.
    printed = {result.render_line() for result in findings}
    for line in verdict.because:
        reason = line.partition(":")[0] if line in printed else line
        console.event(make_printable(f"because of {reason}"))
    console.event(make_printable(f"SFT, OPD or RL? {verdict.advice}"))
    for line in diagnosis.methods.render_lines(SHOWN_METHODS) if diagnosis.methods else ():
        console.event(make_printable(line))
    required = list_fixes(result for result in diagnosis.results if result.has_failed)
    if required and verdict.word == "CHANGE-FIRST":
        words = [source, *overrides, *required]
        console.event(make_printable(f"with these changes: practicum run {shlex.join(words)}"))


def _show_finding(result: CheckResult, console: Console) -> None:
    """Print a finding, the answers that it needs, and the fix."""
    finding, title = result.outcome, f"{result.check.id} {result.check.name}"
    console.event(make_printable(f"{title}, {finding.status}: {finding.sentence}"))
    if finding.rollouts_needed:
        console.event(f"-> it needs about {finding.rollouts_needed} answers: raise --prompts")
    if finding.fix:
        console.event(make_printable(f"-> set {shlex.join(finding.fix)}"))
