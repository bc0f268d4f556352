"""The commands of the command line."""

# Each command imports its modules when it is called: importing torch takes seconds, and help and
# argument errors do not need it.

import atexit
import gc
import json
import logging
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from practicum.cli._arguments import (
    Debug,
    Json,
    Overrides,
    RecipeArgument,
    RecipeCommand,
    RunOrModel,
    handle_errors,
)
from practicum.cli._output import show_waiting
from practicum.cli.inspecting import check, convert, laws, list_choices, schema, show
from practicum.cli.queries import answers, evaluate, score
from practicum.core.leaving import leave_if_stuck

app = typer.Typer(
    name="practicum",
    help="On-policy distillation of language models.\n\nExample: practicum run quickstart",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command(epilog="Example: practicum run quickstart train.steps=4 --out runs", cls=RecipeCommand)
def run(  # noqa: PLR0913  (its options, one by one)
    recipe: RecipeArgument,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="parent of the run folder")] = Path(
        "runs"
    ),
    resume: Annotated[
        bool, typer.Option("--resume", help="continue from the newest valid checkpoint")
    ] = False,
    allow_changed: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-changed",
            metavar="KEY",
            help="with --resume: a key that may differ from the original run; repeatable",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace an earlier run in the run folder")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train: evaluate, distil and evaluate again. A pipeline runs its stages in order.

    A new run first refuses what `practicum check` refuses, such as a teacher with other tokens. It
    warns of too little memory and of a learning rate far above the table of settings.
    """
    with handle_errors(debug):
        from practicum.runs.pipeline import run as run_recipe
        from practicum.runs.progress import open_console

        with closing(open_console(as_json=as_json)) as console:
            result = run_recipe(
                recipe,
                overrides or (),
                out=out,
                resume=resume,
                allow_changed=allow_changed or (),
                overwrite=overwrite,
                console=console,
            )
        result.check_rows()


app.command(epilog="Example: practicum check my.yaml", cls=RecipeCommand)(check)
app.command(epilog="Example: practicum convert verl.yaml --out recipe.yaml")(convert)


@app.command(epilog="Example: practicum doctor quickstart --prompts 32", cls=RecipeCommand)
def doctor(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    prompts: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="number of training prompts for the student to answer"
        ),
    ] = 16,
    samples: Annotated[int, typer.Option(metavar="N", min=1, help="answers per prompt")] = 4,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON file, or a folder for NAME.doctor.json; the page is next to it "
            "[runs/NAME.doctor.json]",
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check before a run if student, teacher and prompts fit. Suggests changes to the recipe."""
    with handle_errors(debug):
        from practicum.cli.doctor import examine_recipe
        from practicum.runs.progress import open_console

        with closing(open_console(as_json=as_json)) as console:
            code = examine_recipe(recipe, overrides or [], prompts, samples, out, console)
    raise typer.Exit(code)


app.command(
    epilog="Example: practicum show quickstart objective.divergence='jsd(0.3)'", cls=RecipeCommand
)(show)
app.command(epilog="Example: practicum schema > recipe.schema.json")(schema)
app.command("ls", epilog="Example: practicum ls recipes --like entropy")(list_choices)
app.command(epilog="Example: practicum laws my_package.losses:chi_square")(laws)


