"""Measure the startup seconds: help, reading a recipe on the command line, and the first training step against a warm one.

python -m benchmarks startup [--recipe smoke/toy]
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measuring import (
    build_environment,
    build_parser,
    format_table,
    open_session,
    run_in_process,
    spread,
)

STEPS = 6


def main() -> None:
    """Report one line; all but `check` are wall seconds, so the machine should be idle."""
    parser = build_parser(__doc__)
    parser.add_argument("--recipe", default="smoke/toy")
    parser.add_argument(
        "--measure", action="store_true", help="internal: the seconds of a few steps"
    )
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(_time_steps(options.recipe)))
        return
    session = open_session("startup", options)
    rounds = range(session.warm_up + session.rounds)
    helps = spread([_time_wall("--help") for _ in rounds][session.warm_up :])
    checks = spread([_time_processor("check", "quickstart") for _ in rounds][session.warm_up :])
    runs = [
        run_in_process("benchmarks.startup", "--measure", "--recipe", options.recipe)
        for _ in range(session.rounds)
    ]
    beyond = spread([steps[0] - spread(steps[1:])["median"] for steps in runs])
    warm = spread([spread(steps[1:])["median"] for steps in runs])
    rows = [
        ["practicum --help", helps["median"]],
        ["practicum check quickstart, processor", checks["median"]],
        ["first step beyond a warm one", beyond["median"]],
        ["a warm step", warm["median"]],
    ]
    print(format_table(["what", "seconds"], rows))
    readings = {"startup.help": helps, "startup.check": checks, "startup.first": beyond}
    session.report(readings, recipe=options.recipe, warm_step_seconds=warm)


def _run_practicum(*words: str) -> None:
    command = [sys.executable, "-m", "practicum", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=build_environment())


def _time_wall(*words: str) -> float:
    """Return the wall seconds of a command."""
    start = time.monotonic()
    _run_practicum(*words)
    return time.monotonic() - start


def _time_processor(*words: str) -> float:
    """Return the processor seconds of a command, its own and the system's for it."""

    def read_used() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    before = read_used()
    _run_practicum(*words)
    return read_used() - before


def _time_steps(recipe: str) -> list[float]:
    """Wall seconds of the first steps of a recipe."""
    from practicum.recipe import load_recipe
    from practicum.runs.assembly import assemble_run
    from practicum.training.loop import train_step

    with tempfile.TemporaryDirectory() as folder:
        built = assemble_run(load_recipe(recipe, [f"train.steps={STEPS}"]), models=Path(folder))
        seconds = []
        for step in range(1, STEPS + 1):
            start = time.monotonic()
            train_step(step, built.parts, built.settings)
            seconds.append(time.monotonic() - start)
    return seconds


if __name__ == "__main__":
    main()
