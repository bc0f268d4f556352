"""The backend `local`: the student in this process, which is what a recipe means that names none."""

from dataclasses import dataclass

import torch

from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.loading import LoadedModel, load_student
from practicum.backends.local.sizes import learning_of, shape_of
from practicum.backends.local.trainer import LocalTrainer
from practicum.ports import BackendContext, Learner


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLearner(Learner):
    """A student whose modules are at hand."""

    loaded: LoadedModel


def load_learner(context: BackendContext) -> LocalLearner:
    """Load the student and let learn what the recipe says."""
    loaded = load_student(context.student, context.seed, context.folder)
    model = loaded.language_model
    if not context.student.dropout and _is_noisy_in_training(model):
        context.say(
            f"student: the config of {loaded.source} asks for dropout or a router's noise in training, which is left off; write "
            "student.dropout: true to learn with it"
        )
    trainer = LocalTrainer(model, context.limits, loaded.renderer.special_ids, dropout=context.student.dropout)
    return LocalLearner(
        trainer=trainer,
        renderer=loaded.renderer,
        context_length=loaded.context_length,
        source=loaded.source,
        shape=shape_of(model),
        learning=learning_of(model),
        loaded=loaded,
    )


@torch.no_grad()
def _is_noisy_in_training(language_model: LanguageModel) -> bool:
    """Return whether the model computes something else in its training mode, on a short text."""
    model, device = language_model.model, language_model.device
    ids = torch.arange(1, 17, device=device)[None] % language_model.vocab_size
    mask = torch.ones_like(ids, dtype=torch.bool)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        model.train()
        noisy = language_model.body(ids, mask)
        model.eval()
    return not torch.allclose(noisy, language_model.body(ids, mask), rtol=1e-3, atol=1e-4)
