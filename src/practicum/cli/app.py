"""The commands. Each imports what it needs when it is called, so that help is instant."""

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from practicum.errors import PracticumError

app = typer.Typer(
    name="practicum",
    help="On-policy distillation of language models.\n\nExample: practicum run quickstart",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="a YAML file of a recipe or a pipeline, or a packaged one such as quickstart",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="for example train.steps=4, or stages.NAME.train.steps=4; teacher=off: the reward alone",
    ),
]
RunOrModel = Annotated[
    str, typer.Argument(metavar="RUN|MODEL", help="a run folder, a model folder or a model name")
]
Json = Annotated[bool, typer.Option("--json", help="one JSON object a line, for machines")]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]


@app.command(epilog="Example: practicum run quickstart train.steps=4 --out runs")
def run(  # noqa: PLR0913  (its options, one by one)
    recipe: RecipeArgument,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="the folder in which the run folder is made")] = Path(
        "runs"
    ),
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the newest good checkpoint")
    ] = False,
    allow_changed: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-changed",
            metavar="KEY",
            help="with --resume: may be other than when the run began; once for each",
        ),
    ] = None,
    track: Annotated[
        str | None, typer.Option(help="also send metrics to trackio, wandb, tensorboard or mlflow")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train: evaluate, distil, evaluate again; a pipeline does so stage by stage."""
    with _errors(debug):
        from practicum.runs.console import open_console
        from practicum.runs.pipeline.running import run as run_recipe

        with closing(open_console(as_json=as_json)) as console:
            changes = [*(overrides or []), *([] if track is None else [f"tracking={track}"])]
            run_recipe(
                recipe,
                changes,
                out=out,
                resume=resume,
                allow_changed=allow_changed or (),
                console=console,
            )


@app.command(epilog="Example: practicum check my.yaml")
def check(recipe: RecipeArgument, overrides: Overrides = None, debug: Debug = False) -> None:
    """Every mistake of a recipe at once, before anything loads."""
    with _errors(debug):
        from practicum.runs.pipeline import load_pipeline_or_recipe

        load_pipeline_or_recipe(recipe, overrides or [])
        print(f"{recipe}: no mistakes found")


@app.command(epilog="Example: practicum doctor quickstart --prompts 32")
def doctor(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    prompts: Annotated[
        int, typer.Option(min=1, help="training prompts that the student answers")
    ] = 16,
    samples: Annotated[int, typer.Option(min=1, help="answers of each")] = 4,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="the JSON file; its page is beside it [runs/NAME.doctor.json]"
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Before a run: do student, teacher and prompts fit? A verdict, its numbers, and what to change."""
    with _errors(debug):
        from practicum.cli.doctor import examine_recipe
        from practicum.runs.console import open_console

        with closing(open_console(as_json=as_json)) as console:
            code = examine_recipe(recipe, overrides or [], (prompts, samples), out, console)
    raise typer.Exit(code)


@app.command(epilog="Example: practicum show quickstart objective.divergence='jsd(0.3)'")
def show(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    plot: Annotated[
        bool, typer.Option("--plot", help="draw what changes from step to step instead")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """The recipe with every default filled in, or its schedules drawn."""
    with _errors(debug):
        import yaml

        from practicum.cli.drawing import draw_schedules
        from practicum.recipe import resolved
        from practicum.recipe.methods import describe_axes
        from practicum.runs.pipeline import Pipeline, load_pipeline_or_recipe

        found = load_pipeline_or_recipe(recipe, overrides or [])
        parts = found.recipes() if isinstance(found, Pipeline) else {"": found}
        data = found.resolved() if isinstance(found, Pipeline) else resolved(found)
        if as_json:
            print(json.dumps(data))
            return
        for name, part in parts.items():
            lines = (
                draw_schedules(part)
                if plot
                else [f"# {axis}: {value}" for axis, value in describe_axes(part).items()]
            )
            print("\n".join([f"# stage {name}", *lines] if name else lines), end="\n\n")
        if not plot:
            print(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), end="")


@app.command(epilog="Example: practicum ls divergences")
def ls(
    room: Annotated[
        str, typer.Argument(help="recipes, teachers, tasks, backends, divergences, signals, ...")
    ] = "recipes",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """What there is to choose from."""
    with _errors(debug):
        from practicum.cli.listing import list_names

        _print_rows(list_names(room), as_json)


@app.command("plan", epilog="Example: practicum plan quickstart --memory 2GiB")
def plan_recipe(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    memory: Annotated[
        str | None,
        typer.Option(help="what there is, such as 8GiB; by default what this machine has"),
    ] = None,
    answer_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="tokens an answer; by default as measured, or as many as it may have"
        ),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate/--no-calibrate", help="do two steps first, to tell seconds")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """What a recipe will cost: operations, memory, bytes, seconds; SFT and RL beside it; what fits."""
    with _errors(debug):
        from practicum.cli.plan import lines, make_plan

        data = make_plan(recipe, overrides or [], memory, answer_tokens, calibrate)
        print(json.dumps(data) if as_json else "\n".join(lines(data)))


@app.command("eval", epilog="Example: practicum eval runs/quickstart evaluation.prompts=121")
def evaluate(
    target: RunOrModel,
    overrides: Overrides = None,
    recipe: Annotated[
        str | None, typer.Option(help="the recipe whose task to use, for a model")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Held-out accuracy; for a run, also how far from its teacher."""
    with _errors(debug):
        from practicum.cli.after import evaluate_target

        _print_summary(evaluate_target(target, recipe, overrides or []), as_json)


@app.command(epilog="Example: practicum chat runs/quickstart")
def chat(
    target: RunOrModel,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    system: Annotated[str | None, typer.Option(help="a system turn, for a model")] = None,
    teacher: Annotated[
        bool,
        typer.Option("--teacher", help="for a run: let its teacher answer too, in its own context"),
    ] = False,
    debug: Debug = False,
) -> None:
    """Talk to a student, and to its teacher beside it."""
    with _errors(debug):
        from practicum.cli.after import chat_with

        chat_with(target, temperature, max_new_tokens, system, teacher)


@app.command(epilog="Example: practicum export runs/quickstart my-model")
def export(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN")],
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    debug: Debug = False,
) -> None:
    """Write a model folder for other engines."""
    with _errors(debug):
        from practicum.cli.after import export_run

        print(f"wrote {export_run(run_folder, folder)}")


@app.command(epilog="Example: practicum report runs/quickstart")
def report(
    run_folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="the folder of a run or of a finished pipeline")
    ],
    debug: Debug = False,
) -> None:
    """Write report.html again from what a run or a pipeline has left so far."""
    with _errors(debug):
        from practicum.cli.after import rewrite_report

        print(f"wrote {rewrite_report(run_folder)}")


@app.command(epilog="Example: practicum watch runs/quickstart --open")
def watch(
    run_folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="the folder of a run or pipeline, going on or not")
    ],
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="8765, or any free one where that is taken")
    ] = None,
    open_browser: Annotated[
        bool, typer.Option("--open", help="open the page in the browser")
    ] = False,
    debug: Debug = False,
) -> None:
    """Show the report's page live, on this machine alone."""
    with _errors(debug):
        from practicum.cli.watch import watch_run

        watch_run(run_folder, port, open_browser)


