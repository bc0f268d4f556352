"""The objective as data: terms, each a choice on the mathematical axes, and an aggregate."""

from practicum.objective.clip_call import CLIPS, Clip, ClipCall
from practicum.objective.distribution import SignalComparison, TeacherDistribution
from practicum.objective.estimator_call import ESTIMATORS, EstimatorCall, Pathwise, ScoreFunction
from practicum.objective.signal_call import (
    EVERY_SIGNAL,
    NO_CAPABILITIES,
    SIGNALS,
    Capabilities,
    Full,
    Sampled,
    Signal,
    SignalCall,
    SignalName,
    TopK,
)
from practicum.objective.spec import VERIFIER, Objective, Term
from practicum.objective.target_call import TARGETS, Target, TargetCall

__all__ = [
    "CLIPS",
    "ESTIMATORS",
    "EVERY_SIGNAL",
    "NO_CAPABILITIES",
    "SIGNALS",
    "TARGETS",
    "VERIFIER",
    "Capabilities",
    "Clip",
    "ClipCall",
    "EstimatorCall",
    "Full",
    "Objective",
    "Pathwise",
    "Sampled",
    "ScoreFunction",
    "Signal",
    "SignalCall",
    "SignalComparison",
    "SignalName",
    "Target",
    "TargetCall",
    "TeacherDistribution",
    "Term",
    "TopK",
]
