"""Commands for a student after its run: evaluate it, chat with it, export it."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from practicum.cli._output import show_waiting
from practicum.core.calls import suggest_name
from practicum.core.randomness import seed_of
from practicum.core.waits import show_wait
from practicum.errors import DataError, RecipeError
from practicum.models.config import ModelConfig, ScorerConfig
from practicum.ports import (
    HasTools,
    Model,
    OpensEpisodes,
    PromptedClient,
    SamplingClient,
    Student,
    TeacherRequest,
    Toolbox,
)
from practicum.ports.inputs import OffersTools
from practicum.recipe import load_recipe, override_all, parse_recipe, resolve_recipe
from practicum.report import write_report
from practicum.report.pipeline import write_pipeline_report
from practicum.rollouts import as_environment
from practicum.rollouts.conversation import Conversation, run_conversations
from practicum.rollouts.openings import ConversationRequest
from practicum.runs import open_run, open_student, restore_components
from practicum.runs.assembly import build_evaluation_settings
from practicum.runs.opening import add_tools, build_task, load_model, resolve_stage
from practicum.text import make_printable
from practicum.training.evaluation import evaluate
from practicum.types import Message, Prompt, Rollout, Sample, SampleRequest, SamplingParams

log = logging.getLogger(__name__)


def evaluate_target(target: str, recipe: str | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Evaluate a run's student, or a model on a recipe's held-out prompts."""
    target = resolve_stage(target)
    if _is_run(target):
        return _evaluate_run(Path(target), overrides)
    _refuse_missing_run(target)
    if recipe is None:
        raise RecipeError(
            f"{target} is not a run folder; to evaluate a model, say on which task: --recipe RECIPE"
        )
    loaded_recipe = load_recipe(recipe, overrides)
    fields = loaded_recipe.student.model_dump(include=set(ModelConfig.model_fields))
    model = load_model(ScorerConfig.model_validate({**fields, "model": target}))
    task = build_task(loaded_recipe)
    model = replace(model, renderer=add_tools(model.renderer, task))
    settings = build_evaluation_settings(loaded_recipe, task, model)
    if settings is None:
        raise DataError(f"{recipe}: the task has no held-out prompts to evaluate on")
    with show_wait(f"evaluating {len(settings.prompts)} held-out prompts"):
        return evaluate(model.client, model.renderer, task, None, settings).summarize()


def hold_chat(
    target: str, temperature: float, max_new_tokens: int, system: str | None, teacher: bool
) -> None:
    """Read questions from standard input and print the answers; each question is a new chat."""
    target = resolve_stage(target)
    _refuse_missing_run(target)
    if teacher and not _is_run(target):
        raise RecipeError(
            f"{target} is not a run folder, so it has no teacher; leave --teacher out"
        )
    if system is not None and _is_run(target):
        raise RecipeError("a run's prompts are written as its recipe says; leave --system out")
    with show_waiting():
        built = restore_components(*open_run(Path(target))) if teacher else None
        if built is None:
            student, client = _open(target, system)
        else:
            student, client = built.student, built.parts.sampler
    student, environment = _open_tools(target, student)
    if teacher and environment is not None:
        raise RecipeError(
            "the task has tools, which a chat offers to the student; leave --teacher out"
        )
    params = SamplingParams(max_new_tokens, temperature, stop_ids=student.renderer.stop_ids)
    max_prompt_tokens = student.context_length - max_new_tokens
    for turn in range(sys.maxsize):
        question = _read_question()
        if not question:
            return
        message = Message("user", question)
        tokens = student.renderer.render([message])
        if len(tokens) > max_prompt_tokens:
            print(
                f"(that is {len(tokens)} tokens; "
                f"at most {max_prompt_tokens} leave room for an answer)"
            )
            continue
        seed = seed_of(0, "chat", turn)
        if environment is not None:
            bound = PromptedClient(client, tokens)
            request = ConversationRequest(Prompt(f"chat-{turn}", (message,)), bound, seed)
            _print_turns(run_conversations([request], environment, student.renderer, params)[0])
            continue
        sample = client.sample([SampleRequest(tokens, seed)], params)[0]
        print(("student: " if teacher else "") + _format_answer(student, sample), flush=True)
        if built is not None:
            request = TeacherRequest(Prompt(f"chat-{turn}", (message,)), seed)
            answers = built.parts.teacher.sample([request], params)
            answer = "(cannot answer)" if answers is None else _format_answer(student, answers[0])
            print(f"teacher: {answer}", flush=True)


