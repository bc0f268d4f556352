"""`practicum doctor`: what was found, in a terminal."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from practicum.core.notes import show_notes
from practicum.recipe import load_recipe
from practicum.runs.console import Console, JsonConsole
from practicum.studies.doctor import CheckResult, Diagnosis, doctor
from practicum.studies.doctor.findings import format_interval
from practicum.text import make_printable

LOUD = {"warn": "WARN", "fail": "FAIL", "not applicable": "-"}


def examine_recipe(
    source: str,
    overrides: Sequence[str],
    drawn: tuple[int, int],
    out: Path | None,
    console: Console,
) -> int:
    """Examine a recipe, show and write what was found; returns the exit code of its verdict."""
    recipe = load_recipe(source, overrides)
    path = Path("runs") / f"{recipe.name}.doctor.json" if out is None else out
    with show_notes(lambda text: console.event(make_printable(text))):
        found = doctor(recipe, prompts=drawn[0], samples=drawn[1])
    page = found.write(path)
    show(found, source, overrides, console)
    for_programs = {"diagnosis": found.to_json()} if isinstance(console, JsonConsole) else {}
    console.finish(
        {"verdict": found.verdict.word, "written": str(path), "page": str(page), **for_programs}
    )
    return found.verdict.exit_code


def show(found: Diagnosis, source: str, overrides: Sequence[str], console: Console) -> None:
    """A table of all checks, what the others say that did not pass, and the verdict."""
    rows = [
        [
            result.check.id,
            result.check.name,
            LOUD.get(result.finding.status, result.finding.status),
            format_interval(result.finding.value, result.finding.unit),
        ]
        for result in found.results
    ]
    console.table(
        f"{found.name}: {found.prompts} prompts, {found.samples} answers each",
        ["", "check", "", "number"],
        rows,
    )
    for result in found.results:
        if result.finding.status != "pass":
            _tell(result, console)
    console.event(f"{found.verdict.word}: {found.verdict.meaning}")
    for line in found.verdict.because:
        console.event(make_printable(f"because {line}"))
    console.event(make_printable(f"SFT, OPD or RL? {found.verdict.advice}"))
    if found.changes and found.verdict.word == "GO-WITH-CHANGES":
        words = [source, *overrides, *found.changes]
        console.event(make_printable(f"with all changes: practicum run {shlex.join(words)}"))


def _tell(result: CheckResult, console: Console) -> None:
    """What a check says, what it needs, and what to write."""
    finding = result.finding
    console.event(
        make_printable(
            f"{result.check.id} {result.check.name}, {finding.status}: {finding.sentence}"
        )
    )
    if finding.needs:
        console.event(f"-> it needs about {finding.needs} answers: raise --prompts")
    if finding.fix:
        console.event(make_printable(f"-> write {shlex.join(finding.fix)}"))
