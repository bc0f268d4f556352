"""Write a teacher's answers to the training prompts of a recipe as rows of text.

A student with another vocabulary can learn from them: the rows have the format of the task `jsonl`,
and `rollout.source: dataset` encodes them again with the student's tokenizer (SeqKD 1606.07947).
"""

import logging
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from practicum import run_dir as folders
from practicum.core.randomness import compute_seeds
from practicum.errors import CapabilityError, DataError, Interrupted
from practicum.ports import (
    Teacher,
    TeacherRequest,
)
from practicum.ports.gate import repair_text
from practicum.recipe import Recipe
from practicum.rollouts.sources import teacher as teacher_source
from practicum.run_dir import Journal
from practicum.runs.console import Console, SilentConsole
from practicum.runs.identity import digest_prompts
from practicum.runs.open_teacher import OpenedTeacher, TeacherLoader
from practicum.runs.partial_file import begin_file
from practicum.text import Renderer, make_printable
from practicum.types import Prompt, Sample, SamplingParams

log = logging.getLogger(__name__)

CHUNK = 64
"""The number of answers that are sampled and written together. A resumed file starts at a chunk."""

PREVIEW = 400
"""Characters of an answer that the progress line may show."""


@dataclass(frozen=True, slots=True)
class AnswersResult:
    """The file of a teacher's answers: how many it holds, and how many of them were cut off."""

    path: Path
    answers: int
    cut: int


def write_answers(
    recipe: Recipe,
    path: Path,
    *,
    n: int = 1,
    temperature: float | None = None,
    console: Console | None = None,
) -> AnswersResult:
    """Write `n` answers of the recipe's teacher to each training prompt, one row per answer.

    Without a `temperature`, the teacher uses the temperature of `rollout.source` or `rollout`. An
    interrupted file resumes where it stopped. Raises CapabilityError if the teacher writes no
    answers, and DataError if the file exists with different settings.
    """
    _check_recipe(recipe)
    folders.prepare_folder(path.parent)
    console = console or SilentConsole()
    with (
        tempfile.TemporaryDirectory(prefix="practicum-answers-") as models,
        ExitStack() as exit_stack,
    ):
        opened = TeacherLoader(recipe, Path(models), exit_stack).open()
        params = _build_params(recipe, opened.renderer, temperature)
        prompts = _select_prompts(opened, recipe, params)
        _check_settings(path, recipe, opened, params, n, prompts)
        keys = [(prompt, number) for prompt in prompts for number in range(n)]
        with closing(Journal(path, essential=True)) as journal:
            _append_answers(journal, keys, opened, params, recipe.seed, console)
    rows = list(folders.read_rows(path))
    return AnswersResult(path, len(rows), sum(row["finish_reason"] == "length" for row in rows))


def _check_recipe(recipe: Recipe) -> None:
    """Raise CapabilityError if the recipe's teacher can write no answers."""
    if not recipe.teacher.capabilities().writes:
        raise CapabilityError(
            f"teacher {recipe.teacher.type!r} writes no answers before it has seen one; take one "
            "that writes, such as {type: model, model: ...}"
        )


def _build_params(recipe: Recipe, renderer: Renderer, temperature: float | None) -> SamplingParams:
    """Return the recipe's sampling settings with the teacher's stop tokens and temperature."""
    params = recipe.rollout.build_sampling_params(renderer.stop_ids)
    source = recipe.rollout.source
    if temperature is None and isinstance(source, teacher_source.Config):
        temperature = source.temperature
    return params if temperature is None else replace(params, temperature=temperature)


def _select_prompts(opened: OpenedTeacher, recipe: Recipe, params: SamplingParams) -> list[Prompt]:
    """Return the prompts that leave room for an answer; raises DataError if none does."""
    limit = recipe.prompt_tokens
    if opened.context_length is not None:
        limit = min(limit, opened.context_length - params.max_new_tokens)
    prompts = [
        prompt for prompt in opened.prompts if len(opened.renderer.render(prompt.messages)) <= limit
    ]
    if not prompts:
        raise DataError(
            f"all {len(opened.prompts)} training prompts have more than {limit} tokens; raise "
            "prompt_tokens, or lower rollout.max_new_tokens"
        )
    if len(prompts) < len(opened.prompts):
        count = len(opened.prompts) - len(prompts)
        log.info(f"{count} of {len(opened.prompts)} prompts left out: over {limit} tokens")
    return prompts


