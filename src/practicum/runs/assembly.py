"""From a recipe to the parts of a step: models loaded, vocabularies compared, prompts read, the teacher built."""

import hashlib
import json
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from practicum.core.plugins import module_of
from practicum.core.randomness import seed_of
from practicum.costs import Ledger, ModelDims
from practicum.errors import CapabilityError, DataError, ModelError, RecipeError
from practicum.models.config import ModelConfig, ScorerConfig, ScratchConfig
from practicum.models.files import file_digest, model_digests
from practicum.ports import (
    Backend,
    BackendContext,
    Environment,
    HoldsTeachers,
    Learner,
    Model,
    SelfTeacher,
    Task,
    Teacher,
    TeacherConfig,
    TeacherContext,
    TrainingClient,
    WeightUpdateRule,
    walk,
)
from practicum.ports.hosting import Hosted
from practicum.ports.metering import MeteredTrainer, wrap_client
from practicum.ports.paper import PaperBackend
from practicum.recipe import Recipe, capability_problems, clip_warning, staleness_warning
from practicum.recipe.schedule import ScheduleState
from practicum.rollouts import (
    Cache,
    RolloutArchive,
    asks_teacher,
    list_conversation_problems,
    load_recorded_rollouts,
    replays,
    source_problems,
)
from practicum.tasks import TaskContext
from practicum.text import Renderer, compare_renderers
from practicum.text.tokenizers import load_renderer
from practicum.training.evaluation import EvaluationSettings
from practicum.training.loop import StepComponents, StepPlan, StepSettings
from practicum.types import Prompt, Rollout

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScorerInfo:
    """A model that scores: its name, as `scorer_names` has it, how it reads prompts, and its sizes."""

    name: str
    renderer: Renderer
    shape: ModelDims | None


@dataclass(frozen=True, slots=True)
class RunComponents:
    """Everything a run needs, built from its recipe."""

    parts: StepComponents
    settings: StepSettings
    evaluation: EvaluationSettings | None
    backend: Backend
    learner: Learner
    courses: ScheduleState
    identify: Callable[[], dict[str, str]]
    """Read a digest of each thing besides the recipe that the run depends on, by name: `student/config.json`, `heldout`."""
    too_long: list[Prompt]
    packages: list[str]
    """The packages besides our own requirements whose versions decide prompts and rewards."""
    scorers: list[ScorerInfo]
    """The models that score besides the student's own weights: `teacher`, `teacher/math`, `reference`."""
    after_training: Sequence[Callable[[], None]]
    """Call these in order when the training is over."""
    at_end: ExitStack
    """Close this when no client is used any more, however that comes about."""

    def close(self) -> None:
        """End the sessions at services."""
        self.at_end.close()

    @property
    def trainer(self) -> TrainingClient:
        """Who trains the student, uncounted."""
        return self.learner.trainer

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The student's own weights that learn, by name; RecipeError where they are not in this process."""
        if self.learner.weights is None:
            raise RecipeError(
                "this looks into the student's weights, which are in another process or at a service; leave backend out for it"
            )
        return self.learner.weights

    def teachers(self) -> dict[str, Teacher]:
        """The teacher, and the reference where there is one."""
        reference = self.parts.reference
        return {
            "teacher": self.parts.teacher,
            **({} if reference is None else {"reference": reference}),
        }


def open_backend(recipe: Recipe, context: BackendContext) -> Backend:
    """Open the backend that the recipe names."""
    return module_of("backends", recipe.backend.type).build(recipe.backend, context)


def open_local(context: BackendContext) -> Backend:
    """Open the backend of this process as it is by default."""
    module = module_of("backends", "local")
    return module.build(module.Config(), context)


def host_model(config: ModelConfig) -> Hosted:
    """Load a model to be held by a service."""
    return module_of("backends", "local").host(config)


def make_scratch(folder: Path, config: ScratchConfig, task: Task) -> Path:
    """Return the folder of a from-scratch model, made the first time with the characters and the answers of the task."""
    return module_of("backends", "local").make_scratch(folder, config, task)


def assemble_run(
    recipe: Recipe,
    models: Path,
    rejected: Path | None = None,
    scores: Path | None = None,
    at_end: ExitStack | None = None,
) -> RunComponents:
    """Build all parts. `models` holds from-scratch models; `rejected` takes the rows that could not be used.

    `scores` is where `cached` teachers keep their answers unless they name a folder; None: they keep none. What is to be
    closed is left to `at_end`, also where the parts do not go together, or else to `RunComponents.close`.
    """
    for warning in (
        staleness_warning(recipe.objective, recipe.rollout),
        clip_warning(recipe.objective),
    ):
        if warning is not None:
            log.warning(warning)
    return _Assembly(recipe, models, rejected, scores, at_end).build()


