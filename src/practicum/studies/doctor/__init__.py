"""The doctor: a few student rollouts before a run, the checks on them, and a verdict with numbers
and fixes."""

from practicum.studies.doctor.checks import CHECKS
from practicum.studies.doctor.diagnosis import Diagnosis, doctor
from practicum.studies.doctor.verdict import GO, RULES, CheckResult

__all__ = ["CHECKS", "GO", "RULES", "CheckResult", "Diagnosis", "doctor"]
