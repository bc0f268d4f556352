"""From a recipe to the parts of a step: models loaded, vocabularies compared, prompts read, the teacher built."""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from practicum.backends.local import (
    LoadedModel,
    LocalLearner,
    conversion_pending,
    load,
    load_renderer,
    make_scratch_model,
    scorer,
    shape_of,
)
from practicum.costs import Ledger, Shape
from practicum.errors import CapabilityError, DataError, ModelError, RecipeError
from practicum.evaluation import EvaluationSettings
from practicum.loop import Parts, StepPlan, StepSettings
from practicum.metering import MeteredTrainer
from practicum.model_config import ModelConfig, ScorerConfig, Scratch
from practicum.model_files import file_digest, model_digests
from practicum.plugins import module_of
from practicum.ports import (
    BackendContext,
    Environment,
    HoldsTeachers,
    Learner,
    Lettered,
    SamplingClient,
    Task,
    Teacher,
    TeacherConfig,
    TeacherContext,
    TrainerLimits,
    TrainingClient,
    walk,
)
from practicum.randomness import seed_of
from practicum.recipe import Recipe, capability_problems, clip_warning, staleness_warning
from practicum.rollouts import Archive, Cache, asks_teacher, conversation_problems, read_tape, replays, source_problems
from practicum.schedule import Courses
from practicum.tasks import TaskContext
from practicum.text import Renderer, check_same_vocabulary, stop_mismatch
from practicum.types import Prompt, Rollout


@dataclass(frozen=True, slots=True)
class Scorer:
    """A model that scores: its name, as `scorer_names` has it, how it reads prompts, and its sizes."""

    name: str
    renderer: Renderer
    shape: Shape


@dataclass(frozen=True, slots=True)
class Assembled:
    """Everything a run needs, built from its recipe."""

    parts: Parts
    settings: StepSettings
    evaluation: EvaluationSettings | None
    learner: Learner
    courses: Courses
    identity: dict[str, str]
    """A digest of each thing besides the recipe that the run depends on, by name: `student/config.json`, `heldout`."""
    too_long: list[Prompt]
    packages: list[str]
    """The packages besides our own requirements whose versions decide prompts and rewards."""
    scorers: list[Scorer]
    """The models that score besides the student's own weights: `teacher`, `teacher/math`, `reference`."""
    remarks: list[Callable[[], str]]
    """What is to be said when the training is over."""
    at_end: list[Callable[[], None]]
    """What is to be done when nobody asks any more."""

    def close(self) -> None:
        """End the sessions at services."""
        for end in self.at_end:
            end()

    @property
    def trainer(self) -> TrainingClient:
        """Who trains the student, uncounted."""
        return self.learner.trainer

    @property
    def student(self) -> LoadedModel:
        """The student's own modules; RecipeError where they are not in this process."""
        if not isinstance(self.learner, LocalLearner):
            raise RecipeError("this looks into the student's weights, which are at a service; leave backend out for it")
        return self.learner.loaded

    def teachers(self) -> dict[str, Teacher]:
        """The teacher, and the reference where there is one."""
        reference = self.parts.reference
        return {"teacher": self.parts.teacher, **({} if reference is None else {"reference": reference})}


