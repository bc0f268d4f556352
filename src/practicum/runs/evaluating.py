"""Evaluate a run's student or a model: on the held-out prompts of a recipe, or on rows of a file."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from practicum.core.options import spell_options
from practicum.core.waits import show_wait
from practicum.errors import DataError, RecipeError
from practicum.foreign import name_object
from practicum.models.config import DrafterConfig, ModelConfig, ScorerConfig, StudentConfig
from practicum.ports import (
    Backend,
    Model,
    SamplingClient,
    Student,
    Task,
    Teacher,
    Toolbox,
    WeightUpdateRule,
)
from practicum.recipe import (
    Recipe,
    load_recipe,
    override_all,
    parse_recipe,
    resolve_recipe,
    validate_fields,
)
from practicum.rollouts import RolloutWriters, add_rewards
from practicum.rows import PromptSet, keep_answer
from practicum.rows.pictures import have_pictures
from practicum.run_dir import RunDir
from practicum.runs.assembly import build_evaluation_settings
from practicum.runs.benchmark_rows import (
    Grading,
    check_gradings,
    fill_benchmark,
    find_rows_config,
    open_gradings,
    read_benchmark,
)
from practicum.runs.opening import (
    add_tools,
    build_task,
    load_model,
    load_student,
    load_trained_student,
    open_run,
    refuse_missing_run,
    resolve_stage,
)
from practicum.runs.progress import show_progress
from practicum.runs.state import restore_components
from practicum.statistics import estimate_pass_rates, group_pairs, mean_score
from practicum.tasks.jsonl import Config
from practicum.text import Renderer
from practicum.training.evaluation import (
    EvaluationSettings,
    answer_heldout,
    evaluate_search,
    examine_answers,
)
from practicum.types import Prompt, Rollout

log = logging.getLogger(__name__)

Verifier = str | Callable[..., Any]
COMPARED_WITH_TEACHER = frozenset(
    {"student_entropy", "student_entropy_estimate", "reverse_kl", "reverse_kl_estimate"}
)
"""The numbers that only the comparison with a teacher gives, exact or estimated."""


@dataclass(frozen=True, slots=True)
class ToolPrompts(Task):
    """The tools of a run's task with other prompts; their answers get no reward."""

    tools: Toolbox
    prompts: Sequence[Prompt] = ()

    @property
    def toolbox(self) -> Toolbox:
        """The tools."""
        return self.tools

    def train_prompts(self) -> Sequence[Prompt]:
        """Return none."""
        return ()

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Return the prompts."""
        return self.prompts

    def reward(self, rollout: Rollout) -> float | None:
        """Return None: the task has no data about the answer."""
        return None


@dataclass(frozen=True, slots=True)
class _Subject:
    """A student or a model to evaluate, and the prompts that it answers."""

    client: SamplingClient
    renderer: Renderer
    task: Task
    teacher: Teacher | None
    settings: EvaluationSettings
    writers: RolloutWriters | None = None
    """The writers of the recipe's search; None for rows and for a model, which have no scorers."""
    target: SamplingClient | None = None
    """The target of a drafter, which decodes without it."""


