"""Trace a prompt through the code: files, functions and moves between files from a recipe to a step of smoke/toy.

    python -m benchmarks journey [--moves 20]

A move is a call from a function of one file to a function of another file; a step has 64 rollouts. The second step is traced, to
exclude one-time work such as the memory trial at the first update. Its shapes are the dataclasses with one instance per rollout.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TypeVar

from benchmarks.measuring import build_parser, format_table, open_session

T = TypeVar("T")
RECIPE = "smoke/toy"
ROLLOUTS = 64
UPDATE = "forward_backward"
"""The function of an update."""
OVERRIDES = ("student.model.pretrain.steps=5", "teacher.model.pretrain.steps=5")


@dataclass
class Journey:
    """The functions that were called and the dataclasses that were made, how often from one file to another, and how deep.

    `given_objective` has the functions that an update called with the objective or one of its terms.
    """

    functions: set[tuple[str, str]] = field(default_factory=set)
    moves: Counter[tuple[str, str]] = field(default_factory=Counter)
    depth: int = 0
    made: Counter[str] = field(default_factory=Counter)
    given_objective: set[tuple[str, str]] = field(default_factory=set)

    def to_row(self) -> list[int]:
        """Return files, functions, moves and depth."""
        files = {file for file, _ in self.functions}
        return [len(files), len(self.functions), self.moves.total(), self.depth]


def main() -> None:
    """Report one line."""
    parser = build_parser(__doc__)
    parser.add_argument(
        "--moves", type=int, default=0, help="number of most frequent moves to show"
    )
    options = parser.parse_args()
    session = open_session("journey", options)
    legs = _follow_legs()
    rows = {name: leg.to_row() for name, leg in legs.items()}
    print(
        format_table(
            ["leg", "files", "functions", "moves", "depth"],
            [[name, *row] for name, row in rows.items()],
        )
    )
    shapes = sorted(name for name, count in legs["step"].made.items() if count >= ROLLOUTS)
    print(f"{len(shapes)} shapes of a rollout in a step: {', '.join(shapes)}")
    functions = legs["step"].given_objective
    places = len(functions), len({file for file, _ in functions})
    print(
        f"{places[0]} functions in {places[1]} files of an update are given the objective or a term"
    )
    for (start, end), count in legs["step"].moves.most_common(options.moves):
        print(f"{count:5} {start} -> {end}")
    session.report({}, **rows, shapes=shapes, given_objective=places)


def _follow_legs() -> dict[str, Journey]:
    from practicum.recipe import load_recipe
    from practicum.runs.assembly import assemble_run
    from practicum.training.loop import train_step

    recipe, loading = follow(lambda: load_recipe(RECIPE, OVERRIDES))
    with tempfile.TemporaryDirectory() as folder:
        built, assembling = follow(lambda: assemble_run(recipe, Path(folder)))
        train_step(1, built.parts, built.settings)
        _, stepping = follow(lambda: train_step(2, built.parts, built.settings))
    return {"read": loading, "assemble": assembling, "step": stepping}


def follow(work: Callable[[], T]) -> tuple[T, Journey]:
    """Return what some work gives, and the journey through the package that it takes."""
    import practicum
    from practicum.objective import Objective, Term

    root = f"{Path(practicum.__file__).parent}/"
    journey, stack = Journey(), list[tuple[str, str]]()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code.co_filename == "<string>" and code.co_name == "__init__" and event == "call":
            made = type(frame.f_locals["self"])
            if made.__module__.startswith("practicum."):
                journey.made[made.__name__] += 1
        if not code.co_filename.startswith(root):
            return
        if event == "return" and stack:
            stack.pop()
        elif event == "call":
            file = code.co_filename.removeprefix(root)
            if not code.co_name.startswith("<"):
                journey.functions.add((file, code.co_qualname))
                names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                arguments = (frame.f_locals.get(name) for name in names if name != "self")
                is_update = any(name == UPDATE for _, name in stack) or code.co_name == UPDATE
                if is_update and any(isinstance(part, Objective | Term) for part in arguments):
                    journey.given_objective.add((file, code.co_qualname))
            if stack and stack[-1][0] != file:
                journey.moves[stack[-1][0], file] += 1
            stack.append((file, code.co_name))
            journey.depth = max(journey.depth, len(stack))

    sys.setprofile(note)
    try:
        return work(), journey
    finally:
        sys.setprofile(None)


if __name__ == "__main__":
    main()
