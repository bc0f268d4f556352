"""Write a teacher's log-probabilities into the traces that a recipe learns from."""

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from practicum.core.waits import show_wait
from practicum.errors import CapabilityError, DataError, RecipeError
from practicum.objective import Sampled
from practicum.recipe import Recipe
from practicum.rollouts import Traces, list_traced_rollouts
from practicum.run_dir import write_text
from practicum.runs.teacher_alone import TeacherLoader
from practicum.text.trace_rows import add_reference_logprobs, read_lines, split_by_node

CHUNK = 64
"""Conversations that are scored together."""


@dataclass(frozen=True, slots=True)
class ScoredTraces:
    """The conversations that a teacher scored, their sampled tokens, and its mean on these."""

    answers: int
    tokens: int
    logprob: float


def score_traces(recipe: Recipe, path: Path) -> ScoredTraces:
    """Write the traces of `rollout.source` to `path` with the recipe's teacher in each message.

    Each message that the student sampled gets `reference_logprobs`: a number for each of its sampled
    tokens. All else stays as it was. Raises RecipeError if the recipe learns from no traces, and
    CapabilityError if its teacher gives no log-probabilities.
    """
    source = recipe.rollout.source
    if not isinstance(source, Traces):
        raise RecipeError(
            "rollout.source has no traces to write into; write rollout.source: traces(FILE.jsonl)"
        )
    file = Path(recipe.base_dir) / source.path
    if path.exists():
        raise DataError(f"{path} exists; write --out another file")
    scores: dict[int, dict[int, list[float]]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="practicum-traces-") as models,
        ExitStack() as exit_stack,
    ):
        loader = TeacherLoader(recipe, Path(models), exit_stack, scores=True)
        opened = loader.open()
        renderer = loader.student_renderer
        pairs = list_traced_rollouts(file, opened.prompts, renderer, recipe.longest_answer)
        with show_wait("scores of traces", len(pairs)) as wait:
            for start in range(0, len(pairs), CHUNK):
                chunk = pairs[start : start + CHUNK]
                signals = opened.teacher.score([rollout for _, rollout in chunk], Sampled())
                # A message that stands in several conversations has the same tokens before it in all.
                for (answer, _), signal in zip(chunk, signals, strict=True):
                    if signal.logprobs is None:
                        raise CapabilityError(
                            f"teacher {recipe.teacher.type!r} gives no log-probabilities of the "
                            "student's tokens; take one that does, such as {type: model, model: ...}"
                        )
                    by_node = split_by_node(answer, signal.logprobs.tolist())
                    scores.setdefault(answer.line, {}).update(by_node)
                wait.advance(len(chunk))
    # Read once more: the rows that were read keep only what is used here of each line.
    lines = [
        add_reference_logprobs(line, scores[number]) if number in scores else line.decode()
        for number, line in enumerate(read_lines(file), start=1)
    ]
    write_text(path, "".join(f"{line}\n" for line in lines))
    numbers = [value for nodes in scores.values() for values in nodes.values() for value in values]
    return ScoredTraces(len(pairs), len(numbers), sum(numbers) / max(len(numbers), 1))
