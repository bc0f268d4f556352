"""`practicum answers`: write a teacher's answers, and print how a student learns from them."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from practicum.core.notes import show_notes
from practicum.recipe import Recipe, load_recipe
from practicum.runs.answer_file import AnswersResult, write_answers
from practicum.runs.console import Console
from practicum.text import make_printable


def write_file(
    source: str,
    overrides: Sequence[str],
    path: Path,
    n: int,
    temperature: float | None,
    console: Console,
) -> None:
    """Write the answers of a recipe's teacher, and print the command that trains on them."""
    recipe = load_recipe(source, overrides)
    with show_notes(lambda text: console.event(make_printable(text))):
        result = write_answers(recipe, path, n=n, temperature=temperature, console=console)
    console.finish(
        {
            "answers": f"{result.answers} in {path}",
            "cut off": describe_cut(result, recipe),
            "to learn from them": build_command(source, overrides, recipe, path),
        }
    )


def describe_cut(result: AnswersResult, recipe: Recipe) -> str:
    """Return the number of cut-off answers, with advice."""
    if not result.cut:
        return "none"
    return (
        f'{result.cut} at {recipe.rollout.max_new_tokens} tokens ("finish_reason": "length"): a '
        "student would learn to stop there; remove these rows, or raise rollout.max_new_tokens"
    )


def build_command(source: str, overrides: Sequence[str], recipe: Recipe, path: Path) -> str:
    """Return the command that trains the recipe's student on a file of answers."""
    verifier = recipe.task.model_dump(mode="json").get("verifier")
    fields = f"type: jsonl, path: {path.absolute()}"
    if isinstance(verifier, str):
        fields += f", verifier: {verifier}"
    changes = (
        *overrides,
        "teacher=none",
        "rollout.source=dataset",
        "objective={signal: text, divergence: ce}",
        f"task={{{fields}}}",
    )
    return shlex.join(["practicum", "run", source, *changes])
