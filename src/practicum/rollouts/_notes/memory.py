"""Experience: the newest texts of another note, kept over steps and resumed (OEL 2603.16856)."""

import json
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from practicum.core.calls import suggest_name
from practicum.ports import Capabilities
from practicum.ports.notes import Note, NoteConfig, NoteContext, NoteMoment
from practicum.types import Datum, Rollout


class Config(NoteConfig):
    """The note to keep, and the size of the memory."""

    type: Literal["memory"] = "memory"
    of: str = Field(description="the note whose texts are kept")
    keep: int = Field(default=8, ge=1, description="the newest different texts to keep")
    per: Literal["run", "prompt"] = Field(
        default="run", description="one memory for all prompts, or one for each"
    )

    def find_problems(
        self, name: str, notes: Sequence[str], models: Mapping[str, Capabilities]
    ) -> list[str]:
        """Return a line if the recipe lacks the note to keep."""
        other_notes = [note for note in notes if note != name]
        if self.of in other_notes:
            return []
        return [
            f"notes.{name}.of: no other note named {self.of!r}; {suggest_name(self.of, other_notes)}"
        ]

    def follows_student(self, models: Mapping[str, Capabilities]) -> bool:
        """Return True: it is what all steps before left behind."""
        return True


class KeptExperience(Note):
    """The newest texts by prompt, or under one key for all; see `practicum.ports.notes.Note`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._texts: dict[str, list[str]] = {}

    def write(self, rollouts: Sequence[Rollout], moment: NoteMoment) -> list[str | None]:
        """Return what is known from the steps before this one, the newest last; None: nothing."""
        memories = (self._texts.get(self._name_key(rollout)) for rollout in rollouts)
        return ["\n".join(texts) if texts else None for texts in memories]

    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        """Keep the step's texts."""
        for datum in data:
            text = datum.rollout.notes.get(self._config.of, "").strip()
            if not text:
                continue
            texts = self._texts.setdefault(self._name_key(datum.rollout), [])
            # A text that comes again counts as new, and is kept once.
            texts[:] = [*(old for old in texts if old != text), text][-self._config.keep :]

    def save_state(self) -> dict[str, Tensor]:
        """Return the texts as bytes of JSON, the form in which a checkpoint holds tensors."""
        if not self._texts:
            return {}
        text = json.dumps(self._texts, ensure_ascii=False)
        return {"texts": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from saved texts."""
        if "texts" in tensors:
            self._texts = json.loads(bytes(tensors["texts"].tolist()).decode())

    def _name_key(self, rollout: Rollout) -> str:
        return rollout.prompt.id if self._config.per == "prompt" else ""


def build(config: Config, context: NoteContext) -> Note:
    """Begin with nothing known."""
    return KeptExperience(config)
