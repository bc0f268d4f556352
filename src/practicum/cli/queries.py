"""Commands that ask a teacher or a student, and train nothing."""

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from practicum.cli._arguments import (
    Debug,
    Json,
    Overrides,
    RecipeArgument,
    RunOrModel,
    handle_errors,
)
from practicum.cli._output import print_summary, show_waiting


def answers(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="JSONL file; an interrupted file is resumed")
    ] = Path("answers.jsonl"),
    n: Annotated[int, typer.Option(min=1, help="answers per prompt")] = 1,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0: greedy; default: the recipe's")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the teacher's answers to the training prompts. A student of any vocabulary can learn from them."""
    with handle_errors(debug):
        from practicum.cli.answers import write_file
        from practicum.runs.progress import open_console

        with closing(open_console(as_json=as_json)) as console:
            write_file(recipe, overrides or [], out, n, temperature, console)


def score(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="JSONL file; an interrupted file is resumed")
    ] = Path("scored.jsonl"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the teacher's log-probabilities into recorded traces.

    The traces come from `rollout.source: traces(FILE)`.
    """
    with handle_errors(debug):
        from practicum.recipe import load_recipe
        from practicum.runs.trace_file import score_traces

        with show_waiting():
            scored = score_traces(load_recipe(recipe, overrides or []), out)
        print_summary({**asdict(scored), "file": str(out)}, as_json)


def evaluate(  # noqa: PLR0913  (its options, one by one)
    target: RunOrModel,
    overrides: Overrides = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="RECIPE", help="for a model: the recipe with the task")
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="prompts to answer, instead of the held-out prompts"),
    ] = None,
    verifier: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="a metric, accuracy[NAME]; again for another"),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(metavar="K", min=1, help="answers per prompt, for avg@K and pass@K"),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="T", min=0.0, help="0: greedy; default: the recipe's, else 0"),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="for a model: the exported drafter to decode with"),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure the accuracy on held-out prompts or your own rows. For a run, also measure the distance from its teacher."""
    with handle_errors(debug):
        from practicum.runs.evaluating import evaluate as evaluate_target

        with show_waiting():
            summary = evaluate_target(
                target,
                overrides or (),
                recipe=recipe,
                rows=rows,
                verifier=verifier or (),
                samples=samples,
                temperature=temperature,
                drafter=drafter,
            )
        print_summary(summary, as_json)
