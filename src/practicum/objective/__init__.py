"""The objective as data, its logit side and its token side."""

from practicum.objective.clip_call import CLIPS, Clip, ClipCall
from practicum.objective.closed_form import LossChunk, build_chunk
from practicum.objective.compile import CompiledObjective, compile_objective
from practicum.objective.distribution import SignalComparison, TeacherDistribution
from practicum.objective.estimator_call import ESTIMATORS, EstimatorCall, Pathwise, ScoreFunction
from practicum.objective.signal_call import (
    SIGNALS,
    Capabilities,
    Full,
    Sampled,
    Signal,
    SignalCall,
    SignalName,
    TopK,
)
from practicum.objective.signal_reader import compare_signals, read_tokens
from practicum.objective.spec import VERIFIER, Objective, Term
from practicum.objective.target_call import TARGETS, Target, TargetCall
from practicum.objective.token_axis import compute_coefficients
from practicum.objective.tokens import (
    TermValues,
    TokenBatch,
    build_token_batch,
    needs_first_pass,
)
from practicum.objective.vocabulary_axis import (
    compare_candidates,
    compute_term_values,
    compute_values,
    cuts_to_candidates,
    measures_teacher,
    read_target,
)

__all__ = [
    "CLIPS",
    "ESTIMATORS",
    "SIGNALS",
    "TARGETS",
    "VERIFIER",
    "Capabilities",
    "Clip",
    "ClipCall",
    "CompiledObjective",
    "EstimatorCall",
    "Full",
    "LossChunk",
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
    "TermValues",
    "TokenBatch",
    "TopK",
    "build_chunk",
    "build_token_batch",
    "compare_candidates",
    "compare_signals",
    "compile_objective",
    "compute_coefficients",
    "compute_term_values",
    "compute_values",
    "cuts_to_candidates",
    "measures_teacher",
    "needs_first_pass",
    "read_target",
    "read_tokens",
]