def evaluate(  # noqa: PLR0913  (its options, one by one)
    target: str | Path,
    overrides: Sequence[str] = (),
    *,
    recipe: str | Path | None = None,
    rows: str | Path | None = None,
    verifier: Verifier | Sequence[Verifier] = (),
    samples: int | None = None,
    temperature: float | None = None,
    drafter: str | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Evaluate a run's student, or a model on a recipe's held-out prompts or on `rows`.

    `rows` is a file in any form that the task `jsonl` reads, and each `verifier` of a list gives its
    own `accuracy[NAME]`. Without `rows`, the prompts are the recipe's held-out prompts, and a run is also
    compared with its teacher. With `samples=8, temperature=1.0` there are also `avg@8` and
    `pass@1` to `pass@8`. A model without `rows` needs the `recipe` with the task. With a `drafter`, a
    model decodes with the drafter of this folder; as for a run that trained a drafter, there are
    then the acceptance, the tokens per call of the target, and the seconds with and without it.

        practicum.evaluate("runs/mine", rows="test.jsonl", verifier=["math", "my_metrics:close"])
    """
    chosen = {"evaluation.samples": samples, "evaluation.temperature": temperature}
    overrides = [*overrides, *(f"{key}={n}" for key, n in chosen.items() if n is not None)]
    with show_progress(progress=progress):
        name = resolve_stage(str(target))
        refuse_missing_run(name)
        run_dir, loaded = _read_target(name, recipe, rows, overrides)
        _check_samples(loaded, samples)
        loaded = _add_drafter(loaded, name, drafter, is_run=run_dir is not None)
        verifiers = [verifier] if isinstance(verifier, str) or callable(verifier) else verifier
        configs = _choose_verifiers(loaded, rows, verifiers)
        gradings = open_gradings(configs)
        if rows is None:
            subject = _open_run(run_dir, loaded) if run_dir else _open_model(name, loaded)
            check_gradings(gradings, subject.settings.prompts, str(target))
            return _measure(subject, None, gradings, _read_right(loaded))
        path = Path(rows).expanduser()
        if not path.is_file():
            raise DataError(f"rows: there is no file {path.absolute()}; check the path")
        prompts = read_benchmark(configs, path)
        check_gradings(gradings, prompts, str(rows))
        loaded = _take_all(loaded, len(prompts), overrides)
        subject = _open_with_rows(run_dir, name, loaded, prompts, str(rows))
        if verifiers:
            return _measure(subject, None, gradings, 1.0)
        return _measure(subject, gradings[0], (), gradings[0].right)


def _read_target(
    name: str, recipe: str | Path | None, rows: str | Path | None, overrides: Sequence[str]
) -> tuple[RunDir | None, Recipe]:
    """Return the run and its recipe, or no run and the recipe to evaluate a model by."""
    if RunDir(Path(name)).recipe_json.is_file():
        run_dir, saved = open_run(Path(name))
        recipe_data = resolve_recipe(saved)
    elif recipe is not None:
        return None, load_recipe(recipe, overrides)
    elif rows is None:
        raise RecipeError(
            f"{name} is not a run folder; to evaluate a model, set the prompts: "
            f"{spell_options(rows='FILE')} or {spell_options(recipe='RECIPE')}"
        )
    else:
        # Nothing is trained, so the teacher only has to be valid.
        run_dir, teacher = None, {"type": "self", "weights": "live"}
        task = {"type": "jsonl", "path": str(rows), "heldout": str(rows)}
        recipe_data = {"name": "eval", "student": {"model": name}, "teacher": teacher, "task": task}
    for note in override_all(recipe_data, overrides):
        log.info(note)
    return run_dir, parse_recipe(recipe_data, "the run's recipe" if run_dir else "eval")


def _add_drafter(recipe: Recipe, name: str, drafter: str | None, *, is_run: bool) -> Recipe:
    """Return the recipe with the drafter of a model, or without one; RecipeError for a run."""
    if drafter is None and is_run:
        return recipe
    if is_run:
        raise RecipeError(
            f"{spell_options(drafter=drafter)}: {name} is a run; give the model that it drafts for, "
            "or leave the option out to evaluate a run that trained a drafter"
        )
    # A model without a run is asked as the recipe asks its student, with a drafter or without.
    fields = {**recipe.student.model_dump(include=set(ModelConfig.model_fields)), "model": name}
    if drafter is not None:
        settings = recipe.student.drafter or DrafterConfig()
        decoding = settings.model_dump(include={"type", "depth", "verify", "width"})
        fields["drafter"] = {**decoding, "start": drafter}
    return recipe.model_copy(update={"student": StudentConfig.model_validate(fields)})


def _check_samples(recipe: Recipe, samples: int | None) -> None:
    """Raise RecipeError if several answers per prompt are requested and all would be equal."""
    if samples is not None and samples > 1 and recipe.evaluation.temperature == 0:
        raise RecipeError(
            f"{spell_options(samples=samples)}: at temperature 0 all answers to a prompt are equal; "
            f"add {spell_options(temperature=1.0)}"
        )


def _choose_verifiers(
    recipe: Recipe, rows: str | Path | None, verifiers: Sequence[Verifier]
) -> list[Config]:
    """Return the settings of each verifier; without any, rows have the verifier of the recipe."""
    task_rows = find_rows_config(recipe.task)
    if not verifiers and rows is not None:
        verifiers = ["exact" if task_rows is None else task_rows.verifier]
    names = [name_object(verifier) for verifier in verifiers]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise RecipeError(f"the verifier {repeated[0]!r} is named twice; name it once")
    path = str(rows or ".")
    return [
        validate_fields(Config, fill_benchmark(task_rows, path, verifier), "eval")
        for verifier in verifiers
    ]


def _read_right(recipe: Recipe) -> float:
    """Return the reward of a right answer to a prompt of the recipe's own task."""
    rows = find_rows_config(recipe.task)
    return 1.0 if rows is None else rows.reward_range[1]


def _take_all(recipe: Recipe, count: int, overrides: Sequence[str]) -> Recipe:
    """Return the recipe that evaluates on all rows of a file, unless an override sets their
    number."""
    if any(text.startswith(("evaluation.prompts=", "evaluation=")) for text in overrides):
        return recipe
    evaluation = recipe.evaluation.model_copy(update={"prompts": count})
    return recipe.model_copy(update={"evaluation": evaluation})


def _open_run(run_dir: RunDir, recipe: Recipe) -> _Subject:
    """Open the student and the teacher of a run, with its held-out prompts."""
    built = restore_components(run_dir, recipe)
    if built.evaluation is None:
        raise DataError(
            f"{run_dir.path}: the task has no held-out prompts to evaluate on; give rows with "
            f"{spell_options(rows='FILE')}"
        )
    parts = built.parts
    target = _find_target(built.backend, built.student, recipe)
    return _Subject(
        parts.sampler,
        parts.renderer,
        parts.task,
        parts.teacher,
        built.evaluation,
        parts.build_writers(parts.sampler),
        target,
    )


def _open_model(name: str, recipe: Recipe) -> _Subject:
    """Open a model with the held-out prompts of a recipe."""
    task = build_task(recipe)
    return _open_named(name, task, recipe, f"{name}: the recipe's task")


def _open_with_rows(
    run_dir: RunDir | None, name: str, recipe: Recipe, prompts: Sequence[Prompt], rows: str
) -> _Subject:
    """Open a run's student, or a model, to answer rows; the teacher is not loaded."""
    # A task with tools is built for them; others may have lost their files by now.
    tools = build_task(recipe).toolbox if recipe.task.offers_tools else None
    task: Task = PromptSet((), prompts, grade=lambda reply, prompt: None)
    if tools is not None:
        task = ToolPrompts(tools, prompts)
    if run_dir is None:
        return _open_named(name, task, recipe, rows)
    pictures = have_pictures(prompts)
    backend, student = load_trained_student(run_dir, recipe, pictures=pictures)
    subject = _prepare(student, backend.build_sampler(student), task, recipe, rows)
    return replace(subject, target=_find_target(backend, student, recipe))


def _open_named(name: str, task: Task, recipe: Recipe, source: str) -> _Subject:
    """Return a model without a run, with its drafter if the recipe has one."""
    if recipe.student.drafter is None:
        fields = recipe.student.model_dump(include=set(ModelConfig.model_fields))
        config = ScorerConfig.model_validate({**fields, "model": name})
        model = load_model(config, pictures=have_pictures(task.heldout_prompts()))
        return _prepare(model, model.client, task, recipe, source)
    backend, student = load_student(recipe, Path())
    subject = _prepare(student, backend.build_sampler(student), task, recipe, source)
    return replace(subject, target=_find_target(backend, student, recipe))


def _find_target(backend: Backend, student: Student, recipe: Recipe) -> SamplingClient | None:
    """Return the target of a drafter, to decode without it; None if the student is no drafter."""
    if recipe.student.drafter is None:
        return None
    return backend.build_self_teacher(student, WeightUpdateRule("frozen"), "target")


def _prepare(
    model: Student | Model, client: SamplingClient, task: Task, recipe: Recipe, source: str
) -> _Subject:
    """Return a model without a teacher, ready to answer; DataError if no prompt is left."""
    model = replace(model, renderer=add_tools(model.renderer, task))
    settings = build_evaluation_settings(recipe, task, model)
    if settings is None:
        raise DataError(
            f"{source} has no prompts to evaluate on: none, or none of at most "
            f"{recipe.prompt_tokens} tokens (prompt_tokens), or evaluation.prompts is 0"
        )
    return _Subject(client, model.renderer, task, None, settings)


def _measure(
    subject: _Subject, sole: Grading | None, named: Sequence[Grading], right: float
) -> dict[str, Any]:
    """Sample the answers and return the summary, with numbers of each named verifier.

    The answers get the rewards of the `sole` verifier instead of the task's.
    """
    settings = subject.settings
    with show_wait(f"evaluating {len(settings.prompts)} held-out prompts"):
        seconds: dict[str, float] = {}
        if subject.target is not None:
            start = monotonic()
            answer_heldout(subject.target, subject.renderer, subject.task, settings)
            seconds["drafts/seconds_without"] = monotonic() - start
        start = monotonic()
        rollouts = answer_heldout(
            subject.client,
            subject.renderer,
            subject.task,
            settings,
            rescored=subject.teacher is not None,
        )
        if subject.target is not None:
            seconds["drafts/seconds"] = monotonic() - start
        if sole is not None:
            rollouts = _grade(rollouts, sole)
        evaluation = examine_answers(
            rollouts, subject.client, subject.renderer, subject.task, subject.teacher, settings
        )
        summary = {
            key: number
            for key, number in evaluation.summarize().items()
            if number is not None or key not in COMPARED_WITH_TEACHER
        } | seconds
        if evaluation.accuracy is None and named:
            for key in ("accuracy", "by_domain", "calibration"):
                del summary[key]
        else:
            summary |= _estimate_rates(rollouts, settings, right, "")
        searched = subject.writers and evaluate_search(subject.writers, settings)
        if searched:
            summary["search"] = searched.summarize()
        for grading in named:
            graded = _grade(rollouts, grading)
            suffix = f"[{grading.name}]"
            summary[f"accuracy{suffix}"] = _estimate_mean(graded, settings.seed)
            summary |= _estimate_rates(graded, settings, grading.right, suffix)
        return summary


def _grade(rollouts: Sequence[Rollout], grading: Grading) -> list[Rollout]:
    """Return the answers, the last turn of a conversation, with the rewards of a verifier."""
    answers = [replace(keep_answer(rollout), reward=None) for rollout in rollouts]
    graded = add_rewards(answers, grading.task)
    return [
        replace(rollout, reward=answer.reward)
        for rollout, answer in zip(rollouts, graded, strict=True)
    ]


def _estimate_mean(rollouts: Sequence[Rollout], seed: int) -> dict[str, float] | None:
    """Return the mean reward over prompts with its interval; None without rewards."""
    scores = [sum(rewards) / len(rewards) for rewards in _list_rewards(rollouts)]
    return asdict(mean_score(scores, seed)) if scores else None


def _estimate_rates(
    rollouts: Sequence[Rollout], settings: EvaluationSettings, right: float, suffix: str
) -> dict[str, Any]:
    """Return `avg@K` and `pass@k` of K answers per prompt; nothing for one answer."""
    rewards = _list_rewards(rollouts)
    if settings.samples == 1 or not rewards:
        return {}
    outcomes = [[reward >= right for reward in group] for group in rewards]
    rates = estimate_pass_rates(outcomes, settings.seed)
    return {
        f"avg@{settings.samples}{suffix}": _estimate_mean(rollouts, settings.seed),
        **{f"pass@{k}{suffix}": asdict(rate) for k, rate in rates.items()},
    }


def _list_rewards(rollouts: Sequence[Rollout]) -> list[list[float]]:
    """Return the rewards of each prompt's answers, without answers that have none."""
    pairs = ((r.prompt.id, r.reward) for r in rollouts if r.reward is not None)
    return list(group_pairs(pairs).values())
