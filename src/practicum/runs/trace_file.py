"""Write a teacher's log-probabilities into the traces that a recipe learns from."""

import hashlib
import json
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from practicum.core.waits import show_wait
from practicum.errors import CapabilityError, Interrupted, RecipeError
from practicum.objective import Sampled
from practicum.recipe import Recipe
from practicum.rollouts.sources import traces
from practicum.run_dir import Journal, prepare_folder
from practicum.runs.identity import digest_prompts
from practicum.runs.open_teacher import OpenedTeacher, TeacherLoader
from practicum.runs.partial_file import begin_file
from practicum.text.trace_rows import (
    TracedAnswer,
    add_reference_logprobs,
    read_lines,
    split_by_node,
)
from practicum.types import Rollout

CHUNK = 64
"""Conversations that are scored together, or more where a trace has more."""

Conversations = Sequence[tuple[TracedAnswer, Rollout]]


@dataclass(frozen=True, slots=True)
class ScoredTraces:
    """The conversations that a teacher scored, their sampled tokens, and their mean log-probability."""

    answers: int
    tokens: int
    logprob: float


def score_traces(recipe: Recipe, path: Path) -> ScoredTraces:
    """Write the traces of `rollout.source` to `path` with the recipe's teacher in each message.

    Each message that the student sampled gets `reference_logprobs`: a number for each of its sampled
    tokens. Everything else is unchanged. An interrupted file resumes where it stopped. Raises
    RecipeError if the recipe learns from no traces, CapabilityError if its teacher gives no
    log-probabilities, and DataError if the file exists with other settings.
    """
    source = recipe.rollout.source
    if not isinstance(source, traces.Config):
        raise RecipeError(
            "rollout.source has no traces to write into; set rollout.source: traces(FILE.jsonl)"
        )
    file = Path(recipe.base_dir) / source.path
    prepare_folder(path.parent)
    with (
        tempfile.TemporaryDirectory(prefix="practicum-traces-") as models,
        ExitStack() as exit_stack,
    ):
        loader = TeacherLoader(recipe, Path(models), exit_stack, scores=True)
        opened = loader.open()
        pairs = traces.list_traced_rollouts(
            file, opened.prompts, loader.student_renderer, recipe.longest_answer
        )
        lines = read_lines(file)
        settings = {
            "teacher": recipe.teacher.model_dump(mode="json"),
            "traces": hashlib.sha256(b"\n".join(lines)).hexdigest(),
            "prompts": digest_prompts(opened.prompts),
            "models": dict(opened.identity),
        }
        begin_file(path, settings)
        with closing(Journal(path, essential=True)) as journal:
            _append_lines(journal, lines, pairs, opened, recipe.teacher.type)
    return _summarize(read_lines(path), pairs)


def _append_lines(
    journal: Journal,
    lines: Sequence[bytes],
    pairs: Conversations,
    opened: OpenedTeacher,
    teacher: str,
) -> None:
    """Append the missing lines to the file. Raises Interrupted at a SIGINT; written lines are kept."""
    count = len(read_lines(journal.path))
    try:
        with show_wait("scores of traces", len(lines)) as wait:
            for part, chunk in _split_lines(len(lines), pairs):
                # Score whole chunks, even if some of their lines exist: the scores of a conversation
                # depend, by rounding, on the rest of its batch.
                if part.stop > count:
                    scores = _score_chunk(chunk, opened, teacher)
                    for number in part:
                        if number >= count:
                            line = _add_scores(lines[number], scores.get(number + 1))
                            journal.append_line(line)
                    journal.sync()
                wait.move_to(part.stop)
    except KeyboardInterrupt:
        raise Interrupted(
            signal.SIGINT,
            f"stopped; the rows in {journal.path} are kept, and the same command resumes there",
        ) from None


def _split_lines(count: int, pairs: Conversations) -> Iterator[tuple[range, Conversations]]:
    """Yield parts of the lines, each with its conversations: `CHUNK` conversations or a few more."""
    start, chunk = 0, []
    for line, group in groupby(pairs, key=lambda pair: pair[0].line):
        chunk += group
        if len(chunk) >= CHUNK:
            yield range(start, line), chunk
            start, chunk = line, []
    yield range(start, count), chunk


def _score_chunk(
    chunk: Conversations, opened: OpenedTeacher, teacher: str
) -> dict[int, dict[int, list[float]]]:
    """Return the teacher's numbers by line and node."""
    scores: dict[int, dict[int, list[float]]] = {}
    signals = opened.teacher.score([rollout for _, rollout in chunk], Sampled()) if chunk else []
    # A message that is part of several conversations has the same preceding tokens in all of them.
    for (answer, _), scored in zip(chunk, signals, strict=True):
        if scored.logprobs is None:
            raise CapabilityError(
                f"teacher {teacher!r} gives no log-probabilities of the student's tokens; use a "
                "teacher that does, such as {type: model, model: ...}"
            )
        by_node = split_by_node(answer, scored.logprobs.tolist())
        scores.setdefault(answer.line, {}).update(by_node)
    return scores


def _add_scores(line: bytes, scores: Mapping[int, Sequence[float]] | None) -> bytes:
    return line if scores is None else add_reference_logprobs(line, scores).encode()


def _summarize(lines: Sequence[bytes], pairs: Conversations) -> ScoredTraces:
    """Return the numbers of a whole file; a message counts once."""
    nodes = sorted({(answer.line, node) for answer, _ in pairs for node in answer.path})
    traces = {line: json.loads(lines[line - 1])["nodes"] for line, _ in nodes}
    numbers = [
        value for line, node in nodes for value in traces[line][node].get("reference_logprobs", ())
    ]
    return ScoredTraces(len(pairs), len(numbers), sum(numbers) / max(len(numbers), 1))
