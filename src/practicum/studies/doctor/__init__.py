"""The doctor: checks on a few student rollouts before a run, and a verdict with fixes."""

from practicum.studies.doctor.checks import CHECKS
from practicum.studies.doctor.diagnosis import Diagnosis, doctor
from practicum.studies.doctor.verdict import GO, RULES, CheckResult

__all__ = ["CHECKS", "GO", "RULES", "CheckResult", "Diagnosis", "doctor"]