def assemble_run(
    recipe: Recipe, models: Path, rejected: Path | None, say: Callable[[str], None], scores: Path | None = None
) -> Assembled:
    """Build all parts. `models` holds from-scratch models; `rejected` takes the rows that could not be used.

    `scores` is where `cached` teachers keep their answers unless they name a folder; None: they keep none.
    """
    if recipe.train.threads is not None:
        torch.set_num_threads(recipe.train.threads)
    for warning in (staleness_warning(recipe.objective, recipe.rollout), clip_warning(recipe.objective)):
        if warning is not None:
            say(warning)
    packages: list[str] = []
    task = build_task(recipe, rejected, say, packages)
    if isinstance(task, Environment) and (problems := conversation_problems(recipe.rollout.source)):
        raise CapabilityError(problems)
    say(f"student: {_described(recipe.student)}")
    ledger = Ledger()
    at_end: list[Callable[[], None]] = []
    student = build_learner(recipe, models, task, say, ledger, at_end)
    metered = MeteredTrainer(student.trainer, student.shape, student.learning, ledger.meter("student"))
    builder = _TeacherBuilder(recipe, student, models, task, say, scores, ledger, at_end)
    teacher = builder.build("teacher", recipe.teacher)
    reference = None if recipe.reference is None else builder.build("reference", recipe.reference)
    _check_capabilities(recipe, teacher, reference)
    prompts, too_long = fitting(task.train_prompts(), student, recipe)
    if not prompts:
        raise DataError(
            f"none of the {len(too_long)} training prompts fits: prompt_tokens is {recipe.prompt_tokens} and rollout."
            f"max_new_tokens {recipe.longest_answer}, in a context of {student.context_length}"
        )
    archive, tape = archive_of(recipe, prompts, student.renderer)
    courses = Courses(recipe.schedules, recipe.train.steps)
    evaluation = evaluation_settings(recipe, task, student, say)
    settings = StepSettings(
        seed=recipe.seed,
        prompts_per_step=recipe.train.prompts_per_step,
        plan=lambda step: plan_of_step(recipe.at(courses.at(step)), student.renderer.stop_ids, step),
        updates=recipe.train.updates_per_step,
    )
    return Assembled(
        parts=Parts(metered, teacher, task, student.renderer, prompts, reference, archive, ledger),
        settings=settings,
        evaluation=evaluation,
        learner=student,
        courses=courses,
        identity={
            **_named("student", _student_digests(student)),
            **builder.identity,
            "prompts": _digest([_content(prompt) for prompt in prompts]),
            "heldout": _digest([_content(prompt) for prompt in (evaluation.prompts if evaluation else ())]),
            **tape,
        },
        too_long=too_long,
        packages=packages,
        scorers=builder.scorers,
        remarks=builder.remarks,
        at_end=at_end,
    )


def build_learner(
    recipe: Recipe,
    models: Path,
    task: Task,
    say: Callable[[str], None],
    ledger: Ledger,
    at_end: list[Callable[[], None]],
) -> Learner:
    """The student, from the backend of the recipe."""
    train = recipe.train
    context = BackendContext(
        student=recipe.student,
        seed=seed_of(recipe.seed, "student"),
        limits=TrainerLimits(train.micro_batch_tokens, train.chunk_tokens, train.sampling_batch, train.graph_mib),
        folder=scratch_folder(recipe, recipe.student, "student", models, task),
        load_renderer=load_renderer,
        say=say,
        at_end=at_end,
        meter=ledger.meter("student"),
    )
    backend = module_of("backends", "local" if recipe.backend is None else recipe.backend.type)
    learner = backend.build(recipe.backend or backend.Config(), context)
    if learner.shape is not None:
        ledger.shapes["student"] = learner.shape
    return learner


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


def plan_of_step(recipe: Recipe, stop_ids: frozenset[int], step: int) -> StepPlan:
    """What a recipe, its schedules resolved, says of a step."""
    return StepPlan(
        objective=recipe.objective,
        n=recipe.rollout.n,
        sampling=recipe.rollout.sampling(stop_ids),
        source=recipe.rollout.source,
        adam=recipe.optimizer.adam(step, recipe.train.steps),
    )


def build_task(
    recipe: Recipe, rejected: Path | None, say: Callable[[str], None], packages: list[str] | None = None
) -> Task:
    """Build the task of a recipe, whose relative paths start at the recipe's folder; `packages` takes those that decide rewards."""
    used = [] if packages is None else packages
    context = TaskContext(recipe.seed, Path(recipe.base_dir), rejected, say, used)
    return module_of("tasks", recipe.task.type).build(recipe.task, context)


def scratch_folder(recipe: Recipe, config: ModelConfig, role: str, models: Path, task: Task) -> Path | None:
    """Where a from-scratch model lives in the run folder; made there the first time."""
    if not isinstance(config.model, Scratch):
        return None
    folder = models / role
    if not (folder / "config.json").is_file():
        temporary = folder.with_name(f"{role}.tmp")
        make_scratch_model(temporary, config.model, alphabet_of(task), task.train_prompts())
        temporary.rename(folder)
    return folder