def rewrite_report(folder: Path) -> Path:
    """Write the report of a run or a finished pipeline again.

    Raises RecipeError if the pipeline has no summary yet.
    """
    if not (folder / "pipeline.json").is_file():
        return write_report(folder)
    if not (folder / "summary.json").is_file():
        raise RecipeError(
            f"{folder} holds no summary.json, so the pipeline has not finished; go on with --resume"
        )
    return write_pipeline_report(folder)


def _evaluate_run(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    run_dir, recipe = open_run(path)
    recipe_data = resolve_recipe(recipe)
    for note in override_all(recipe_data, overrides):
        log.info(note)
    built = restore_components(run_dir, parse_recipe(recipe_data, "the run's recipe"))
    if built.evaluation is None:
        raise DataError(f"{path}: the task has no held-out prompts to evaluate on")
    parts = built.parts
    with show_wait(f"evaluating {len(built.evaluation.prompts)} held-out prompts"):
        return evaluate(
            parts.sampler, parts.renderer, parts.task, parts.teacher, built.evaluation
        ).summarize()


def _open(target: str, system: str | None) -> tuple[Student | Model, SamplingClient]:
    """Return a run's student, or a model, with its client."""
    if _is_run(target):
        backend, student = open_student(Path(target))
        return student, backend.build_sampler(student)
    model = load_model(ScorerConfig(model=target, system=system))
    return model, model.client


@dataclass(frozen=True, slots=True)
class _ToolsAlone:
    """The tools of a run's task without its prompts: a question of a chat is none of them."""

    toolbox: Toolbox

    def train_prompts(self) -> Sequence[Prompt]:
        """Return none."""
        return ()

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Return none."""
        return ()

    def reward(self, rollout: Rollout) -> float | None:
        """Return None: nothing is known of the answer."""
        return None


def _open_tools(
    target: str, student: Student | Model
) -> tuple[Student | Model, OpensEpisodes | None]:
    """Return a run's student with the tools of its task, and the environment that answers calls."""
    recipe = open_run(Path(target))[1] if _is_run(target) else None
    # A task without tools is not built: its files may be gone by now.
    if recipe is None or not isinstance(recipe.task, OffersTools):
        return student, None
    task = build_task(recipe)
    assert isinstance(task, HasTools), "its settings say so"
    student = replace(student, renderer=add_tools(student.renderer, task))
    return student, as_environment(_ToolsAlone(task.toolbox), student.renderer)


def _print_turns(conversation: Conversation) -> None:
    """Print a conversation: the outcome of each call after its turn, and why it ended if not by itself."""
    for turn in conversation.turns:
        name = "student" if turn.role == "assistant" else turn.role
        print(f"{name}: {make_printable(turn.text)}", flush=True)
        for call in turn.calls:
            print(f"  ({call.tool or 'a call'}: {call.outcome})", flush=True)
    if conversation.sample.stop_reason != "stop":
        print(f"(ended: {conversation.sample.stop_reason})", flush=True)


def _refuse_missing_run(target: str) -> None:
    """Raise RecipeError if a text means a run beside others, and there is no such folder.

    As a name on the hub it would go out to the network.
    """
    path = Path(target)
    runs = sorted(str(file.parent) for file in path.parent.glob("*/recipe.json"))
    if runs and len(path.parts) > 1 and not path.exists():
        raise RecipeError(f"there is no folder {path.absolute()}; {suggest_name(target, runs)}")


def _is_run(target: str) -> bool:
    return (Path(target) / "recipe.json").is_file()


def _format_answer(student: Student | Model, sample: Sample) -> str:
    cut = " ..." if sample.stop_reason == "length" else ""
    return make_printable(student.renderer.decode(sample.tokens.tolist())) + cut


def _read_question() -> str:
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.readline().strip()
