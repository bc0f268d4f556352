"""The command line and Python use the same names for the same things."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import typer.main

import practicum
from practicum.cli.after import hold_chat
from practicum.cli.app import app
from practicum.cli.plan import build_plan
from practicum.runs.exporting import export_run

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "run": practicum.run,
    "doctor": practicum.doctor,
    "compare": practicum.compare,
    "plan": build_plan,
    "eval": practicum.evaluate,
    "chat": hold_chat,
    "export": export_run,
}
OF_SHELL = {"as_json", "debug", "help"}
OF_PYTHON = {"progress", "console"}
OTHER_COMMANDS = {("compare", "fit")}
"""The options that turn a command into another: `compare --fit` runs nothing."""

OTHER_DEFAULTS = {("doctor", "out")}
"""The shell always writes the diagnosis, and Python returns it."""


def list_options(command: str) -> dict[str, Any]:
    """Return a command's arguments and options with their defaults, None for an empty one."""
    group = typer.main.get_command(app)
    parameters = group.commands[command].params  # type: ignore[attr-defined]
    return {
        parameter.name: parameter
        for parameter in parameters
        if parameter.name not in OF_SHELL and (command, parameter.name) not in OTHER_COMMANDS
    }


@pytest.mark.parametrize("command", FUNCTIONS)
def test_the_names_are_those_of_python(command: str) -> None:
    options = list_options(command)
    arguments = inspect.signature(FUNCTIONS[command]).parameters
    assert options.keys() == arguments.keys() - OF_PYTHON
    for name, parameter in options.items():
        if parameter.param_type_name == "option":
            flag = f"--{name.replace('_', '-')}"
            assert flag in parameter.opts, f"{command} {name}: {parameter.opts}"
        default = arguments[name].default
        if (
            default is not inspect.Parameter.empty
            and parameter.param_type_name == "option"
            and (command, name) not in OTHER_DEFAULTS
        ):
            assert str(parameter.default or "") == str(default or ""), f"{command} {name}"
