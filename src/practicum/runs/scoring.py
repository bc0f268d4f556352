"""Build the scorers and the notes of a run, the models of scorers, and the teachers inside them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from practicum.core.plugins import (
    build_part,
)
from practicum.core.randomness import seed_of
from practicum.costs import Ledger, ModelDims
from practicum.errors import CapabilityError, VocabularyError
from practicum.models.config import ScorerConfig, ScratchConfig, StudentConfig
from practicum.models.files import digest_file
from practicum.ports import (
    Backend,
    BackendContext,
    LoadedScalar,
    SamplingClient,
    Student,
    Task,
    Teacher,
)
from practicum.ports.metering import MeteredScalar
from practicum.ports.notes import Note, NoteContext, name_note_role
from practicum.ports.scoring import Scorer, ScorerContext, name_role
from practicum.recipe import Recipe
from practicum.rollouts import NOTE_KINDS
from practicum.runs.identity import add_prefix, digest_loaded, name_dtype
from practicum.runs.opening import resolve_model
from practicum.text import Renderer, compare_renderers


@dataclass(frozen=True, slots=True)
class ScorerInfo:
    """A scoring model: its path in the run, its renderer, its dimensions if known, its
    settings, and the client that scores with it, uncounted."""

    name: str
    renderer: Renderer
    shape: ModelDims | None
    config: ScorerConfig
    client: SamplingClient


@dataclass(frozen=True, slots=True)
class ScorerBuilder:
    """The parts of a run from which its scorers are built.

    `build_teacher(role, config)` builds a teacher inside a scorer. `identities` gets functions that
    read the digests of the files that scorers load.
    """

    recipe: Recipe
    task: Task
    backend: Backend
    backend_context: BackendContext
    student: Student
    ledger: Ledger
    build_teacher: Callable[[str, Any], Teacher]
    identities: list[Callable[[], Mapping[str, str]]]
    scores_dir: Path | None
    is_dry_run: bool

    def build_all(self) -> dict[str, Scorer]:
        """Build the recipe's scorers by name."""
        return {name: self._build(name, config) for name, config in self.recipe.scorers.items()}

    def _build(self, name: str, config: Any) -> Scorer:
        role = name_role(name)
        context = ScorerContext(
            name=name,
            renderer=self.student.renderer,
            task=self.task,
            seed=seed_of(self.recipe.seed, "scorer", name),
            load_scalar=lambda model: self._load_scalar(role, model),
            share_student=lambda: self._share_student(role),
            build_teacher=lambda teacher: self.build_teacher(role, teacher),
            earlier=tuple(self.recipe.scorers)[: list(self.recipe.scorers).index(name)],
            base_dir=Path(self.recipe.base_dir),
            scores_dir=self.scores_dir,
            at_end=self.backend_context.at_end,
            register_file=lambda path: self.identities.append(
                lambda: {f"{role}/{path.name}": digest_file(path)}
            ),
            is_dry_run=self.is_dry_run,
        )
        return build_part("scorers", Scorer, config, context)

    def _load_scalar(self, role: str, config: StudentConfig | None) -> MeteredScalar:
        """Load a model with one number per token; raises VocabularyError if its tokens are
        others."""
        model = resolve_model(config or self._describe_student(), self.recipe)
        loaded = self.backend.load_scalar(model, role)
        if loaded is None:
            loaded = self.backend_context.local().load_scalar(model, role)
        assert loaded is not None, "the local backend holds such models"
        if compare_renderers(self.student.renderer, loaded.renderer) is not None:
            raise VocabularyError(
                f"scorers.{role.partition('-')[2]}.model: {loaded.source} reads other tokens than "
                "the student; name a model of the student's family, or leave model out for a copy "
                "of the student"
            )
        if config is not None:
            self.identities.append(
                lambda: add_prefix(role, digest_loaded(loaded)) | name_dtype(role, config, loaded)
            )
        return self._meter(role, loaded)

    def _share_student(self, role: str) -> MeteredScalar:
        """Return an output on the student's body; CapabilityError if the body is elsewhere."""
        shared = self.backend.share_student(self.student)
        if shared is None:
            raise CapabilityError(
                f"scorers.{role.partition('-')[2]}.body: student needs the student's weights in this "
                "process; set backend: {type: local}, or body: own"
            )
        return self._meter(role, shared)

    def _meter(self, role: str, scalar: LoadedScalar) -> MeteredScalar:
        self.ledger.dims[role] = scalar.dims
        return MeteredScalar(scalar, self.ledger.meter(role))

    def _describe_student(self) -> StudentConfig:
        """Return the student's settings, with the folder of one that was made from scratch."""
        config = self.recipe.student
        if not isinstance(config.model, ScratchConfig):
            return config
        return config.model_copy(update={"model": self.student.source})


def build_notes(
    recipe: Recipe,
    renderer: Renderer,
    task: Task,
    models: Mapping[str, Teacher],
    build_teacher: Callable[[str, Any], Teacher],
) -> dict[str, Note]:
    """Build the recipe's notes by name; `models` are the run's teacher and reference."""
    notes = {}
    for name, config in recipe.notes.items():
        context = NoteContext(
            name=name,
            renderer=renderer,
            task=task,
            seed=seed_of(recipe.seed, "notes", name),
            models=models,
            build_teacher=partial(build_teacher, name_note_role(name)),
        )
        notes[name] = build_part(NOTE_KINDS, Note, config, context)
    return notes
