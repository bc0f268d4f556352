"""The objective as data, its logit side and its token side."""

from practicum.objective.choices import (
    AXES,
    AddAdvantage,
    ClipEntries,
    Contrast,
    LogLinear,
    Mixture,
    Modulate,
    Signal,
    TeacherTarget,
)
from practicum.objective.closed_form import Chunk, can_fuse, open_chunk
from practicum.objective.estimators import K2Surrogate, Pathwise, ScoreFunction
from practicum.objective.reading import compare_signals, read_signal
from practicum.objective.signals import Capabilities, Draws, Full, Sampled, Score, SignalName, Text, TopK
from practicum.objective.spec import Objective, Term
from practicum.objective.token_axis import token_side
from practicum.objective.tokens import TeacherTokens, TermValues, TokenBatch, token_batch
from practicum.objective.vocabulary_axis import logit_side

__all__ = [
    "AXES",
    "AddAdvantage",
    "Capabilities",
    "Chunk",
    "ClipEntries",
    "Contrast",
    "Draws",
    "Full",
    "K2Surrogate",
    "LogLinear",
    "Mixture",
    "Modulate",
    "Objective",
    "Pathwise",
    "Sampled",
    "Score",
    "ScoreFunction",
    "Signal",
    "SignalName",
    "TeacherTarget",
    "TeacherTokens",
    "Term",
    "TermValues",
    "Text",
    "TokenBatch",
    "TopK",
    "can_fuse",
    "compare_signals",
    "logit_side",
    "open_chunk",
    "read_signal",
    "token_batch",
    "token_side",
]
