"""Put a published claim to the test from the command line: its arms and controls, a table, a plot, a verdict."""

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
def main(
    name: Annotated[
        str | None, typer.Argument(help="a reproduction, or the file of one; none: list them")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="the form with sweeps and seeds, not the one of minutes")
    ] = False,
    out: Annotated[Path, typer.Option(help="the folder of reproductions")] = Path(
        "runs/reproductions"
    ),
    jobs: Annotated[int, typer.Option(min=1, help="runs at a time, while memory allows")] = 2,
    resume: Annotated[bool, typer.Option("--resume", help="run only what is not finished")] = False,
    onto: Annotated[
        Path | None, typer.Option(help="results of the first seeds, which are not run again")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="one JSON object a line, for machines")
    ] = False,
) -> None:
    """Put a published claim to the test: its arms and controls, a table, a plot, a verdict."""
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
                console=console,
            )
        if failed := len(result.results.failed):
            raise PracticumError(
                f"runs that failed: {failed}; the verdicts stand without them; --resume tries them again"
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