@app.command(
    epilog="Example: practicum compare kl=papers/gkd,divergence=reverse_kl jsd=papers/gkd --seeds 3"
)
def compare(  # noqa: PLR0913  (its options, one by one)
    arms: Annotated[
        list[str],
        typer.Argument(
            metavar="ARM...",
            help="RECIPE, or NAME=RECIPE,key=value,...; with --fit, folders of runs",
        ),
    ],
    seeds: Annotated[int, typer.Option(min=1, help="runs of each arm: seeds 0, 1, 2, ...")] = 3,
    budget: Annotated[
        str, typer.Option(help="flops=1e12, tokens=100000, seconds=60 or steps=40 a run")
    ] = "steps",
    out: Annotated[Path, typer.Option(help="the folder of the comparison")] = Path("runs/compare"),
    jobs: Annotated[int, typer.Option(min=1, help="runs at a time, while memory allows")] = 2,
    resume: Annotated[bool, typer.Option("--resume", help="run only what is not finished")] = False,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="for every arm")
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="run nothing; fit a scaling law to finished runs")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Several methods on the same task, prompts, seeds and budget: one table, one page, one verdict."""
    with _errors(debug):
        from practicum.cli.compare import compare_arms, fit_law
        from practicum.studies.compare import ComparisonBudget, Settings

        if fit:
            return fit_law(arms, as_json)
        settings = Settings(
            seeds, ComparisonBudget.parse(budget), jobs, out, resume, tuple(changes or ())
        )
        compare_arms(arms, settings, as_json)


@app.command(epilog="Example: practicum probe http://localhost:8000")
def probe(
    url: Annotated[str, typer.Argument(help="where the server is")],
    model: Annotated[str | None, typer.Option(help="its name there; none: the only one")] = None,
    dialect: Annotated[str, typer.Option(help="auto, vllm, sglang, echo or chat")] = "auto",
    api_key_env: Annotated[
        str | None, typer.Option(help="the environment variable that holds the key")
    ] = None,
    allow_http: Annotated[
        bool, typer.Option("--allow-http", help="plain http to another machine")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """What a server can give as a teacher: signals, candidates, determinism, time."""
    with _errors(debug):
        from practicum.cli.probe import as_data, probe_server

        found = probe_server(
            url, model=model, dialect=dialect, api_key_env=api_key_env, allow_http=allow_http
        )
        print(json.dumps(as_data(found)) if as_json else "\n".join(found.lines()))


@app.command(epilog="Example: practicum serve smollm2-135m-instruct")
def serve(  # noqa: PLR0913 - one a line of its help
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", help="folders, hub names, packaged names; NAME=MODEL to rename one"
        ),
    ],
    student: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="may be trained, others not; none given: all may"),
    ] = None,
    host: Annotated[
        str, typer.Option(help="the address to listen on; off this machine a token is needed")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free")] = 8000,
    out: Annotated[Path, typer.Option(help="where checkpoints go")] = Path("served"),
    memory: Annotated[
        float | None, typer.Option(min=0, help="GiB for the weights of all base models")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="a file of mode 0600 that holds the token")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    request_tokens: Annotated[
        int,
        typer.Option(min=1, help="most tokens a request may draw: its samples times max_tokens"),
    ] = 2**21,
    debug: Debug = False,
) -> None:
    """Serve models over HTTP, to sample, score and train with the Tinker API."""
    with _errors(debug):
        from practicum.cli.serve import ServerOptions, serve_models

        serve_models(
            ServerOptions(
                models,
                student or (),
                host,
                port,
                out,
                memory,
                token_file,
                dtype,
                device,
                request_tokens,
            )
        )


def _version(wanted: bool) -> bool:
    if wanted:
        from practicum import __version__

        print(f"practicum {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """On-policy distillation of language models.

    Example: practicum run quickstart
    """


def main() -> None:
    """Run the command line; every error for a user is one line on stderr and its documented exit code."""
    sys.path[:] = [entry for entry in sys.path if entry not in ("", os.getcwd())]
    # A tracking client may give the root logger a handler, which would print every note a second time.
    logging.getLogger("practicum").propagate = False
    app()


@contextmanager
def _errors(debug: bool) -> Iterator[None]:
    try:
        yield
    except PracticumError as error:
        if debug:
            raise
        lines = str(error).splitlines() or [type(error).__name__]
        print(f"error: {lines[0]}", *lines[1:], sep="\n  ", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


def _print_rows(rows: list[dict[str, str]], as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        paper = f" ({row['paper']})" if row.get("paper") else ""
        print(f"{row['name']:<{width}}  {row['summary']}{paper}".rstrip())
        if row.get("method"):
            print(f"{'':<{width}}  {row['method']}")


def _print_summary(summary: dict[str, object], as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary))
        return
    domains = summary["by_domain"]
    assert isinstance(domains, dict)
    numbers = {name: value for name, value in summary.items() if name != "by_domain"}
    for name, value in {
        **numbers,
        **{f"  {domain}": interval for domain, interval in domains.items()},
    }.items():
        print(f"{name:16} {_plain(value)}")


def _plain(value: object) -> str:
    if isinstance(value, dict) and {"mean", "low", "high"} <= set(value):
        return f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
