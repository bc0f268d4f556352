"""Assemble a run from its recipe: load models, compare vocabularies, build teachers."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from practicum.core.plugins import (
    load_plugin,
)
from practicum.core.randomness import seed_of
from practicum.costs import Ledger, Meter
from practicum.errors import CapabilityError, DataError, ModelError, RecipeError, VocabularyError
from practicum.models.config import ModelConfig, ScorerConfig
from practicum.models.digests import digest_model
from practicum.models.files import digest_file
from practicum.ports import (
    Backend,
    BackendContext,
    Model,
    ModelEnding,
    SamplingClient,
    SelfTeacher,
    Student,
    Task,
    Teacher,
    TeacherContext,
    TeacherServices,
    TrainingClient,
    WeightUpdateRule,
    walk,
)
from practicum.ports.engines import EngineChoice
from practicum.ports.gate import check_prompts
from practicum.ports.metering import MeteredTrainer, wrap_client
from practicum.ports.paper import PaperBackend
from practicum.ports.scoring import (
    Scorer,
)
from practicum.recipe import (
    Recipe,
    explain_clip,
    explain_staleness,
    find_capability_problems,
    find_context_problems,
)
from practicum.recipe.schedule import ScheduleState
from practicum.rollouts import (
    check_answers,
    list_task_problems,
    list_writer_problems,
)
from practicum.rows import describe_long_answers
from practicum.rows.pictures import have_pictures, show_pictures
from practicum.runs.identity import (
    add_prefix,
    digest_loaded,
    digest_prompts,
    digest_student,
    digest_tokenizer,
    digest_tools,
    name_decoding,
    name_dtype,
)
from practicum.runs.opening import (
    add_tools,
    build_task,
    load_ending,
    open_backend,
    open_local,
    resolve_model,
    resolve_run,
)
from practicum.runs.row_texts import describe_texts
from practicum.runs.scoring import ScorerBuilder, ScorerInfo, build_notes
from practicum.runs.unfinished import load_archive, load_curriculum, open_segments
from practicum.text import Renderer
from practicum.text.tokenizers import load_renderer
from practicum.training.evaluation import EvaluationSettings
from practicum.training.loop import StepComponents, StepPlan, StepSettings
from practicum.types import Prompt, SamplingParams

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunComponents:
    """Everything that a run needs, assembled from its recipe."""

    parts: StepComponents
    settings: StepSettings
    evaluation: EvaluationSettings | None
    backend: Backend
    student: Student
    schedule_state: ScheduleState
    identify: Callable[[], dict[str, str]]
    """Read the digests of the run's inputs by name, such as `student/config.json` or `heldout`."""
    skipped_prompts: list[Prompt]
    packages: list[str]
    """The optional packages with versions that affect prompts and rewards."""
    scorers: list[ScorerInfo]
    """The scoring models other than the student: `teacher`, `teacher/math`, `reference`."""
    after_training: Sequence[Callable[[], None]]
    """The functions to call in order after training."""
    exit_stack: ExitStack
    """The clean-up of all clients, to be closed however the run ends."""

    def close(self) -> None:
        """Close all clients, which ends sessions at services."""
        self.exit_stack.close()

    @property
    def trainer(self) -> TrainingClient:
        """Return the student's trainer without metering."""
        return self.student.trainer

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the trainable weights by name; raises RecipeError if they are elsewhere."""
        if self.student.weights is None:
            raise RecipeError(
                "this needs the student's weights, which are in another process or at a service; "
                "leave backend out"
            )
        return self.student.weights


def assemble_run(
    recipe: Recipe,
    models: Path,
    rejected: Path | None = None,
    scores: Path | None = None,
    exit_stack: ExitStack | None = None,
    *,
    keeps_records: bool = False,
) -> RunComponents:
    """Assemble a run.

    `models` is the folder of from-scratch models, `rejected` the file for rows that cannot be used.
    `scores` is the folder of `cached` teachers that name none; with None they do not store scores.
    `exit_stack`, or without it `RunComponents.close`, closes what was opened, also after an error.
    With `keeps_records`, the files of models are recorded before their first load, and every
    process compares them.
    """
    warnings = explain_staleness(recipe.objective, recipe.rollout), explain_clip(recipe.objective)
    for warning in filter(None, warnings):
        log.warning(warning)
    inputs = _prepare_inputs(
        recipe, models, rejected, scores, exit_stack, keeps_records=keeps_records
    )
    return _Assembly(inputs, open_backend(recipe, inputs.backend_context)).build()


def assemble_on_paper(
    recipe: Recipe,
    models: Path,
    answer_tokens: int,
    device: str | None = None,
    memory: int | None = None,
) -> tuple[RunComponents, PaperBackend]:
    """Assemble a dry run of weightless models; every completion has `answer_tokens` tokens.

    Also returns its backend, which records the requests. `device` is the type of the planned device
    (None: this machine's), `memory` the bytes of the planned GPU.
    """
    # Backends of other packages need not have this function.
    build = vars(load_plugin("backends", recipe.backend.type)).get("build_on_paper")
    if build is None:
        raise CapabilityError(
            f"plan: backend {recipe.backend.type!r} has no build_on_paper, so its cost is "
            "unknown; leave backend out to plan the recipe here"
        )
    inputs = _prepare_inputs(recipe, models)
    context = replace(inputs.backend_context, planned_device=device, planned_memory=memory)
    paper = build(recipe.backend, context, answer_tokens)
    return _Assembly(inputs, paper, on_paper=True).build(), paper


def _check_capabilities(recipe: Recipe, teacher: Teacher, reference: Teacher | None) -> None:
    """Raise CapabilityError if a teacher cannot give what its settings promised."""
    problems = find_capability_problems(recipe.objective, teacher.capabilities, recipe.teacher.type)
    problems += find_context_problems(recipe.objective, recipe.teacher, teacher.capabilities)
    if reference is not None and recipe.reference is not None:
        problems += find_capability_problems(
            recipe.objective, reference.capabilities, recipe.reference.type, against="reference"
        )
    source, kind = recipe.rollout.source, recipe.teacher.type
    problems += list_writer_problems(
        source, teacher.capabilities, kind, None if reference is None else reference.capabilities
    )
    if problems:
        raise CapabilityError(problems)


def build_step_settings(
    recipe: Recipe, schedule_state: ScheduleState, stop_ids: frozenset[int]
) -> StepSettings:
    """Return the settings of all steps; schedules are resolved step by step."""
    return StepSettings(
        seed=recipe.seed,
        prompts_per_step=recipe.train.prompts_per_step,
        plan=lambda step: build_step_plan(
            recipe.replace_numbers(schedule_state.compute_numbers(step)), stop_ids, step
        ),
        updates=recipe.train.updates_per_step,
        epochs=recipe.train.epochs,
    )


def build_step_plan(recipe: Recipe, stop_ids: frozenset[int], step: int) -> StepPlan:
    """Return the settings of a step from a recipe with resolved schedules."""
    return StepPlan(
        objective=recipe.objective,
        n=recipe.rollout.n,
        sampling=recipe.rollout.build_sampling_params(stop_ids),
        source=recipe.rollout.source,
        adam=recipe.optimizer.build_adam_params(step, recipe.train.steps),
    )


def choose_engine(recipe: Recipe) -> EngineChoice | None:
    """Return the engine that samples for the student; None: the backend samples itself."""
    config = recipe.rollout.engine
    return None if config is None else EngineChoice(config, recipe.longest_text)


def build_evaluation_settings(
    recipe: Recipe, task: Task, student: Student | Model
) -> EvaluationSettings | None:
    """Return the held-out prompts and their sampling settings, or None if there are no prompts."""
    config = recipe.evaluation
    prompts, too_long = split_by_length(check_prompts(task.heldout_prompts()), student, recipe)
    if too_long:
        log.info(
            f"{len(too_long)} of {len(too_long) + len(prompts)} held-out prompts left out: too long"
        )
    if config.prompts == 0 or not prompts:
        return None
    # Evaluations always sample from the full distribution: top_p and top_k have no key for them.
    new_tokens = config.max_new_tokens or recipe.rollout.max_new_tokens
    stop_ids = student.renderer.stop_ids
    sampling = SamplingParams(
        new_tokens, config.temperature, stop_ids=stop_ids, max_turns=config.max_turns
    )
    chosen = prompts[: config.prompts]
    return EvaluationSettings(chosen, config.samples, sampling, recipe.seed, config.search)


def split_training_prompts(
    task: Task, student: Student, recipe: Recipe
) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to train on as `split_by_length` does; DataError if none fits."""
    prompts, too_long = split_by_length(check_prompts(task.train_prompts()), student, recipe)
    if not prompts:
        raise DataError(
            f"all {len(too_long)} training prompts are too long: prompt_tokens is "
            f"{recipe.prompt_tokens} and rollout.max_new_tokens {recipe.longest_answer}, in a "
            f"context of {student.context_length}"
        )
    for note in describe_texts(prompts, student.renderer):
        log.info(note)
    check_answers(recipe.rollout.source, prompts, student.renderer, recipe.longest_answer)
    limit = recipe.rollout.max_new_tokens
    note = describe_long_answers(recipe.task, prompts, student.renderer.encode, limit)
    if note is not None:
        log.info(note)
    return prompts, too_long


def split_by_length(
    prompts: Sequence[Prompt], student: Student | Model, recipe: Recipe
) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts that leave room for a completion, and the prompts that are too long."""
    limit = min(recipe.prompt_tokens, student.context_length - recipe.longest_answer)
    fit, too_long = [], []
    for prompt in prompts:
        (fit if len(student.renderer.render(prompt.messages)) <= limit else too_long).append(prompt)
    return fit, too_long


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The parts of a run that are there before any model is loaded.

    `identities` are read on request: a dry run needs no digests, and digesting prompts takes a
    while.
    """

    recipe: Recipe
    task: Task
    packages: list[str]
    backend_context: BackendContext
    ledger: Ledger
    exit_stack: ExitStack
    scores: Path | None = None
    identities: list[Callable[[], Mapping[str, str]]] = field(default_factory=list)


def _prepare_inputs(
    recipe: Recipe,
    models: Path,
    rejected: Path | None = None,
    scores: Path | None = None,
    exit_stack: ExitStack | None = None,
    *,
    keeps_records: bool = False,
) -> _Inputs:
    """Build the task and the context of the backend; CapabilityError if task and recipe differ."""
    if recipe.train.threads is not None:
        torch.set_num_threads(recipe.train.threads)
    packages: list[str] = []
    task = build_task(recipe, rejected, packages)
    problems = list_task_problems(recipe.rollout.source, recipe.objective, task)
    if recipe.evaluation.search is not None and task.converses:
        problems.append(
            "evaluation.search: it searches single answers, and this task answers every turn; "
            "leave evaluation.search out"
        )
    if problems:
        raise CapabilityError(problems)
    ledger, stack = Ledger(), exit_stack or ExitStack()
    context = BackendContext(
        seed=seed_of(recipe.seed, "student"),
        models_dir=models,
        task=lambda: task,
        local=lambda: open_local(context),
        models=tuple(recipe.frozen_models.values()),
        scalars=tuple(
            scorer.scalar_model or recipe.student
            for scorer in recipe.scorers.values()
            if scorer.loads_scalar
        ),
        at_end=stack,
        meter=ledger.meter("student"),
        engine=choose_engine(recipe),
        speculation=recipe.rollout.draft,
        pictures=have_pictures(chain(task.train_prompts(), task.heldout_prompts())),
        keeps_records=keeps_records,
    )
    return _Inputs(recipe, task, packages, context, ledger, stack, scores)


class _Assembly(TeacherServices):
    """The components of a run while they are assembled."""

    def __init__(self, inputs: _Inputs, backend: Backend, *, on_paper: bool = False) -> None:
        self.inputs = inputs
        self.recipe, self.task, self.ledger = inputs.recipe, inputs.task, inputs.ledger
        self.identities = inputs.identities
        self.backend = backend
        self.on_paper = on_paper
        self.after_training: list[Callable[[], None]] = []
        self.scorers: list[ScorerInfo] = []
        student = backend.load_student(resolve_model(inputs.recipe.student, inputs.recipe))
        self.student = replace(student, renderer=add_tools(student.renderer, inputs.task))

    def build(self) -> RunComponents:
        """Load the models and read the prompts.

        Raises CapabilityError or DataError if they do not fit together.
        """
        recipe, task, ledger, student = self.recipe, self.task, self.ledger, self.student
        engine = self.inputs.backend_context.engine
        is_unused = engine and not student.decoding.startswith(engine.config.type)
        if engine and is_unused and not self.on_paper and not engine.config.may_decline:
            raise CapabilityError(
                f"rollout.engine: backend {recipe.backend.type!r} samples by itself and would "
                "ignore the engine; leave engine out"
            )
        # Some backends can only tell once they are open, by asking a service.
        if problem := student.trainer.explain_unsupported(recipe.objective):
            raise CapabilityError(problem)
        is_local = recipe.backend.checkpoints_here
        self.identities.append(
            lambda: (
                digest_student(student, is_local=is_local)
                | name_dtype("student", recipe.student, student)
            )
        )
        meter = ledger.meter("student")
        if student.dims is not None:
            ledger.dims["student"] = student.dims
        teacher = self.build_role("teacher", recipe.teacher)
        config = recipe.reference
        reference = None if config is None else self.build_role("reference", config)
        _check_capabilities(recipe, teacher, reference)
        models = {"teacher": teacher} | ({} if reference is None else {"reference": reference})
        prompts, too_long = split_training_prompts(task, student, recipe)
        archive, tape = load_archive(recipe, prompts, student.renderer)
        curriculum, earlier_run = load_curriculum(recipe, prompts)
        schedule_state = ScheduleState(recipe.schedules, recipe.train.steps)
        evaluation = build_evaluation_settings(recipe, task, student)
        heldout = evaluation.prompts if evaluation else ()
        self.identities.append(
            lambda: {
                "prompts": digest_prompts(prompts),
                "heldout": digest_prompts(heldout),
                **digest_tools(student.renderer.tools),
                **tape,
                **earlier_run,
            }
        )
        settings = build_step_settings(recipe, schedule_state, student.renderer.stop_ids)
        parts = StepComponents(
            student=MeteredTrainer(student.trainer, student.dims, student.trainable_dims, meter),
            sampler=wrap_client(self.backend.build_sampler(student), meter),
            teacher=teacher,
            task=task,
            renderer=student.renderer,
            prompts=prompts,
            reference=reference,
            scorers=self.build_scorers(),
            notes=build_notes(recipe, student.renderer, task, models, self.build_role),
            archive=archive,
            segments=open_segments(recipe, task),
            curriculum=curriculum,
            ledger=ledger,
        )
        return RunComponents(
            parts=parts,
            settings=settings,
            evaluation=evaluation,
            backend=self.backend,
            student=student,
            schedule_state=schedule_state,
            identify=lambda: {
                name: digest for read in self.identities for name, digest in read().items()
            },
            skipped_prompts=too_long,
            packages=self.inputs.packages,
            scorers=self.scorers,
            after_training=self.after_training,
            exit_stack=self.inputs.exit_stack,
        )

    def build_scorers(self) -> dict[str, Scorer]:
        """Build the recipe's scorers by name."""
        builder = ScorerBuilder(
            recipe=self.recipe,
            task=self.task,
            backend=self.backend,
            backend_context=self.inputs.backend_context,
            student=self.student,
            ledger=self.ledger,
            build_teacher=self.build_role,
            identities=self.identities,
            scores_dir=self.inputs.scores,
            is_dry_run=self.on_paper,
        )
        return builder.build_all()

    def build_role(self, role: str, config: Any) -> Teacher:
        """Build the recipe's teacher or reference, and the teachers inside it."""
        if role == "teacher" and config.type == "self" and self.recipe.student.drafter is None:
            log.warning(
                "the teacher is the student with the student's own prompt, so there is little to "
                "learn; set {type: privileged, teacher: {type: self}, ...} to let it see more"
            )
        context = TeacherContext(
            renderer=self.student.renderer,
            services=self,
            path=role,
            base_dir=Path(self.recipe.base_dir),
            scores_dir=self.inputs.scores,
            after_training=self.after_training,
            at_end=self.inputs.exit_stack,
            task=self.task,
            notes=tuple(self.recipe.notes),
            is_dry_run=self.on_paper,
        )
        try:
            return context.build(config)
        except VocabularyError as error:
            raise VocabularyError(
                f"{error}; or learn from its text: practicum answers RECIPE --out answers.jsonl, "
                "then run with teacher=none rollout.source=dataset 'objective={signal: text, "
                "divergence: ce}' 'task={type: jsonl, path: answers.jsonl}'"
            ) from error

    def build_teacher(self, context: TeacherContext, config: Any) -> Teacher:
        """Build a teacher; a teacher without members gets a separate line in the ledger."""
        if not config.members():
            self.ledger.meter(context.path)
        return super().build_teacher(context, config)

    def find_meter(self, path: str) -> Meter:
        """Return the meter of a teacher."""
        return self.ledger.meter(path)

    def count_client(self, client: SamplingClient, path: str) -> SamplingClient:
        """Wrap a client in one that counts its tokens and FLOPs."""
        return wrap_client(client, self.ledger.meter(path))

    def register_file(self, file: Path, path: str) -> None:
        """Compare the file's digest when the run is resumed."""
        self.identities.append(lambda: {f"{path}/{file.name}": digest_file(file)})

    def load_self(self, rule: WeightUpdateRule, path: str) -> SelfTeacher:
        """Return the student's weights as a scorer."""
        # A self-teacher has the student's dimensions, but its FLOPs are counted under its own path.
        if "student" in self.ledger.dims:
            self.ledger.dims[path] = self.ledger.dims["student"]
        updates = self.recipe.train.updates_per_step * self.recipe.train.epochs
        return self.backend.build_self_teacher(self.student, replace(rule, updates=updates), path)

    def load_model(self, config: ScorerConfig, path: str) -> Model:
        """Load a scoring model; raises a PracticumError if it does not fit the student."""
        model = self.backend.load_scorer(resolve_model(config, self.recipe), path)
        model = replace(model, renderer=add_tools(model.renderer, self.task))
        is_reference = path.startswith("reference")
        if model.no_sampling_reason and self._needs_samples(is_reference):
            raise ModelError(
                f"{model.no_sampling_reason}; as a teacher or reference it can only score: set evaluation.teacher: "
                "false and rollout.source: student"
            )
        self.identities.append(
            lambda: (
                add_prefix(path, digest_loaded(model))
                | name_decoding(path, model)
                | name_dtype(path, config, model)
            )
        )
        if model.dims is not None:
            self.ledger.dims[path] = model.dims
        settings = config.model_copy(update={"dtype": model.dtype or "float32"})
        self.scorers.append(ScorerInfo(path, model.renderer, model.dims, settings, model.client))
        # Render once, so that a missing chat template is an error before the first step.
        role = self.recipe.reference if is_reference else self.recipe.teacher
        hides_media = role is not None and any(config.hides_media for _, config in walk(role))
        prompt = show_pictures(self.task.train_prompts()[0], "none" if hides_media else None)
        model.renderer.render(prompt.messages)
        return model

    def load_renderer(self, config: ModelConfig, path: str) -> Renderer:
        """Load the tokenizer of a model that is at a service."""
        renderer = add_tools(load_renderer(resolve_run(config)), self.task)
        self.identities.append(lambda: digest_tokenizer(path, renderer))
        return renderer

    def load_ending(self, config: ModelConfig, path: str) -> ModelEnding:
        """Read the last norm and the head of a model that is at a server."""
        ending = load_ending(config)
        self.identities.append(lambda: add_prefix(path, digest_model(ending.source)))
        return ending

    def _needs_samples(self, is_reference: bool) -> bool:
        """Return True if teacher or reference must sample, for training or for its evaluation."""
        if is_reference:
            return "reference" in self.recipe.rollout.source.other_writers
        evaluation, source = self.recipe.evaluation, self.recipe.rollout.source
        return "teacher" in source.other_writers or (evaluation.teacher and evaluation.prompts > 0)
