"""The doctor: checks on a few student rollouts before a run, and a verdict with fixes."""

from practicum.studies.doctor.allowed import SHOWN_METHODS, AllowedMethods, find_allowed_methods
from practicum.studies.doctor.checks import CHECKS
from practicum.studies.doctor.diagnosis import Diagnosis, doctor
from practicum.studies.doctor.verdict import GO, RULES, CheckResult

__all__ = [
    "CHECKS",
    "GO",
    "RULES",
    "SHOWN_METHODS",
    "AllowedMethods",
    "CheckResult",
    "Diagnosis",
    "doctor",
    "find_allowed_methods",
]
