"""The backend `local`: the student in this process, which is what a recipe means that names none."""

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from practicum.backends.local.loading import LoadedModel, load_student
from practicum.backends.local.sizes import learning_of, shape_of
from practicum.backends.local.trainer import LocalTrainer
from practicum.model_config import StudentConfig
from practicum.objective import Objective
from practicum.ports import BackendContext, Learner


class Config(BaseModel):
    """Nothing to set: what is held at once stands under `train`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["local"] = "local"

    def problems(self, student: StudentConfig, objective: Objective, source: str, staleness: int) -> list[str]:
        """Every student and every objective can be trained here."""
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLearner(Learner):
    """A student whose modules are at hand."""

    loaded: LoadedModel


def build(config: Config, context: BackendContext) -> LocalLearner:
    """Load the student and let learn what the recipe says."""
    loaded = load_student(context.student, context.seed, context.folder)
    model = loaded.language_model
    trainer = LocalTrainer(model, context.limits)
    return LocalLearner(
        trainer=trainer,
        renderer=loaded.renderer,
        context_length=loaded.context_length,
        source=loaded.source,
        shape=shape_of(model),
        learning=learning_of(model),
        loaded=loaded,
    )
