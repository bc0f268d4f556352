"""Before a run: a few student rollouts, the checks on them, and a verdict with its numbers and what to change."""

from practicum.diagnosis.doctor.checks import CHECKS, Check
from practicum.diagnosis.doctor.diagnosis import Diagnosis, doctor, examine
from practicum.diagnosis.doctor.evidence import Evidence, gather
from practicum.diagnosis.doctor.findings import Finding, changed
from practicum.diagnosis.doctor.verdict import GO, RULES, Result, Verdict

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
