"""Commands for a student after its run: evaluate it, chat with it, export it."""

import logging
import sys
from dataclasses import replace
from pathlib import Path

from practicum.cli._output import show_waiting
from practicum.core.randomness import seed_of
from practicum.errors import RecipeError
from practicum.models.config import ScorerConfig
from practicum.ports import (
    Model,
    OpensEpisodes,
    PromptedClient,
    SamplingClient,
    Student,
    TeacherRequest,
)
from practicum.report import write_report
from practicum.report.pipeline import write_pipeline_report
from practicum.rollouts import as_environment
from practicum.rollouts.conversation import Conversation, run_conversations
from practicum.rollouts.openings import ConversationRequest
from practicum.run_dir import RunDir
from practicum.runs import open_run, open_student, restore_components
from practicum.runs.evaluating import ToolPrompts
from practicum.runs.opening import (
    add_tools,
    build_task,
    load_model,
    refuse_missing_run,
    resolve_stage,
)
from practicum.text import make_printable
from practicum.types import Message, Prompt, Sample, SampleRequest, SamplingParams

log = logging.getLogger(__name__)


def hold_chat(
    target: str, temperature: float, max_new_tokens: int, system: str | None, teacher: bool
) -> None:
    """Read questions from standard input and print the answers; each question is a new chat."""
    target = resolve_stage(target)
    refuse_missing_run(target)
    if teacher and not _is_run(target):
        raise RecipeError(
            f"{target} is not a run folder, so it has no teacher; leave --teacher out"
        )
    if system is not None and _is_run(target):
        raise RecipeError("a run's prompts follow its recipe; leave --system out")
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
            f"{folder} holds no summary.json, so the pipeline has not finished; resume with --resume"
        )
    return write_pipeline_report(folder)


def _open(target: str, system: str | None) -> tuple[Student | Model, SamplingClient]:
    """Return a run's student, or a model, with its client."""
    if _is_run(target):
        backend, student = open_student(Path(target))
        return student, backend.build_sampler(student)
    model = load_model(ScorerConfig(model=target, system=system))
    return model, model.client


def _open_tools(
    target: str, student: Student | Model
) -> tuple[Student | Model, OpensEpisodes | None]:
    """Return a run's student with the tools of its task, and the environment that answers calls."""
    recipe = open_run(Path(target))[1] if _is_run(target) else None
    # A task without tools is not built: its files may have been removed.
    if recipe is None or not recipe.task.offers_tools:
        return student, None
    task = build_task(recipe)
    assert task.toolbox is not None, "its settings say so"
    student = replace(student, renderer=add_tools(student.renderer, task))
    return student, as_environment(ToolPrompts(task.toolbox), student.renderer)


def _print_turns(conversation: Conversation) -> None:
    """Print a conversation: the outcome of each call after its turn, and why it ended if not by itself."""
    for turn in conversation.turns:
        name = "student" if turn.role == "assistant" else turn.role
        print(f"{name}: {make_printable(turn.text)}", flush=True)
        for call in turn.calls:
            print(f"  ({call.tool or 'a call'}: {call.outcome})", flush=True)
    if conversation.sample.stop_reason != "stop":
        print(f"(ended: {conversation.sample.stop_reason})", flush=True)


def _is_run(target: str) -> bool:
    return RunDir(Path(target)).recipe_json.is_file()


def _format_answer(student: Student | Model, sample: Sample) -> str:
    cut = " ..." if sample.stop_reason == "length" else ""
    return make_printable(student.renderer.decode(sample.tokens.tolist())) + cut


def _read_question() -> str:
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.readline().strip()
