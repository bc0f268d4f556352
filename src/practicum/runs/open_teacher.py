"""Open a recipe's teacher without training: to let it answer, or score what is recorded."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from practicum.core.randomness import seed_of
from practicum.errors import CapabilityError
from practicum.models.config import ModelConfig, ScorerConfig, ScratchConfig
from practicum.models.digests import digest_model
from practicum.ports import (
    BackendContext,
    Model,
    ModelEnding,
    SelfTeacher,
    Student,
    Teacher,
    TeacherContext,
    TeacherServices,
    WeightUpdateRule,
    walk,
)
from practicum.recipe import Recipe
from practicum.rows.pictures import have_pictures
from practicum.runs.identity import add_prefix, digest_student
from practicum.runs.opening import (
    build_task,
    load_ending,
    open_backend,
    open_local,
    resolve_model,
    resolve_run,
)
from practicum.text import Renderer, compare_renderers
from practicum.text.tokenizers import load_renderer
from practicum.types import Prompt


@dataclass(frozen=True, slots=True)
class OpenedTeacher:
    """A teacher, the renderer of its answers, its longest text, and the digests of its files."""

    teacher: Teacher
    renderer: Renderer
    context_length: int | None
    prompts: Sequence[Prompt]
    identity: Mapping[str, str]


class TeacherLoader(TeacherServices):
    """Opens a recipe's teacher; the student is loaded only if it is part of the teacher.

    If the teacher `scores` the student's tokens, both must have the same vocabulary. Otherwise the
    teacher writes answers.
    """

    def __init__(
        self, recipe: Recipe, models: Path, exit_stack: ExitStack, *, scores: bool = False
    ) -> None:
        self.recipe = recipe
        self._scores = scores
        self.task = build_task(recipe)
        self.context = BackendContext(
            seed=seed_of(recipe.seed, "student"),
            models_dir=models,
            task=lambda: self.task,
            local=lambda: open_local(self.context),
            at_end=exit_stack,
            pictures=have_pictures(self.task.train_prompts()),
        )
        self.backend = open_backend(recipe, self.context)
        self.renderers: list[Renderer] = []
        self.lengths: list[int] = []
        self.identity: dict[str, str] = {}

    def open(self) -> OpenedTeacher:
        """Return the recipe's teacher; raises CapabilityError if its members differ in tokens."""
        recipe = self.recipe
        if self.task.converses:
            raise CapabilityError(
                f"task {recipe.task.type!r} answers every turn, and a row holds one answer; set "
                "rollout.source: teacher, which lets the teacher converse during the run"
            )
        context = TeacherContext(
            renderer=self.student_renderer,
            services=self,
            base_dir=Path(recipe.base_dir),
            at_end=self.context.at_end,
            compare=compare_renderers if self._scores else lambda student, teacher: None,
            task=self.task,
        )
        teacher = context.build(recipe.teacher)
        members = [config for _, config in walk(recipe.teacher) if not config.members()]
        if len(members) > 1:
            # Only one tokenizer reads the answers, so teachers of several vocabularies come singly.
            for renderer in self.renderers:
                compare_renderers(self.student_renderer, renderer)
        renderer = (self.renderers or [self.student_renderer])[0]
        prompts = self.task.train_prompts()
        return OpenedTeacher(
            teacher, renderer, min(self.lengths, default=None), prompts, self.identity
        )

    @cached_property
    def student(self) -> Student:
        """Return the student as it begins."""
        student = self.backend.load_student(resolve_model(self.recipe.student, self.recipe))
        self.lengths.append(student.context_length)
        is_local = self.recipe.backend.checkpoints_here
        self.identity |= digest_student(student, is_local=is_local)
        return student

    @cached_property
    def student_renderer(self) -> Renderer:
        """Return the student's renderer, without its weights where they are not needed for it."""
        config = self.recipe.student
        if isinstance(config.model, ScratchConfig) or not self.recipe.backend.checkpoints_here:
            return self.student.renderer
        return load_renderer(resolve_run(config))

    def load_self(self, rule: WeightUpdateRule, path: str) -> SelfTeacher:
        """Return the student as a teacher."""
        self.renderers.append(self.student.renderer)
        return self.backend.build_self_teacher(self.student, rule, "teacher")

    def load_model(self, config: ScorerConfig, path: str) -> Model:
        """Load a model, which has to sample if its texts are wanted."""
        model = self.backend.load_scorer(
            resolve_model(config, self.recipe), f"teacher-{len(self.renderers)}"
        )
        if model.no_sampling_reason and not self._scores:
            raise CapabilityError(f"{model.no_sampling_reason}; use another teacher")
        self.renderers.append(model.renderer)
        self.lengths.append(model.context_length)
        self.identity |= add_prefix(f"teacher{len(self.renderers)}", digest_model(model.source))
        return model

    def load_renderer(self, config: ModelConfig, path: str) -> Renderer:
        """Load the tokenizer of a model that is at a service."""
        renderer = load_renderer(resolve_run(config))
        self.renderers.append(renderer)
        return renderer

    def load_ending(self, config: ModelConfig, path: str) -> ModelEnding:
        """Read the last norm and the head of a model that is at a server."""
        return load_ending(config)
