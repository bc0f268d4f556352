"""The local backend: any causal language model of transformers, in this process, on a CPU or one GPU."""

from practicum.backends.local.convert import conversion_pending
from practicum.backends.local.export import export
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.loading import LoadedModel, load, load_renderer, load_student
from practicum.backends.local.residency import StoredHead, VisitingSampler, scorer
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.scratch import make_scratch_model
from practicum.backends.local.sizes import learning_of, shape_of
from practicum.backends.local.trainer import LocalTrainer, TrainerLimits

__all__ = [
    "LanguageModel",
    "LoadedModel",
    "LocalSampler",
    "LocalTrainer",
    "StoredHead",
    "TrainerLimits",
    "VisitingSampler",
    "conversion_pending",
    "export",
    "learning_of",
    "load",
    "load_renderer",
    "load_student",
    "make_scratch_model",
    "scorer",
    "shape_of",
]
