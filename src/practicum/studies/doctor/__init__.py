"""Before a run: a few student rollouts, the checks on them, and a verdict with its numbers and what to change."""

from practicum.studies.doctor.checks import CHECKS, Check
from practicum.studies.doctor.diagnosis import Diagnosis, doctor, examine
from practicum.studies.doctor.evidence import Evidence, gather
from practicum.studies.doctor.findings import Finding, changed
from practicum.studies.doctor.verdict import GO, RULES, Result, Verdict

__all__ = [
    "CHECKS",
    "GO",
    "RULES",
    "Check",
    "Diagnosis",
    "Evidence",
    "Finding",
    "Result",
    "Verdict",
    "changed",
    "doctor",
    "examine",
    "gather",
]
