"""Commands about recipes and their choices that run nothing."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from practicum.cli._arguments import Debug, Json, Overrides, RecipeArgument, handle_errors
from practicum.cli._output import print_rows


def check(recipe: RecipeArgument, overrides: Overrides = None, debug: Debug = False) -> None:
    """Report all mistakes of a recipe, its data and its models. Loads no model."""
    with handle_errors(debug):
        from practicum.recipe.origins import trace_origins
        from practicum.runs.inputs import check_inputs
        from practicum.runs.stages import load_pipeline_or_recipe

        check_inputs(load_pipeline_or_recipe(recipe, overrides or []), recipe)
        for line in trace_origins(recipe, overrides or []).describe_setting():
            print(line)
        print(f"{recipe}: no mistakes found")


def convert(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG",
            help="YAML file or launch script of a verl distillation run, training script of TRL (.py), or "
            "the folder of a run that corrects turns",
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="the recipe or the rows to write")
    ] = Path("recipe.yaml"),
    debug: Debug = False,
) -> None:
    """Turn a verl config or a script of verl or TRL into a recipe. Names each key that is not taken.

    A TRL script (.py) is parsed and never run: GKDConfig, GOLDConfig, DistillationConfig or GRPOConfig.

    A run with `rollout.source: correct` becomes easydistill's rows of corrected steps.
    """
    with handle_errors(debug):
        from practicum.cli.convert import write_recipe, write_rows

        (write_rows if config.is_dir() else write_recipe)(config, out)


def show(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    plot: Annotated[bool, typer.Option("--plot", help="draw the schedules instead")] = False,
    origin: Annotated[
        bool, typer.Option("--origin", help="show the origin of each value instead")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print the recipe with all defaults, or draw its schedules."""
    with handle_errors(debug):
        import yaml

        from practicum.cli.drawing import draw_schedules
        from practicum.recipe import resolve_recipe
        from practicum.recipe.methods import describe_axes
        from practicum.recipe.origins import list_paths, trace_origins
        from practicum.runs.stages import Pipeline, load_pipeline_or_recipe

        loaded = load_pipeline_or_recipe(recipe, overrides or [])
        recipes = loaded.build_recipes() if isinstance(loaded, Pipeline) else {"": loaded}
        settings = loaded.resolve() if isinstance(loaded, Pipeline) else resolve_recipe(loaded)
        if origin:
            origins = trace_origins(recipe, overrides or [])
            for name, stage in recipes.items():
                within = origins.narrow(name) if name else origins
                if name:
                    print(f"# stage {name}")
                for path, value in list_paths(resolve_recipe(stage)):
                    print(f"{path}: {json.dumps(value)} # {within.find(path)}")
            return
        if as_json:
            print(json.dumps(settings))
            return
        for name, stage in recipes.items():
            lines = (
                draw_schedules(stage)
                if plot
                else [f"# {axis}: {choice}" for axis, choice in describe_axes(stage).items()]
            )
            print("\n".join([f"# stage {name}", *lines] if name else lines), end="\n\n")
        if not plot:
            print(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), end="")


def schema(debug: Debug = False) -> None:
    """Print the JSON Schema of a recipe. With it an editor completes and checks YAML."""
    with handle_errors(debug):
        from practicum.recipe.json_schema import build_schema

        print(json.dumps(build_schema(), indent=2))


def list_choices(
    kind: Annotated[
        str,
        typer.Argument(
            help="recipes, teachers, tasks, backends, divergences, signals, ..., or your own module"
        ),
    ] = "recipes",
    like: Annotated[
        str | None,
        typer.Option(metavar="WORD", help="only entries with this word in the description"),
    ] = None,
    family: Annotated[
        str | None, typer.Option(metavar="NAME", help="only recipes of a family, such as white-box")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the names that a recipe can use."""
    with handle_errors(debug):
        from practicum.cli.listing import list_names

        print_rows(list_names(kind, like, family), as_json)


def laws(
    entry: Annotated[
        str,
        typer.Argument(
            metavar="ENTRY",
            help="package.module:entry, also with arguments, or a module; or a name such as jsd",
        ),
    ],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check your own entry with the laws of the built-in entries."""
    with handle_errors(debug):
        from practicum.cli.laws import check_entries, format_verdicts

        verdicts = check_entries(entry)
        for name, laws in verdicts.items():
            rows = [{"entry": name, "holds": verdict.holds, **asdict(verdict)} for verdict in laws]
            print("\n".join(map(json.dumps, rows) if as_json else format_verdicts(name, laws)))
    if not all(verdict.holds for laws in verdicts.values() for verdict in laws):
        raise typer.Exit(1)
