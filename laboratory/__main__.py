"""Test a published claim from the command line: run its arms and controls, print a table, a plot and a verdict."""

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from laboratory import list_reproductions, load_reproduction, reproduce
from practicum.core.options import spell_for_shell
from practicum.errors import PracticumError
from practicum.runs.console import Console
from practicum.runs.progress import open_console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(epilog="Example: python -m laboratory signal")
def main(  # noqa: PLR0913  (its options, one by one)
    name: Annotated[
        str | None, typer.Argument(help="name or file of a reproduction; none: list all")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="run the full form with sweeps and seeds")
    ] = False,
    out: Annotated[Path, typer.Option(help="the folder of reproductions")] = Path(
        "runs/reproductions"
    ),
    jobs: Annotated[int, typer.Option(min=1, help="parallel runs, if memory allows")] = 2,
    resume: Annotated[bool, typer.Option("--resume", help="run only unfinished runs")] = False,
    onto: Annotated[
        Path | None, typer.Option(help="stored results of the first seeds, which are skipped")
    ] = None,
    first_seed: Annotated[
        int, typer.Option(min=0, help="smallest seed, to run a study again with other seeds")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object per line")] = False,
) -> None:
    """Test a published claim: run its arms and controls, and print a verdict."""
    try:
        with spell_for_shell(), closing(open_console(as_json=as_json)) as console:
            if name is None:
                show_reproductions(console)
                return
            result = reproduce(
                name,
                full=full,
                out=out,
                at_once=jobs,
                resume=resume,
                onto=onto,
                first_seed=first_seed,
                console=console,
            )
        if failed := len(result.results.failed):
            raise PracticumError(
                f"failed runs: {failed}; the verdicts do not include them; retry them with --resume"
            )
    except PracticumError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def show_reproductions(console: Console) -> None:
    """Show every reproduction with its question and its papers."""
    rows = []
    for name in list_reproductions():
        spec = load_reproduction(name).spec
        rows.append(
            [name, spec.question, ", ".join(sorted({claim.paper for claim in spec.claims}))]
        )
    console.table("reproductions", ["name", "question", "papers"], rows)


if __name__ == "__main__":
    app(prog_name="python -m laboratory")
