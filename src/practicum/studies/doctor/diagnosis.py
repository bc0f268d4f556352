"""The whole examination: load, draw, check, decide, write down."""

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from practicum.core.notes import copy_notes
from practicum.errors import RecipeError, VocabularyError
from practicum.recipe import Recipe, load_recipe
from practicum.run_dir import json_number, write_text
from practicum.runs.assembly import assemble_run
from practicum.studies.doctor.behaviour import capacity_ratio
from practicum.studies.doctor.checks import CHECKS
from practicum.studies.doctor.evidence import Evidence, collect_evidence
from practicum.studies.doctor.findings import accepted, skipped
from practicum.studies.doctor.page import page
from practicum.studies.doctor.setup import refused_vocabulary
from practicum.studies.doctor.verdict import CheckResult, Verdict, decide

PROMPTS, SAMPLES = 16, 4


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the doctor found: the verdict, every check, and what assembling the recipe had to say."""

    name: str
    seed: int
    prompts: int
    samples: int
    verdict: Verdict
    results: list[CheckResult]
    remarks: list[str]

    @property
    def changes(self) -> list[str]:
        """The fixes of all checks that ask for one, as overrides of the recipe; of two for one key the first stays."""
        wanted = [
            change
            for result in self.results
            if result.asks_for_change
            for change in result.finding.fix
        ]
        return list({change.partition("=")[0]: change for change in reversed(wanted)}.values())[
            ::-1
        ]

    def to_json(self) -> dict[str, Any]:
        """The content of doctor.json."""
        return {
            "name": self.name,
            "seed": self.seed,
            "prompts": self.prompts,
            "samples": self.samples,
            "verdict": asdict(self.verdict),
            "changes": self.changes,
            "remarks": self.remarks,
            "checks": [_row(result) for result in self.results],
        }

    def write(self, path: Path) -> Path:
        """Write the JSON file, and beside it the same as a page; returns the page's path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n")
        beside = path.with_suffix(".html")
        write_text(beside, page(self.to_json()))
        return beside


def doctor(
    recipe: Recipe | str | Path,
    overrides: Sequence[str] = (),
    *,
    prompts: int = PROMPTS,
    samples: int = SAMPLES,
    out: str | Path | None = None,
) -> Diagnosis:
    """Examine a recipe on `prompts` times `samples` student rollouts before it is run; with `out`, write it down there.

    Raises RecipeError and the other errors of loading; two vocabularies that do not fit are a finding, not an error.
    """
    if prompts < 1 or samples < 1:
        raise RecipeError(
            f"{prompts} prompts and {samples} samples draw nothing; write at least 1 of each"
        )
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    remarks: list[str] = []
    with tempfile.TemporaryDirectory(prefix="practicum-doctor-") as folder, ExitStack() as at_end:
        try:
            with copy_notes(remarks.append):
                built = assemble_run(recipe, Path(folder), at_end=at_end)
        except VocabularyError as error:
            found = _refused(recipe, str(error), remarks)
        else:
            found = run_checks(collect_evidence(recipe, built, prompts, samples), remarks)
    if out is not None:
        found.write(Path(out))
    return found


def run_checks(evidence: Evidence, remarks: Sequence[str] = ()) -> Diagnosis:
    """Every check on what was gathered, and the verdict."""
    results = []
    for check in CHECKS:
        finding = check.run(evidence)
        results.append(
            CheckResult(check, replace(finding, fix=accepted(evidence.recipe, finding.fix)))
        )
    verdict = decide(results, capacity_ratio(evidence))
    recipe = evidence.recipe
    return Diagnosis(
        recipe.name,
        recipe.seed,
        len(evidence.prompts),
        evidence.samples,
        verdict,
        results,
        list(remarks),
    )


def _refused(recipe: Recipe, reason: str, remarks: Sequence[str]) -> Diagnosis:
    """The diagnosis of a pair that cannot be put together."""
    first = refused_vocabulary(reason)
    findings = [replace(first, fix=accepted(recipe, first.fix))]
    findings += [skipped("the two vocabularies differ, so nothing could be drawn")] * (
        len(CHECKS) - 1
    )
    results = [CheckResult(check, finding) for check, finding in zip(CHECKS, findings, strict=True)]
    return Diagnosis(recipe.name, recipe.seed, 0, 0, decide(results, None), results, list(remarks))


def _row(result: CheckResult) -> dict[str, Any]:
    check, finding = result.check, result.finding
    value = (
        None
        if finding.value is None
        else {name: json_number(x) for name, x in asdict(finding.value).items()}
    )
    return {
        "id": check.id,
        "name": check.name,
        "status": finding.status,
        "sentence": finding.sentence,
        "value": value,
        "unit": finding.unit,
        "fix": list(finding.fix),
        "needs": finding.needs,
        "details": {
            name: None if x is None else json_number(x) for name, x in finding.details.items()
        },
        "limits": check.limits,
        "limits_from": check.limits_from,
        "anchor": check.anchor,
    }