def load_model(config: ScorerConfig) -> Model:
    """Load a model into this process, outside of any run."""

    def no_task() -> Task:
        raise AssertionError("a model that is named needs no task")

    context = BackendContext(0, Path(), no_task, lambda: open_local(context))
    return open_local(context).scorer(config, "model")


def load_student(recipe: Recipe, models: Path) -> tuple[Backend, Learner]:
    """Load the student of a recipe alone, whose from-scratch model is in `models`."""
    context = BackendContext(
        seed=seed_of(recipe.seed, "student"),
        models=models,
        task=lambda: build_task(recipe),
        local=lambda: open_local(context),
    )
    backend = open_backend(recipe, context)
    return backend, backend.student(recipe.student)


def assemble_on_paper(
    recipe: Recipe, models: Path, answer_tokens: int
) -> tuple[RunComponents, PaperBackend]:
    """Build all parts over models without weights whose answers are all so long, and the backend that keeps what they are asked."""
    assembly = _Assembly(recipe, models)
    module = module_of("backends", recipe.backend.type)
    paper = module.build_on_paper(recipe.backend, assembly.backend_context, answer_tokens)
    return assembly.build(paper, on_paper=True), paper


def _check_capabilities(recipe: Recipe, teacher: Teacher, reference: Teacher | None) -> None:
    """CapabilityError where a teacher, now that it is there, cannot give what its settings promised."""
    problems = capability_problems(recipe.objective, teacher.capabilities, recipe.teacher.type)
    if reference is not None and recipe.reference is not None:
        problems += capability_problems(
            recipe.objective, reference.capabilities, recipe.reference.type, against="reference"
        )
    problems += source_problems(recipe.rollout.source, teacher.capabilities, recipe.teacher.type)
    if problems:
        raise CapabilityError(problems)


def build_step_plan(recipe: Recipe, stop_ids: frozenset[int], step: int) -> StepPlan:
    """What a recipe, its schedules resolved, says of a step."""
    return StepPlan(
        objective=recipe.objective,
        n=recipe.rollout.n,
        sampling=recipe.rollout.sampling(stop_ids),
        source=recipe.rollout.source,
        adam=recipe.optimizer.adam(step, recipe.train.steps),
    )


def build_task(
    recipe: Recipe, rejected: Path | None = None, packages: list[str] | None = None
) -> Task:
    """Build the task of a recipe, whose relative paths start at the recipe's folder; `packages` takes those that decide rewards."""
    used = [] if packages is None else packages
    context = TaskContext(recipe.seed, Path(recipe.base_dir), rejected, used)
    return module_of("tasks", recipe.task.type).build(recipe.task, context)


def evaluation_settings(
    recipe: Recipe, task: Task, student: Learner | Model
) -> EvaluationSettings | None:
    """The held-out prompts and how to sample on them, or None where there is nothing to evaluate."""
    evaluation_config = recipe.evaluation
    prompts, too_long = split_by_length(task.heldout_prompts(), student, recipe)
    if too_long:
        log.info(
            f"{len(too_long)} of {len(too_long) + len(prompts)} held-out prompts left out: too long"
        )
    if evaluation_config.prompts == 0 or not prompts:
        return None
    new_tokens = evaluation_config.max_new_tokens or recipe.rollout.max_new_tokens
    sampling = recipe.rollout.model_copy(
        update={
            "max_new_tokens": new_tokens,
            "temperature": evaluation_config.temperature,
            "top_p": 1.0,
            "top_k": 0,
        }
    ).sampling(student.renderer.stop_ids)
    return EvaluationSettings(
        prompts[: evaluation_config.prompts], evaluation_config.samples, sampling, recipe.seed
    )


def split_by_length(
    prompts: Sequence[Prompt], student: Learner | Model, recipe: Recipe
) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts that leave room for an answer, and those that are too long."""
    available_tokens = student.context_length - recipe.longest_answer
    limit = min(recipe.prompt_tokens, available_tokens)
    fit: list[Prompt] = []
    too_long: list[Prompt] = []
    for prompt in prompts:
        (fit if len(student.renderer.render(prompt.messages)) <= limit else too_long).append(prompt)
    return fit, too_long


def _student_digests(student: Learner, checkpoints_here: bool) -> dict[str, str]:
    """Return the digests of the student's files; of one at a service its name there and the files of its tokenizer."""
    if checkpoints_here:
        return model_digests(student.source)
    return {
        "name": student.source,
        **_named("tokenizer", model_digests(_origin(student.renderer), weights=False)),
    }


