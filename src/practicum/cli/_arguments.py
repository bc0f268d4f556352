"""Arguments and options that several commands share, with their help."""

from typing import Annotated

import typer

RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="YAML file of a recipe or pipeline, or a packaged name such as quickstart",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help=(
            "for example train.steps=4, or stages.NAME.train.steps=4; "
            "teacher=off: train on the reward alone"
        ),
    ),
]
RunOrModel = Annotated[
    str, typer.Argument(metavar="RUN|MODEL", help="run folder, model folder or model name")
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object per line")]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]