def alphabet_of(task: Task) -> str:
    """Every character of the task, in order."""
    prompts = [*task.train_prompts(), *task.heldout_prompts()]
    more = task.letters if isinstance(task, Lettered) else ""
    return "".join(sorted({letter for prompt in prompts for letter in _letters(prompt)} | set(more)))


def evaluation_settings(
    recipe: Recipe, task: Task, student: LoadedModel | Learner, say: Callable[[str], None]
) -> EvaluationSettings | None:
    """The held-out prompts and how to sample on them, or None where there is nothing to evaluate."""
    wanted = recipe.evaluation
    prompts, too_long = fitting(task.heldout_prompts(), student, recipe)
    if too_long:
        say(f"{len(too_long)} of {len(too_long) + len(prompts)} held-out prompts left out: too long")
    if wanted.prompts == 0 or not prompts:
        return None
    new_tokens = wanted.max_new_tokens or recipe.rollout.max_new_tokens
    sampling = recipe.rollout.model_copy(
        update={"max_new_tokens": new_tokens, "temperature": wanted.temperature, "top_p": 1.0, "top_k": 0}
    ).sampling(student.renderer.stop_ids)
    return EvaluationSettings(prompts[: wanted.prompts], wanted.samples, sampling, recipe.seed)


def fitting(
    prompts: Sequence[Prompt], student: LoadedModel | Learner, recipe: Recipe
) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts that leave room for an answer, and those that are too long."""
    room = student.context_length - recipe.longest_answer
    limit = min(recipe.prompt_tokens, room)
    fit: list[Prompt] = []
    too_long: list[Prompt] = []
    for prompt in prompts:
        (fit if len(student.renderer.render(prompt.messages)) <= limit else too_long).append(prompt)
    return fit, too_long


def _student_digests(student: Learner) -> dict[str, str]:
    """Return the digests of the student's files; of one at a service its name there and the files of its tokenizer."""
    if isinstance(student, LocalLearner):
        return model_digests(student.source)
    return {"name": student.source, **_named("tokenizer", model_digests(_origin(student.renderer), weights=False))}


def _origin(renderer: Renderer) -> str:
    """Return the folder or hub name that a tokenizer was read from."""
    return str(renderer.tokenizer.name_or_path)


def _named(part: str, digests: Mapping[str, str]) -> dict[str, str]:
    """Return the digests under the name of the part of the run that they belong to."""
    return {f"{part}/{name}": digest for name, digest in digests.items()}


def archive_of(recipe: Recipe, prompts: Sequence[Prompt], renderer: Renderer) -> tuple[Archive, dict[str, str]]:
    """What was written before the run, and a digest of the tape where it is read from one."""
    source = recipe.rollout.source
    newest: deque[Rollout] = deque(maxlen=recipe.rollout.replay_size if replays(source) else 0)
    if not isinstance(source, Cache):
        return Archive(newest), {}
    path = Path(recipe.base_dir) / source.path
    tape = read_tape(path, prompts, renderer, recipe.longest_answer)
    return Archive(newest, tape), {"tape": file_digest(path)}