def _origin(renderer: Renderer) -> str:
    """Return the folder or hub name that a tokenizer was read from."""
    return str(renderer.tokenizer.name_or_path)


def _named(part: str, digests: Mapping[str, str]) -> dict[str, str]:
    """Return the digests under the name of the part of the run that they belong to."""
    return {f"{part}/{name}": digest for name, digest in digests.items()}


def load_archive(
    recipe: Recipe, prompts: Sequence[Prompt], renderer: Renderer
) -> tuple[RolloutArchive, dict[str, str]]:
    """What was written before the run, and a digest of the tape where it is read from one."""
    source = recipe.rollout.source
    newest: deque[Rollout] = deque(maxlen=recipe.rollout.replay_size if replays(source) else 0)
    if not isinstance(source, Cache):
        return RolloutArchive(newest), {}
    path = Path(recipe.base_dir) / source.path
    tape = load_recorded_rollouts(path, prompts, renderer, recipe.longest_answer)
    return RolloutArchive(newest, tape), {"tape": file_digest(path)}


class _Assembly:
    """The parts of a run while they are put together."""

    def __init__(
        self,
        recipe: Recipe,
        models: Path,
        rejected: Path | None = None,
        scores: Path | None = None,
        at_end: ExitStack | None = None,
    ) -> None:
        if recipe.train.threads is not None:
            torch.set_num_threads(recipe.train.threads)
        self.recipe = recipe
        self.scores = scores
        self.packages: list[str] = []
        self.task = build_task(recipe, rejected, self.packages)
        if isinstance(self.task, Environment) and (
            problems := list_conversation_problems(recipe.rollout.source)
        ):
            raise CapabilityError(problems)
        self.ledger = Ledger()
        self.after_training: list[Callable[[], None]] = []
        self.at_end = at_end or ExitStack()
        self.scorers: list[ScorerInfo] = []
        self.identities: list[Callable[[], Mapping[str, str]]] = []
        self.backend_context = BackendContext(
            seed=seed_of(recipe.seed, "student"),
            models=models,
            task=lambda: self.task,
            local=lambda: open_local(self.backend_context),
            at_end=self.at_end,
            meter=self.ledger.meter("student"),
        )

    def build(self, backend: Backend | None = None, *, on_paper: bool = False) -> RunComponents:
        """Load the models and read the prompts; CapabilityError or DataError where they do not go together."""
        recipe, task, ledger = self.recipe, self.task, self.ledger
        self.backend = backend or open_backend(recipe, self.backend_context)
        self.on_paper = on_paper
        self.student = student = self.backend.student(recipe.student)
        self.identities.append(
            lambda: _named("student", _student_digests(student, recipe.backend.checkpoints_here))
        )
        meter = ledger.meter("student")
        if student.shape is not None:
            ledger.shapes["student"] = student.shape
        teacher = self.build_teacher("teacher", recipe.teacher)
        reference = (
            None if recipe.reference is None else self.build_teacher("reference", recipe.reference)
        )
        _check_capabilities(recipe, teacher, reference)
        prompts, too_long = split_by_length(task.train_prompts(), student, recipe)
        if not prompts:
            raise DataError(
                f"none of the {len(too_long)} training prompts fits: prompt_tokens is {recipe.prompt_tokens} and rollout."
                f"max_new_tokens {recipe.longest_answer}, in a context of {student.context_length}"
            )
        archive, tape = load_archive(recipe, prompts, student.renderer)
        courses = ScheduleState(recipe.schedules, recipe.train.steps)
        evaluation = evaluation_settings(recipe, task, student)
        heldout = evaluation.prompts if evaluation else ()
        self.identities.append(
            lambda: {
                "prompts": _digest([_fingerprint_prompt(prompt) for prompt in prompts]),
                "heldout": _digest([_fingerprint_prompt(prompt) for prompt in heldout]),
                **tape,
            }
        )
        settings = StepSettings(
            seed=recipe.seed,
            prompts_per_step=recipe.train.prompts_per_step,
            plan=lambda step: build_step_plan(
                recipe.at(courses.at(step)), student.renderer.stop_ids, step
            ),
            updates=recipe.train.updates_per_step,
            epochs=recipe.train.epochs,
        )
        parts = StepComponents(
            student=MeteredTrainer(student.trainer, student.shape, student.learning, meter),
            sampler=wrap_client(self.backend.sampler(student), meter),
            teacher=teacher,
            task=task,
            renderer=student.renderer,
            prompts=prompts,
            reference=reference,
            archive=archive,
            ledger=ledger,
        )
        return RunComponents(
            parts=parts,
            settings=settings,
            evaluation=evaluation,
            backend=self.backend,
            learner=student,
            courses=courses,
            identify=lambda: {
                name: digest for read in self.identities for name, digest in read().items()
            },
            too_long=too_long,
            packages=self.packages,
            scorers=self.scorers,
            after_training=self.after_training,
            at_end=self.at_end,
        )

    def build_teacher(self, role: str, config: Any) -> Teacher:
        """Build the recipe's teacher or reference, and all teachers inside it."""
        if role == "teacher" and config.type == "self":
            log.warning(
                "the teacher is the student with the student's own prompt, so there is little to learn; "
                "write {type: privileged, teacher: {type: self}, ...} to let it see more"
            )
        names = scorer_names(role, config)

        def build(context: TeacherContext, config: Any) -> Teacher:
            name = names.get(id(config))
            if name is not None:
                context = self.context_of_scorer(context, name)
            return module_of("teachers", config.type).build(config, context)

        context = TeacherContext(
            renderer=self.student.renderer,
            self_teacher=lambda rule: self.load_self(rule, role),
            load_model=lambda config: self.load_model(config, role),
            build=build,
            base_dir=Path(self.recipe.base_dir),
            scores=self.scores,
            after_training=self.after_training,
            at_end=self.at_end,
            task=self.task,
            on_paper=self.on_paper,
        )
        return build(context, config)

    def context_of_scorer(self, context: TeacherContext, name: str) -> TeacherContext:
        """Return the context of a teacher that asks a model, in which everything goes by the model's name."""
        meter = self.ledger.meter(name)
        return replace(
            context,
            meter=meter,
            count=lambda client: wrap_client(client, meter),
            self_teacher=lambda rule: self.load_self(rule, name),
            load_model=lambda config: self.load_model(config, name),
            load_renderer=lambda config: self.load_renderer(config, name),
            reads=lambda path: self.identities.append(
                lambda: {f"{name}/{path.name}": file_digest(path)}
            ),
        )

    def load_self(self, rule: WeightUpdateRule, name: str) -> SelfTeacher:
        """Return the student's own weights as a scorer."""
        if "student" in self.ledger.shapes:
            self.ledger.shapes[name] = self.ledger.shapes["student"]
        updates = self.recipe.train.updates_per_step * self.recipe.train.epochs
        return self.backend.self_teacher(self.student, replace(rule, updates=updates), name)

    def load_model(self, config: ScorerConfig, name: str) -> Model:
        """Load another model; CapabilityError or ModelError where it does not go together with the student."""
        model = self.backend.scorer(config, name)
        if model.unsampled and not name.startswith("reference") and self._teacher_writes():
            raise ModelError(
                f"{model.unsampled}; as a teacher it can score alone: write evaluation.teacher: false and "
                "rollout.source: student"
            )
        self.identities.append(lambda: _named(name, model_digests(model.source)))
        if model.shape is not None:
            self.ledger.shapes[name] = model.shape
        self.scorers.append(ScorerInfo(name, model.renderer, model.shape))
        model.renderer.render(
            self.task.train_prompts()[0].messages
        )  # names a missing chat template before any step
        compare_renderers(self.student.renderer, model.renderer)
        return model

    def load_renderer(self, config: ModelConfig, name: str) -> Renderer:
        """Load the tokenizer of a model that is elsewhere."""
        renderer = load_renderer(config)
        self.identities.append(
            lambda: _named(f"{name}/tokenizer", model_digests(_origin(renderer), weights=False))
        )
        return renderer

    def _teacher_writes(self) -> bool:
        """Return whether the recipe lets the teacher write tokens, to learn from or to be evaluated."""
        evaluation = self.recipe.evaluation
        return asks_teacher(self.recipe.rollout.source) or (
            evaluation.teacher and evaluation.prompts > 0
        )


def scorer_names(role: str, config: TeacherConfig) -> dict[int, str]:
    """The names of the models that a teacher asks, by the identity of their settings: `teacher`, `teacher/math`, ..."""
    return {
        id(inside): "/".join([role, *(key.partition(".")[2] for key in keys if "." in key)])
        for keys, inside in walk(config)
        if not isinstance(inside, HoldsTeachers)
    }


def _fingerprint_prompt(prompt: Prompt) -> list[Any]:
    """Return all of a prompt as JSON data; a label may decide which teacher is asked."""
    turns = [[message.role, message.content] for message in prompt.messages]
    labels = [prompt.domain, prompt.teacher]
    return [prompt.id, turns, prompt.answer, prompt.response, *labels, dict(prompt.privileged)]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
