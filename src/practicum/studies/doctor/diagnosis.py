"""The examination: assemble the recipe, collect evidence, run the checks, decide."""

import json
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from practicum.core.notes import copy_notes
from practicum.core.waits import show_wait
from practicum.errors import RecipeError, VocabularyError
from practicum.recipe import Recipe, load_recipe
from practicum.report.cards import render_card
from practicum.run_dir import prepare_folder, to_json_number, write_text
from practicum.runs.assembly import assemble_run
from practicum.runs.check_outcome import skip_check
from practicum.runs.progress import show_progress
from practicum.studies.doctor.allowed import AllowedMethods, diagnose_methods
from practicum.studies.doctor.behaviour import compute_capacity_ratio
from practicum.studies.doctor.checks import CHECKS
from practicum.studies.doctor.diagnosis_page import render_page
from practicum.studies.doctor.evidence import Evidence, collect_evidence
from practicum.studies.doctor.findings import validate_fix
from practicum.studies.doctor.setup import refuse_vocabulary
from practicum.studies.doctor.verdict import CheckResult, Verdict, decide

PROMPTS, SAMPLES = 16, 4


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis:
    """The verdict about a recipe, the results of all checks, and the messages of loading it."""

    name: str
    seed: int
    prompts: int
    samples: int
    verdict: Verdict
    results: list[CheckResult]
    remarks: list[str]
    methods: AllowedMethods | None = None
    """The published methods that teacher and task allow; None if nothing could be sampled."""

    @property
    def changes(self) -> list[str]:
        """The fixes of all checks that warn or fail, as overrides; see `list_fixes`."""
        return list_fixes(self.results)

    def __repr__(self) -> str:
        changes = f"; changes: {', '.join(self.changes)}" if self.changes else ""
        return f"Diagnosis({self.name}: {self.verdict.word}, {self.verdict.meaning}{changes})"

    def _repr_html_(self) -> str:
        """Return the verdict and the checks that did not pass for a notebook."""
        rows = [
            [result.check.id, result.check.name, result.outcome.status, result.outcome.sentence]
            for result in self.results
            if result.outcome.status not in ("pass", "not applicable")
        ]
        lines = [*self.verdict.because, *(f"set {change}" for change in self.changes)]
        headline = f"{self.name}: {self.verdict.word}, {self.verdict.meaning}"
        return render_card(headline, lines, ["", "check", "status", "finding"], rows)

    def to_json(self) -> dict[str, Any]:
        """Return the content of doctor.json."""
        return {
            "name": self.name,
            "seed": self.seed,
            "prompts": self.prompts,
            "samples": self.samples,
            "verdict": asdict(self.verdict),
            "changes": self.changes,
            "remarks": self.remarks,
            "methods": self.methods and self.methods.to_json(),
            "checks": [_convert_result(result) for result in self.results],
        }

    def write(self, path: Path) -> tuple[Path, Path]:
        """Write the JSON file and an HTML page next to it; return both paths. See `name_file`."""
        path = name_file(path, self.name)
        prepare_folder(path.parent)
        content = self.to_json()
        write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
        page_path = path.with_suffix(".html")
        write_text(page_path, render_page(content))
        return path, page_path


def list_fixes(results: Iterable[CheckResult]) -> list[str]:
    """List the fixes of the checks that ask for a change; of two for one key, the first is kept."""
    changes = [change for result in results if result.needs_change for change in result.outcome.fix]
    by_key = {change.partition("=")[0]: change for change in reversed(changes)}
    return list(reversed(by_key.values()))


def name_file(path: Path, name: str) -> Path:
    """Return the path of the JSON file; in a folder it is NAME.doctor.json."""
    if path.is_dir():
        path /= f"{name}.doctor.json"
    # The page has the ending .html, so the findings cannot.
    return path.with_suffix(".json") if path.suffix == ".html" else path


def doctor(
    recipe: Recipe | str | Path,
    overrides: Sequence[str] = (),
    *,
    prompts: int = PROMPTS,
    samples: int = SAMPLES,
    out: str | Path | None = None,
    progress: bool = True,
) -> Diagnosis:
    """Examine a recipe on `prompts` times `samples` student rollouts before it runs; with `out`,
    write the diagnosis.

    Progress is shown on the screen unless `progress` is off. Raises RecipeError and all
    other loading errors. Two vocabularies that do not fit are a finding, not an error.
    """
    if prompts < 1 or samples < 1:
        raise RecipeError(
            f"{prompts} prompts and {samples} samples give no answers; use at least 1 of each"
        )
    with show_progress(progress=progress):
        recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
        if recipe.student.drafter is not None:
            raise RecipeError(
                "student.drafter: the doctor examines a student's own text, and a drafter's text is "
                "its target's; run the recipe, and read drafts/tokens_per_call"
            )
        if out is not None:
            prepare_folder(name_file(Path(out), recipe.name).parent)
        diagnosis = _examine(recipe, prompts, samples)
    if out is not None:
        diagnosis.write(Path(out))
    return diagnosis


def _examine(recipe: Recipe, prompts: int, samples: int) -> Diagnosis:
    """Assemble the recipe in a temporary folder, collect the evidence and run the checks."""
    remarks: list[str] = []
    with tempfile.TemporaryDirectory(prefix="practicum-doctor-") as folder, ExitStack() as at_end:
        try:
            with copy_notes(remarks.append):
                components = assemble_run(recipe, Path(folder), exit_stack=at_end)
        except VocabularyError as error:
            return _build_refusal(recipe, str(error), remarks)
        evidence = collect_evidence(recipe, components, prompts, samples)
        return run_checks(evidence, remarks)


def run_checks(evidence: Evidence, remarks: Sequence[str] = ()) -> Diagnosis:
    """Run every check on the evidence and decide; returns the diagnosis."""
    recipe = evidence.recipe
    results = []
    with show_wait("checks", len(CHECKS)) as wait:
        for check in CHECKS:
            results.append(CheckResult(check, validate_fix(recipe, check.run(evidence))))
            wait.advance()
    count, samples = len(evidence.prompts), evidence.samples
    verdict = decide(results, compute_capacity_ratio(evidence))
    methods = diagnose_methods(evidence)
    return Diagnosis(
        recipe.name, recipe.seed, count, samples, verdict, results, list(remarks), methods
    )


def _build_refusal(recipe: Recipe, reason: str, remarks: Sequence[str]) -> Diagnosis:
    """Return the diagnosis of a pair with different vocabularies: only P1 has an outcome."""
    refusal = validate_fix(recipe, refuse_vocabulary(recipe, reason))
    skipped = skip_check("the two vocabularies differ, so no answer could be sampled")
    first, *other_checks = CHECKS
    results = [
        CheckResult(first, refusal),
        *(CheckResult(check, skipped) for check in other_checks),
    ]
    return Diagnosis(recipe.name, recipe.seed, 0, 0, decide(results, None), results, list(remarks))


def _convert_result(result: CheckResult) -> dict[str, Any]:
    """Return the row of a check in doctor.json."""
    check, finding = result.check, result.outcome
    interval = {} if finding.value is None else asdict(finding.value)
    return {
        "id": check.id,
        "name": check.name,
        "status": finding.status,
        "sentence": finding.sentence,
        "value": {name: to_json_number(bound) for name, bound in interval.items()} or None,
        "unit": finding.unit,
        "fix": list(finding.fix),
        "needs": finding.rollouts_needed,
        "details": {
            name: None if number is None else to_json_number(number)
            for name, number in finding.details.items()
        },
        "limits": check.limits,
        "limits_from": check.limits_from,
        "anchor": check.anchor,
    }
