"""On-policy distillation of language models: one loop, every method a configuration.

Three depths, from the outside in:

    practicum.run("recipes/quickstart.yaml")                       a recipe
    practicum.distill(student=..., teacher=..., task=..., ...)     its sections as arguments
    practicum.training.loop.train_step(step, parts, settings)               the seven calls of one step

`practicum.doctor("recipes/quickstart.yaml")` examines a recipe before it is run, `practicum.evaluate`
measures a run on other prompts, and `practicum.compare` runs several recipes; `practicum.functional` is the mathematics on its own.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from practicum import functional
    from practicum.errors import PracticumError
    from practicum.recipe import Recipe, load_recipe
    from practicum.runs import RunResult, distill, evaluate, load_run
    from practicum.runs.pipeline import run
    from practicum.studies.compare import compare
    from practicum.studies.doctor import Diagnosis, doctor

__version__ = "0.1.0"

__all__ = [
    "Diagnosis",
    "PracticumError",
    "Recipe",
    "RunResult",
    "compare",
    "distill",
    "doctor",
    "evaluate",
    "functional",
    "load_recipe",
    "load_run",
    "run",
]

_HOMES = {
    "Diagnosis": "practicum.studies.doctor",
    "PracticumError": "practicum.errors",
    "Recipe": "practicum.recipe",
    "RunResult": "practicum.runs",
    "compare": "practicum.studies.compare",
    "distill": "practicum.runs",
    "doctor": "practicum.studies.doctor",
    "evaluate": "practicum.runs",
    "load_recipe": "practicum.recipe",
    "load_run": "practicum.runs",
    "run": "practicum.runs.pipeline",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import practicum` stays instant."""
    import importlib

    if name == "functional":
        return importlib.import_module("practicum.functional")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'practicum' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, and not the modules that happen to be imported."""
    return ["__version__", *__all__]
