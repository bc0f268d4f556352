"""What is done with a student after its run: evaluate it, talk to it, hand it on."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from practicum.cli._remarks import remark
from practicum.core.notes import show_notes
from practicum.core.randomness import seed_of
from practicum.errors import DataError, RecipeError
from practicum.models.config import ModelConfig, ScorerConfig
from practicum.ports import Learner, Model, SamplingClient, TeacherRequest
from practicum.recipe import Recipe, load_recipe, parse_recipe, resolved
from practicum.report import write_report
from practicum.report.pipeline import write_pipeline_report
from practicum.run_dir import RunDir
from practicum.runs import open_run, open_student, restored
from practicum.runs.assembly import build_task, evaluation_settings, load_model
from practicum.text import make_printable
from practicum.training.evaluation import evaluate
from practicum.types import Message, Prompt, Sample, SampleRequest, SamplingParams


def evaluate_target(target: str, recipe: str | None, overrides: Sequence[str]) -> dict[str, Any]:
    """The evaluation of a run's student, or of a model on a recipe's held-out prompts."""
    target = _last_stage(target)
    if _is_run(target):
        return _evaluate_run(Path(target), overrides)
    if recipe is None:
        raise RecipeError(
            f"{target} is not a run folder; to evaluate a model, say on which task: --recipe RECIPE"
        )
    settings = load_recipe(recipe, overrides)
    fields = settings.student.model_dump(include=set(ModelConfig.model_fields))
    model = load_model(ScorerConfig.model_validate({**fields, "model": target}))
    with show_notes(remark):
        task = build_task(settings)
        wanted = evaluation_settings(settings, task, model)
    if wanted is None:
        raise DataError(f"{recipe}: the task has no held-out prompts to evaluate on")
    return evaluate(model.client, model.renderer, task, None, wanted).summary()


def chat_with(
    target: str, temperature: float, max_new_tokens: int, system: str | None, teacher: bool
) -> None:
    """Read questions from standard input and print the answers; each question stands alone."""
    target = _last_stage(target)
    if teacher and not _is_run(target):
        raise RecipeError(
            f"{target} is not a run folder, so it has no teacher; leave --teacher out"
        )
    if system is not None and _is_run(target):
        raise RecipeError("a run's prompts are written as its recipe says; leave --system out")
    built = restored(*open_run(Path(target))) if teacher else None
    if built is None:
        student, client = _open(target, system)
    else:
        student, client = built.learner, built.parts.sampler
    params = SamplingParams(max_new_tokens, temperature, stop_ids=student.renderer.stop_ids)
    for turn in range(sys.maxsize):
        question = _question()
        if not question:
            return
        tokens = student.renderer.render([Message("user", question)])
        room = student.context_length - max_new_tokens
        if len(tokens) > room:
            print(f"(that is {len(tokens)} tokens; at most {room} leave room for an answer)")
            continue
        seed = seed_of(0, "chat", turn)
        sample = client.sample([SampleRequest(tokens, seed)], params)[0]
        print(("student: " if teacher else "") + _format_answer(student, sample), flush=True)
        if built is not None:
            prompt = Prompt(f"chat-{turn}", (Message("user", question),))
            answers = built.parts.teacher.sample([TeacherRequest(prompt, seed)], params)
            print(
                "teacher: "
                + ("(cannot answer)" if answers is None else _format_answer(student, answers[0])),
                flush=True,
            )


def export_run(run_folder: Path, folder: Path) -> Path:
    """The run's student as a model folder, adapters merged; RecipeError where the folder is taken."""
    if folder.exists():
        raise RecipeError(f"{folder} exists already; name a folder that does not")
    backend, student = open_student(_last_stage(str(run_folder)))
    backend.export(student, folder)
    return folder


def rewrite_report(folder: Path) -> Path:
    """The report of a run or of a finished pipeline, written again; RecipeError where there is nothing to write it from."""
    if not (folder / "pipeline.json").is_file():
        return write_report(folder)
    if not (folder / "summary.json").is_file():
        raise RecipeError(
            f"{folder} holds no summary.json, so the pipeline has not finished; go on with --resume"
        )
    return write_pipeline_report(folder)


def _evaluate_run(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    home, recipe = open_run(path)
    built = restored(home, _overridden(recipe, overrides))
    if built.evaluation is None:
        raise DataError(f"{path}: the task has no held-out prompts to evaluate on")
    parts = built.parts
    return evaluate(
        parts.sampler, parts.renderer, parts.task, parts.teacher, built.evaluation
    ).summary()


def _overridden(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    from practicum.recipe import override

    data = resolved(recipe)
    for text in overrides:
        override(data, text)
    return parse_recipe(data, "the run's recipe")


def _open(target: str, system: str | None) -> tuple[Learner | Model, SamplingClient]:
    """Return a run's student, or a model, and a client of it."""
    if _is_run(target):
        backend, student = open_student(Path(target))
        return student, backend.sampler(student)
    model = load_model(ScorerConfig(model=target, system=system))
    return model, model.client


def _last_stage(target: str) -> str:
    """A pipeline's folder stands for its last stage that began; every other target for itself."""
    begun = sorted(path.parent for path in RunDir(Path(target)).stages.glob("*/recipe.json"))
    return str(begun[-1]) if begun else target


def _is_run(target: str) -> bool:
    return (Path(target) / "recipe.json").is_file()


def _format_answer(student: Learner | Model, sample: Sample) -> str:
    cut = " ..." if sample.stop_reason == "length" else ""
    return make_printable(student.renderer.decode(sample.tokens.tolist())) + cut


def _question() -> str:
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.readline().strip()
