"""The maps of `dual_space` beside the student's weights: made, learned, saved and restored with them."""

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
    """Add the maps to the trained weights if the objective has some and a teacher has spoken.

    `pace` is their relative learning rate, None for an objective without any. `decide` lets one of
    several processes compute for all.
    """
    if pace is None:
        return
    if TO_STUDENT not in parameters:
        maps = decide(partial(_find_first_maps, head, datums))
        if maps is None:
            return
        add_projections(parameters, optimizer, maps)
    # Told at each update: a schedule may change it, and a checkpoint does not know it.
    optimizer.param_groups[-1]["pace"] = pace


def _find_first_maps(head: Head, datums: Sequence[Datum]) -> Projections | None:
    """Return the maps of the first signal that has states, on the CPU; None if all are silent."""
    # The first of each kind: all of a teacher's signals have its head.
    started = (start_projections(head, datum.signal) for datum in datums)
    maps = next((pair for pair in started if pair is not None), None)
    return maps and Projections(maps.to_student.cpu(), maps.to_teacher.cpu())


def add_projections(
    parameters: dict[str, Any], optimizer: torch.optim.AdamW, maps: Projections
) -> None:
    """Let two maps learn in a group of their own, on the device of the student."""
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
    """Make room for the maps of a saved state, if it has any that are not there yet."""
    if TO_STUDENT not in saved or TO_STUDENT in parameters:
        return
    maps = Projections(saved[TO_STUDENT], saved[TO_TEACHER])
    add_projections(parameters, optimizer, maps)


def find_projections(parameters: Mapping[str, Any], pace: float | None) -> Projections | None:
    """Return the maps as they are now, None for an objective without any."""
    if pace is None or TO_STUDENT not in parameters:
        return None
    return Projections(parameters[TO_STUDENT], parameters[TO_TEACHER])
