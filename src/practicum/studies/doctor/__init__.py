"""Before a run: a few student rollouts, the checks on them, and a verdict with its numbers and what to change."""

from practicum.studies.doctor.checks import CHECKS, Check
from practicum.studies.doctor.diagnosis import Diagnosis, doctor, run_checks
from practicum.studies.doctor.evidence import Evidence, collect_evidence
from practicum.studies.doctor.findings import CheckOutcome, changed
from practicum.studies.doctor.verdict import GO, RULES, CheckResult, Verdict

__all__ = [
    "CHECKS",
    "GO",
    "RULES",
    "Check",
    "CheckOutcome",
    "CheckResult",
    "Diagnosis",
    "Evidence",
    "Verdict",
    "changed",
    "collect_evidence",
    "doctor",
    "run_checks",
]
