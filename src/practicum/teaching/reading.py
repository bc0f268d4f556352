"""The renderer of a model behind a server: from the tokenizer in the recipe, else the student's."""

import logging
from dataclasses import replace

from pydantic import BaseModel, Field

from practicum.models.config import ModelConfig
from practicum.ports import TeacherContext
from practicum.text import Renderer

log = logging.getLogger(__name__)


class ReadingConfig(BaseModel):
    """The facts about a model that its server does not report."""

    tokenizer: str | None = Field(
        default=None,
        description="folder, hub name or packaged name, compared with the student's; "
        "none: the student's is used",
    )
    template: str | None = Field(
        default=None, description="a chat template (Jinja) instead of the tokenizer's own"
    )
    system: str | None = Field(default=None, description="a system turn put before every prompt")
    thinking: bool | None = Field(
        default=None, description="the template's thinking switch, if it has one"
    )

    def build_renderer(self, address: str, context: TeacherContext) -> Renderer:
        """Return the model's renderer; without a `tokenizer`, the student's renderer."""
        settings = self.model_dump(include={"template", "system", "thinking"}, exclude_none=True)
        if self.tokenizer is not None:
            return context.load_renderer(ModelConfig(model=self.tokenizer, **settings))
        log.info(
            f"{address}: its tokenizer and template are assumed to be the student's; set "
            "tokenizer: ... to compare them"
        )
        return replace(context.renderer, **settings)
