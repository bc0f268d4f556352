"""Another model scores: a folder, a hub name or a packaged model whose vocabulary is the student's."""

from typing import Literal

from practicum.model_config import ScorerConfig
from practicum.ports import Capabilities, Teacher, TeacherContext
from practicum.teachers._client import ClientTeacher


class Config(ScorerConfig):
    """The model that scores; its chat template, stop tokens and thinking mode are its own."""

    type: Literal["model"] = "model"

    def capabilities(self) -> Capabilities:
        """A local model gives every signal."""
        return Capabilities(signals=frozenset({"sampled", "topk", "full"}), follows_student=False)


def build(config: Config, context: TeacherContext) -> Teacher:
    """Load the model and check that it speaks the student's vocabulary."""
    client, renderer = context.load_model(config)
    return ClientTeacher(client, renderer, meter=context.meter)