@app.command("plan", epilog="Example: practicum plan quickstart --gpu rtx4090", cls=RecipeCommand)
def plan_recipe(  # noqa: PLR0913  (its options, one by one)
    recipe: RecipeArgument,
    overrides: Overrides = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="available memory, such as 8GiB; default: this machine's"
        ),
    ] = None,
    answer_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="tokens per answer; default: as measured, or the most allowed"
        ),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate/--no-calibrate", help="run two steps to estimate seconds")
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="CARD", help="on one GPU, such as rtx4090, also without one here"),
    ] = None,
    cluster: Annotated[
        list[str] | None,
        typer.Option(metavar="GPUS", help="also on a cluster, such as 64xh100; again for another"),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Estimate the cost and the memory of a recipe. Compares SFT and RL, and shows settings that fit."""
    with handle_errors(debug):
        from practicum.cli.plan import build_plan, format_plan

        plan_json = build_plan(
            recipe, overrides or [], memory, answer_tokens, calibrate, cluster or (), gpu
        )
        print(json.dumps(plan_json) if as_json else "\n".join(format_plan(plan_json)))


app.command(
    epilog="Example: practicum answers my.yaml --out answers.jsonl --n 4", cls=RecipeCommand
)(answers)
app.command(epilog="Example: practicum score my.yaml --out scored.jsonl", cls=RecipeCommand)(score)


app.command(
    "eval",
    epilog="Example: practicum eval runs/mine --rows test.jsonl --verifier math",
    cls=RecipeCommand,
)(evaluate)


@app.command(epilog="Example: practicum chat runs/quickstart")
def chat(
    target: RunOrModel,
    temperature: Annotated[float, typer.Option(metavar="T", min=0.0, help="0: greedy")] = 0.0,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="longest answer, in tokens")
    ] = 128,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="for a model: a system turn")
    ] = None,
    teacher: Annotated[
        bool,
        typer.Option("--teacher", help="for a run: the teacher answers too, in its own context"),
    ] = False,
    debug: Debug = False,
) -> None:
    """Chat with a student, or with a student and its teacher."""
    with handle_errors(debug):
        from practicum.cli.after import hold_chat

        hold_chat(target, temperature, max_new_tokens, system, teacher)


@app.command(
    epilog="Example: practicum export runs/quickstart my-model --push-to-hub my-name/my-model"
)
def export(
    run_folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="run folder; RUN@best, RUN@STEP: not the newest")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder that does not exist")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="only the LoRA adapter, for peft, instead of a model")
    ] = False,
    format: Annotated[
        str | None,
        typer.Option("--format", help="of a drafter: speculators (vLLM) or sglang (SpecForge)"),
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="also upload it, to a private repository")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="make a new repository public")] = False,
    debug: Debug = False,
) -> None:
    """Write the student as a model folder with a model card. Other engines load it."""
    with handle_errors(debug):
        from practicum.runs.exporting import export_run

        with show_waiting():
            result = export_run(
                run_folder,
                folder,
                adapter=adapter,
                format=format,
                push_to_hub=push_to_hub,
                public=public,
            )
        print(*result.describe(), sep="\n")


@app.command(epilog="Example: practicum report runs/quickstart")
def report(
    run_folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="folder of a run or of a finished pipeline")
    ],
    debug: Debug = False,
) -> None:
    """Write report.html again. Reads only the files of a run or of a finished pipeline."""
    with handle_errors(debug):
        from practicum.cli.after import rewrite_report

        print(f"wrote {rewrite_report(run_folder)}")


@app.command(epilog="Example: practicum watch runs/quickstart --open")
def watch(
    run_folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="folder of a run or pipeline, active or finished")
    ],
    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT", min=0, max=65535, help="default: 8765, or a free one if it is taken"
        ),
    ] = None,
    open_browser: Annotated[
        bool, typer.Option("--open", help="open the page in the browser")
    ] = False,
    debug: Debug = False,
) -> None:
    """Show the report live in a browser of this machine."""
    with handle_errors(debug):
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
    seeds: Annotated[
        int, typer.Option(metavar="N", min=1, help="runs per arm: seeds 0, 1, 2, ...")
    ] = 3,
    budget: Annotated[
        str,
        typer.Option(
            metavar="UNIT=N", help="flops=1e12, tokens=100000, seconds=60 or steps=40 per run"
        ),
    ] = "steps",
    out: Annotated[Path, typer.Option(metavar="DIR", help="folder of the comparison")] = Path(
        "runs/compare"
    ),
    jobs: Annotated[
        int, typer.Option(metavar="N", min=1, help="runs at a time, as far as memory allows")
    ] = 2,
    resume: Annotated[bool, typer.Option("--resume", help="run only what is not finished")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace an earlier comparison in the folder")
    ] = False,
    set: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="an override for every arm"),
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="fit a scaling law to finished runs; run nothing")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare methods, or sweep a setting, at equal task and budget.

    Every arm has the same prompts and seeds. Writes a table and a page.

    A sweep has an arm for each value: low=my.yaml,optimizer.learning_rate=1e-5 high=my.yaml,...
    """
    with handle_errors(debug):
        from practicum.cli.compare import compare_arms, fit_law
        from practicum.studies.compare import ComparisonBudget, ComparisonSettings

        if fit:
            return fit_law(arms, as_json)
        settings = ComparisonSettings(
            seeds,
            ComparisonBudget.parse(budget),
            jobs,
            out,
            resume,
            tuple(set or ()),
            overwrite=overwrite,
        )
        compare_arms(arms, settings, as_json)


@app.command(epilog="Example: practicum probe http://localhost:8000")
def probe(  # noqa: PLR0913 - one a line of its help
    url: Annotated[str, typer.Argument(help="address of the server")],
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="name of the model there; default: the only one"),
    ] = None,
    dialect: Annotated[
        str, typer.Option(metavar="NAME", help="auto, vllm, sglang, echo or chat")
    ] = "auto",
    api_key_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="environment variable with the key")
    ] = None,
    allow_http: Annotated[
        bool, typer.Option("--allow-http", help="allow plain http to another machine")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="compare it with this model; exit code 5 if it is another"
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Probe a server for use as a teacher. Measures signals, candidates and time.

    Prints the teacher of a recipe, also for `practicum serve`. A server that does not answer ends it
    within half a minute.
    """
    with handle_errors(debug):
        from practicum.cli.probe import print_probe

        print_probe(
            url,
            against,
            as_json=as_json,
            model=model,
            dialect=dialect,
            api_key_env=api_key_env,
            allow_http=allow_http,
        )


@app.command(epilog="Example: practicum serve smollm2-135m-instruct")
def serve(  # noqa: PLR0913 - one a line of its help
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="folders, hub names, packaged names; NAME=MODEL renames one; or a recipe's file "
            "with the task served, and overrides",
        ),
    ],
    student: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="a model that may be trained; default: all"),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="address to listen on; other than this machine's needs a token"
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="0: any free port")
    ] = 8000,
    out: Annotated[Path, typer.Option(metavar="DIR", help="folder of checkpoints or run")] = Path(
        "served"
    ),
    memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", min=0, help="GiB for the weights of all base models"),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="a file of mode 0600 with the token")
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="auto, float32 or bfloat16")] = "auto",
    device: Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or mps")] = "auto",
    request_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="most tokens per request: its samples times max_tokens"
        ),
    ] = 2**21,
    debug: Debug = False,
) -> None:
    """Serve models over HTTP, to sample, score and train. The protocol is the Tinker API.

    A recipe's student answers in OpenAI's chat protocol, and learns from the users' next messages.
    """
    with handle_errors(debug):
        from practicum.cli.serve import ServerOptions, is_recipe, serve_models, serve_recipe

        options = ServerOptions(
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
        serve_recipe(options) if is_recipe(models) else serve_models(options)


def _print_version(version: bool) -> None:
    if version:
        from practicum import __version__

        print(f"practicum {__version__}")
        raise typer.Exit


@app.callback()
def _describe(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="print the version"),
    ] = False,
) -> None:
    """On-policy distillation of language models.

    Example: practicum run quickstart
    """


def main() -> None:
    """Run the command line. An error for the user is one line on stderr and an exit code."""
    _drop_start_folder()
    # A tracking client may give the root logger a handler: every note would be printed twice.
    logging.getLogger("practicum").propagate = False
    # At exit, the garbage collector would scan every module again, which takes a second.
    atexit.register(gc.freeze)
    try:
        app()
    except SystemExit as end:
        leave_if_stuck(end.code if isinstance(end.code, int) else 0)
        raise


def _drop_start_folder() -> None:
    """Remove the entry that Python itself added to the path; keep every entry that the user named.

    That is the folder of the script, or the working directory with `python -m`. A file there, such
    as json.py, must not replace a module. An empty entry of PYTHONPATH names no folder either.
    """
    start_folder = os.path.dirname(os.path.realpath(sys.argv[0]))
    if not sys.flags.safe_path and sys.path[:1] in ([""], [os.getcwd()], [start_folder]):
        del sys.path[0]
    variable = os.environ.get("PYTHONPATH")
    named = variable.split(os.pathsep) if variable else []
    if "" in named and os.getcwd() not in map(os.path.abspath, filter(None, named)):
        sys.path[:] = [entry for entry in sys.path if entry not in ("", os.getcwd())]
