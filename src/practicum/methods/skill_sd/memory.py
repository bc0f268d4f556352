"""Experience: the newest texts of another note, kept across steps and checkpoints (OEL 2603.16856).

With `choose: ucb` a bandit selects one of the texts (Skill-SD 2604.10674), by the bound of UCB1
(10.1023/A:1013689704352). The first trial of a text is the success of the answers that it is about.
Each step that shows the text adds a trial, with the success of the answers that were given the text.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from practicum.core.calls import suggest_name
from practicum.ports import Capabilities
from practicum.ports.notes import Note, NoteConfig, NoteContext, NoteMoment
from practicum.statistics import group_pairs
from practicum.types import Datum, Rollout


class Config(NoteConfig):
    """The note to keep, and the size of the memory."""

    type: Literal["memory"] = "memory"
    note: str = Field(description="the note to keep texts of")
    keep: int = Field(default=8, ge=1, description="number of distinct texts to keep, newest first")
    scope: Literal["run", "prompt"] = Field(
        default="run", description="one memory for all prompts, or one per prompt"
    )
    choose: Literal["all", "ucb"] = Field(
        default="all",
        description="show all texts, or the text with the highest upper confidence bound",
    )
    exploration: float = Field(
        default=1.4, ge=0, description="ucb: weight of the exploration bonus for rarely shown texts"
    )

    def find_problems(
        self, name: str, notes: Sequence[str], models: Mapping[str, Capabilities]
    ) -> list[str]:
        """Return an error line if the recipe lacks the note to keep."""
        other_notes = [note for note in notes if note != name]
        if self.note in other_notes:
            return []
        return [
            f"notes.{name}.note: no other note named {self.note!r}; {suggest_name(self.note, other_notes)}"
        ]

    def follows_student(self, models: Mapping[str, Capabilities]) -> bool:
        """Return True: the memory depends on all earlier steps."""
        return True


class KeptExperience(Note):
    """The newest texts, per prompt or for the whole run; see `practicum.ports.notes.Note`."""

    def __init__(self, config: Config, name: str) -> None:
        self._config = config
        self._name = name
        self._texts: dict[str, list[str]] = {}
        self._tries: dict[str, dict[str, list[float]]] = {}
        """For `ucb`, the mean reward of each trial of a text, by key and text."""

    def write(self, rollouts: Sequence[Rollout], moment: NoteMoment) -> list[str | None]:
        """Return the texts of earlier steps, newest last; None without any text."""
        keys = [self._name_key(rollout) for rollout in rollouts]
        text_of = {key: self._show(key) for key in dict.fromkeys(keys)}
        return [text_of[key] for key in keys]

    def _show(self, key: str) -> str | None:
        texts = self._texts.get(key, [])
        if not texts:
            return None
        if self._config.choose == "all":
            return "\n".join(texts)
        tries = self._tries.get(key, {})
        total = sum(len(tries.get(text, ())) for text in texts)

        def bound(text: str) -> float:
            rewards = tries.get(text, [])
            if not rewards:
                return math.inf
            bonus = self._config.exploration * math.sqrt(math.log(total) / len(rewards))
            return math.fsum(rewards) / len(rewards) + bonus

        # Break ties by the newest text, which is about the newest student.
        return max(reversed(texts), key=bound)

    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        """Store the step's texts, and the rewards of the texts that the step showed."""
        rollouts = [datum.rollout for datum in data]
        for rollout in rollouts:
            text = rollout.notes.get(self._config.note, "").strip()
            if not text:
                continue
            texts = self._texts.setdefault(self._name_key(rollout), [])
            # A repeated text counts as new, and is stored only once.
            texts[:] = [*(old for old in texts if old != text), text][-self._config.keep :]
        if self._config.choose == "ucb":
            self._count_tries(rollouts)

    def _count_tries(self, rollouts: Sequence[Rollout]) -> None:
        """Add a trial to each text that the rollouts were given, and to each text about them."""
        for note in (self._name, self._config.note):
            rewards = group_pairs(
                ((self._name_key(rollout), rollout.notes[note].strip()), rollout.reward)
                for rollout in rollouts
                if note in rollout.notes and rollout.reward is not None
            )
            for (key, text), group in rewards.items():
                tries = self._tries.setdefault(key, {})
                tries.setdefault(text, []).append(math.fsum(group) / len(group))
        for key, tries in self._tries.items():
            texts = self._texts.get(key, [])
            self._tries[key] = {text: tries[text] for text in texts if text in tries}

    def save_state(self) -> dict[str, Tensor]:
        """Return the texts as bytes of JSON, the form in which a checkpoint holds tensors."""
        tables = {"texts": self._texts, "tries": self._tries}
        return {
            name: torch.frombuffer(
                bytearray(json.dumps(table, ensure_ascii=False).encode()), dtype=torch.uint8
            )
            for name, table in tables.items()
            if table
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore saved texts and trials."""
        tables = {name: json.loads(bytes(tensors[name].tolist()).decode()) for name in tensors}
        self._texts = tables.get("texts", {})
        self._tries = tables.get("tries", {})

    def _name_key(self, rollout: Rollout) -> str:
        return rollout.prompt.id if self._config.scope == "prompt" else ""


def build(config: Config, context: NoteContext) -> Note:
    """Build an empty memory."""
    return KeptExperience(config, context.name)
