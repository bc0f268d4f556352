"""Create, train, save and restore the maps of `dual_space` together with the student's weights."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from practicum.functional.dual_space import Projections, fit_map
from practicum.functional.head import Head
from practicum.losses.both_spaces import read_common_rows
from practicum.types import Datum

TO_STUDENT = "dual_space.to_student"
"""The name of the learned map among the trained weights."""

FirstMaps = tuple[Tensor | None, Tensor]
"""The maps that preserve the logits of common tokens: to the student, if it is new, and to the teacher."""


def prepare_projections(
    parameters: dict[str, Any],
    optimizer: torch.optim.AdamW,
    pace: float | None,
    datums: Sequence[Datum],
    head: Head,
    decide: Callable[[Callable[[], FirstMaps | None]], FirstMaps | None],
) -> Projections | None:
    """Return the maps if the objective has maps and a teacher sent states, else None.

    The first call adds the map to the student to the trained weights. The map to the teacher does
    not learn: each call fits it to the student's current head. `pace` is the relative learning
    rate, None for an objective without maps. `decide` lets one of several processes compute a
    result for all.
    """
    if pace is None:
        return None
    maps = decide(partial(_fit_maps, head, datums, is_new=TO_STUDENT not in parameters))
    if maps is None:
        return None
    to_student, to_teacher = maps
    if to_student is not None:
        add_map(parameters, optimizer, to_student)
    # Set at each update: a schedule may change it, and a checkpoint does not store it.
    optimizer.param_groups[-1]["pace"] = pace
    return Projections(parameters[TO_STUDENT], to_teacher.to(parameters[TO_STUDENT].device))


def _fit_maps(head: Head, datums: Sequence[Datum], *, is_new: bool) -> FirstMaps | None:
    """Fit the maps to the first signal with states, on the CPU; None if no signal has states."""
    # Use the first signal of each kind: all signals of a teacher have the same head.
    rows = (read_common_rows(head, datum.signal) for datum in datums)
    pair = next((both for both in rows if both is not None), None)
    if pair is None:
        return None
    student, teacher = pair
    return fit_map(teacher, student).cpu() if is_new else None, fit_map(student, teacher).cpu()


def add_map(parameters: dict[str, Any], optimizer: torch.optim.AdamW, weight: Tensor) -> None:
    """Train the map to the student in a separate parameter group, on the student's device."""
    device = next(iter(parameters.values())).device
    parameters[TO_STUDENT] = torch.nn.Parameter(weight.to(device, copy=True))
    optimizer.add_param_group({"params": [parameters[TO_STUDENT]], "pace": 1.0})


def restore_projections(
    parameters: dict[str, Any], optimizer: torch.optim.AdamW, saved: Mapping[str, Tensor]
) -> None:
    """Allocate the learned map of a saved state, if the trainer does not have it yet."""
    if TO_STUDENT in saved and TO_STUDENT not in parameters:
        add_map(parameters, optimizer, saved[TO_STUDENT])