class _TeacherBuilder:
    """Builds teachers and keeps the digests of the files that their answers depend on."""

    def __init__(  # noqa: PLR0913  (all that a teacher may be made of)
        self,
        recipe: Recipe,
        student: Learner,
        models: Path,
        task: Task,
        say: Callable[[str], None],
        scores: Path | None,
        ledger: Ledger,
        at_end: list[Callable[[], None]],
    ) -> None:
        self.identity: dict[str, str] = {}
        self.scorers: list[Scorer] = []
        self.remarks: list[Callable[[], str]] = []
        self._recipe = recipe
        self._student = student
        self._models = models
        self._task = task
        self._say = say
        self._scores = scores
        self._ledger = ledger
        self._at_end = at_end

    def build(self, role: str, config: Any) -> Teacher:
        """The recipe's teacher or reference."""
        if role == "teacher" and config.type == "self":
            self._say(
                "warning: the teacher is the student with the student's own prompt, so there is little to learn; "
                "write {type: privileged, teacher: {type: self}, ...} to let it see more"
            )
        names = scorer_names(role, config)

        def load_model(config: ScorerConfig) -> tuple[SamplingClient, Renderer]:
            return self._load(config, names.get(id(config), role))

        def build(context: TeacherContext, config: Any) -> Teacher:
            name = names.get(id(config))
            if name is not None:
                context = replace(
                    context,
                    meter=self._ledger.meter(name),
                    load_renderer=lambda config: self._load_renderer(config, name),
                    reads=lambda path: self.identity.update({f"{name}/{path.name}": file_digest(path)}),
                )
                if config.type == "self" and "student" in self._ledger.shapes:
                    self._ledger.shapes[name] = self._ledger.shapes["student"]
            return module_of("teachers", config.type).build(config, context)

        context = TeacherContext(
            student=self._student.trainer,
            renderer=self._student.renderer,
            load_model=load_model,
            build=build,
            base_dir=Path(self._recipe.base_dir),
            scores=self._scores,
            say=self._say,
            remarks=self.remarks,
            at_end=self._at_end,
            task=self._task,
        )
        return build(context, config)

    def _load(self, config: ScorerConfig, name: str) -> tuple[SamplingClient, Renderer]:
        """Another model as a client; made from scratch, its folder in the run has its name."""
        self._say(f"{name}: {_described(config)}")
        folder = scratch_folder(self._recipe, config, name.replace("/", "-"), self._models, self._task)
        loaded = load(config, folder)
        if loaded.language_model.unsampled and not name.startswith("reference") and self._teacher_writes():
            raise ModelError(
                f"{loaded.language_model.unsampled}; as a teacher it can score alone: write evaluation.teacher: false and "
                "rollout.source: student"
            )
        self.identity |= _named(name, model_digests(loaded.source))
        shape = self._ledger.shapes[name] = shape_of(loaded.language_model)
        self.scorers.append(Scorer(name, loaded.renderer, shape))
        loaded.renderer.render(self._task.train_prompts()[0].messages)  # names a missing chat template before any step
        check_same_vocabulary(self._student.renderer.tokenizer, loaded.renderer.tokenizer)
        mismatch = stop_mismatch(self._student.renderer, loaded.renderer)
        if mismatch:
            self._say(f"warning: {mismatch}")
        train = self._recipe.train
        return scorer(loaded, config, train.sampling_batch, train.chunk_tokens), loaded.renderer

    def _teacher_writes(self) -> bool:
        """Whether the recipe lets the teacher write tokens, to learn from or to be evaluated."""
        evaluation = self._recipe.evaluation
        return asks_teacher(self._recipe.rollout.source) or (evaluation.teacher and evaluation.prompts > 0)

    def _load_renderer(self, config: ModelConfig, name: str) -> Renderer:
        """Load the tokenizer of a model that is elsewhere."""
        renderer = load_renderer(config)
        self.identity |= _named(f"{name}/tokenizer", model_digests(_origin(renderer), weights=False))
        return renderer


def scorer_names(role: str, config: TeacherConfig) -> dict[int, str]:
    """The names of the models that a teacher asks, by the identity of their settings: `teacher`, `teacher/math`, ..."""
    return {
        id(inside): "/".join([role, *(key.partition(".")[2] for key in keys if "." in key)])
        for keys, inside in walk(config)
        if not isinstance(inside, HoldsTeachers)
    }


def _described(config: ModelConfig) -> str:
    if isinstance(config.model, Scratch):
        return "made from scratch"
    converting = " (converting it to safetensors, once: about 20 s)" if conversion_pending(config.model) else ""
    return f"{config.model}{converting}"


def _letters(prompt: Prompt) -> str:
    return "".join([*(message.content for message in prompt.messages), prompt.answer or "", prompt.response or ""])


def _content(prompt: Prompt) -> list[Any]:
    """Return all of a prompt as JSON data; a label may decide which teacher is asked."""
    turns = [[message.role, message.content] for message in prompt.messages]
    labels = [prompt.domain, prompt.teacher]
    return [prompt.id, turns, prompt.answer, prompt.response, *labels, dict(prompt.privileged)]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