def _check_settings(
    path: Path,
    recipe: Recipe,
    opened: OpenedTeacher,
    params: SamplingParams,
    n: int,
    prompts: Sequence[Prompt],
) -> None:
    """Begin the file and store the settings that determine its answers, or resume it; see
    `begin_file`."""
    settings = {
        "teacher": recipe.teacher.model_dump(mode="json"),
        "seed": recipe.seed,
        "n": n,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "max_new_tokens": params.max_new_tokens,
        "prompts": digest_prompts(prompts),
        "models": dict(opened.identity),
    }
    begin_file(path, settings)


def _append_answers(
    journal: Journal,
    keys: Sequence[tuple[Prompt, int]],
    opened: OpenedTeacher,
    params: SamplingParams,
    seed: int,
    console: Console,
) -> None:
    """Append the rows that the file lacks. Raises Interrupted at a SIGINT: what is written stays."""
    answers = sum(1 for _ in folders.read_rows(journal.path))
    if answers:
        log.info(f"{journal.path} holds {answers} of {len(keys)} answers already")
    console.begin(len(keys), answers + 1)
    has_several = any(number > 0 for _, number in keys)
    try:
        # Chunks always begin at the same answers. An answer depends, by rounding, on the rest of its
        # batch, and a resumed file must have the same bytes as an uninterrupted one.
        for start in range(answers - answers % CHUNK, len(keys), CHUNK):
            began = monotonic()
            chunk = keys[start : start + CHUNK]
            samples = _sample(chunk, opened.teacher, params, seed)
            rows = list(_build_rows(chunk, samples, opened.renderer, has_several=has_several))
            for row in rows[max(answers - start, 0) :]:
                journal.append(row)
            journal.sync()
            lengths = [len(sample.tokens) for sample in samples]
            metrics = {
                "length": sum(lengths) / len(lengths),
                "tokens_per_second": sum(lengths) / max(monotonic() - began, 1e-9),
            }
            question = chunk[-1][0].messages[-1].content
            preview = (make_printable(question), make_printable(rows[-1]["response"][:PREVIEW]))
            console.step(start + len(chunk), metrics, preview)
    except KeyboardInterrupt:
        raise Interrupted(
            signal.SIGINT,
            f"stopped; the rows in {journal.path} are kept, and the same command resumes there",
        ) from None


def _sample(
    keys: Sequence[tuple[Prompt, int]], teacher: Teacher, params: SamplingParams, seed: int
) -> list[Sample]:
    """Return the teacher's answers, each from the stream of its prompt and number."""
    seeds = compute_seeds([(seed, "answers", prompt.id, number) for prompt, number in keys])
    requests = [
        TeacherRequest(prompt, stream) for (prompt, _), stream in zip(keys, seeds, strict=True)
    ]
    samples = teacher.sample(requests, params)
    if samples is None:
        raise CapabilityError(
            "this teacher writes no answers to some of these prompts: a context that it asks for "
            "is missing; remove {missing: silent}, or use another teacher"
        )
    return samples


def _build_rows(
    keys: Sequence[tuple[Prompt, int]],
    samples: Sequence[Sample],
    renderer: Renderer,
    *,
    has_several: bool,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of answers, in the fields of the task `jsonl`."""
    for (prompt, number), sample in zip(keys, samples, strict=True):
        text = renderer.read_answer(prompt.messages, sample.tokens.tolist())
        turns = [turn.to_json() for turn in prompt.messages]
        is_question = len(turns) == 1 and turns[0]["role"] == "user"
        fields = {
            "id": f"{prompt.id}#{number}" if has_several else prompt.id,
            "prompt": turns[0]["content"] if is_question else None,
            "messages": None if is_question else turns,
            "answer": prompt.answer,
            "response": _make_storable(text),
            "finish_reason": sample.stop_reason,
            "domain": prompt.domain,
            "teacher": prompt.teacher,
            "privileged": dict(prompt.privileged) or None,
        }
        yield {name: value for name, value in fields.items() if value is not None}


def _make_storable(text: str) -> str:
    """Return a model's text without characters that a row may not contain: NUL, and halves of
    surrogate pairs."""
    return repair_text(text.replace("\x00", "\ufffd"))
