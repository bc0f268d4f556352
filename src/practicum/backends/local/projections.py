"""Create, train, save and restore the maps of `dual_space` together with the student's weights."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from practicum.functional.dual_space import Projections
from practicum.functional.head import Head
from practicum.losses.both_spaces import start_projections
from practicum.types import Datum

TO_STUDENT, TO_TEACHER = "dual_space.to_student", "dual_space.to_teacher"
"""The names of the maps among the trained weights."""


def prepare_projections(
    parameters: dict[str, Any],
    optimizer: torch.optim.AdamW,
    pace: float | None,
    datums: Sequence[Datum],
    head: Head,
    decide: Callable[[Callable[[], Projections | None]], Projections | None],
) -> None:
    """Add the maps to the trained weights if the objective has maps and a teacher sent states.

    `pace` is their relative learning rate, None for an objective without maps. `decide` lets one of
    several processes compute a result for all.
    """
    if pace is None:
        return
    if TO_STUDENT not in parameters:
        maps = decide(partial(_find_first_maps, head, datums))
        if maps is None:
            return
        add_projections(parameters, optimizer, maps)
    # Set at each update: a schedule may change it, and a checkpoint does not store it.
    optimizer.param_groups[-1]["pace"] = pace


def _find_first_maps(head: Head, datums: Sequence[Datum]) -> Projections | None:
    """Return the maps of the first signal with states, on the CPU; None if no signal has states."""
    # Use the first signal of each kind: all signals of a teacher have the same head.
    started = (start_projections(head, datum.signal) for datum in datums)
    maps = next((pair for pair in started if pair is not None), None)
    return maps and Projections(maps.to_student.cpu(), maps.to_teacher.cpu())


def add_projections(
    parameters: dict[str, Any], optimizer: torch.optim.AdamW, maps: Projections
) -> None:
    """Train two maps in a separate parameter group, on the student's device."""
    device = next(iter(parameters.values())).device
    added = {
        name: torch.nn.Parameter(weight.to(device, copy=True))
        for name, weight in ((TO_STUDENT, maps.to_student), (TO_TEACHER, maps.to_teacher))
    }
    parameters.update(added)
    optimizer.add_param_group({"params": list(added.values()), "pace": 1.0})


def restore_projections(
    parameters: dict[str, Any], optimizer: torch.optim.AdamW, saved: Mapping[str, Tensor]
) -> None:
    """Allocate the maps of a saved state, if the trainer does not have them yet."""
    if TO_STUDENT not in saved or TO_STUDENT in parameters:
        return
    maps = Projections(saved[TO_STUDENT], saved[TO_TEACHER])
    add_projections(parameters, optimizer, maps)


def find_projections(parameters: Mapping[str, Any], pace: float | None) -> Projections | None:
    """Return the current maps, or None for an objective without maps."""
    if pace is None or TO_STUDENT not in parameters:
        return None
    return Projections(parameters[TO_STUDENT], parameters[TO_TEACHER])
