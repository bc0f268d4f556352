"""The plan of a recipe: operations, bytes, memory and what fits; seconds only after a step was really done."""

import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from practicum.core.notes import hide_notes
from practicum.costs import PHASES, cost_summary
from practicum.errors import PracticumError
from practicum.recipe import Recipe, override, parse_recipe, resolved
from practicum.runs.assembly import assemble_run
from practicum.studies.plan.memory import (
    Memory,
    estimate_fragmentation,
    estimate_memory,
    memory_limit,
    own_bytes,
    update_tokens,
)
from practicum.studies.plan.methods import break_even, methods, wire_bytes
from practicum.studies.plan.paper import DryRun, dry_run
from practicum.training.loop import train_step

log = logging.getLogger(__name__)

PATCHES: tuple[tuple[str, ...], ...] = (
    ("backend.micro_batch_tokens=FITS",),
    ("backend.graph_mib=256",),
    ("backend.graph_mib=64",),
    ("backend.chunk_tokens=32",),
    ("backend.sampling_batch=16",),
    ("backend.sampling_batch=4",),
    ("teacher.residency=disk",),
    ("student.trainable_layers=HALF",),
    ("student.lora={rank: 16, alpha: 32}",),
)
"""Changes that save memory, the cheapest first: those that change rounding and time alone, then where weights are, then what
learns."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Seconds of each phase of a step that was done, its operations, and how long its answers were."""

    seconds: Mapping[str, float]
    flops: Mapping[str, float]
    answer_tokens: float

    def predict(self, flops: Mapping[str, float]) -> dict[str, float]:
        """Seconds of other operations at the same pace."""
        return {
            phase: self.seconds[phase] * flops[phase] / self.flops[phase]
            if self.flops[phase]
            else self.seconds[phase]
            for phase in PHASES
        }


@dataclass(frozen=True, slots=True)
class CostPlan:
    """What a recipe will cost; see `plan_data` for the names."""

    run: DryRun
    memory: Memory
    limit: int
    largest_micro_batch: int
    change: tuple[str, ...] | None
    calibration: StepTiming | None

    @property
    def fits(self) -> bool:
        """Whether the largest phase stays within the limit."""
        return self.memory.peak <= self.limit


def plan(
    recipe: Recipe,
    *,
    limit: int | None = None,
    answer_tokens: int | None = None,
    calibrate: bool = False,
    process: int | None = None,
) -> CostPlan:
    """Plan a recipe; `limit` is in bytes (None: what there is), `calibrate` does two steps of it, the first to warm up.

    `process` is what Python and its libraries take, in bytes (None: what this process takes now).
    """
    process = own_bytes() if process is None else process
    run = dry_run(recipe, answer_tokens)  # refuses what cannot be planned, before any step is done
    calibration = time_step(recipe) if calibrate else None
    if calibration is not None and answer_tokens is None:
        answer_tokens = max(round(calibration.answer_tokens), 1)
        with hide_notes():
            run = dry_run(recipe, answer_tokens)
    memory = estimate_memory(run, process)
    limit = memory_limit(run_device(recipe)) if limit is None else limit
    largest = _largest_micro_batch(run, memory, limit)
    change = (
        None if memory.peak <= limit else _change(recipe, limit, process, answer_tokens, largest)
    )
    return CostPlan(run, memory, limit, largest, change, calibration)


def run_device(recipe: Recipe) -> str:
    """Where the student's weights will be."""
    import torch

    return "cuda" if torch.cuda.is_available() and recipe.student.device != "cpu" else "cpu"


def time_step(recipe: Recipe) -> StepTiming:
    """Do two steps of a recipe in a folder that is thrown away, and time the second."""
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(assemble_run(recipe, Path(folder), scores=Path(folder) / "scores")) as built,
    ):
        log.info("calibrating: two steps, the first to warm up")
        metrics = [train_step(step, built.parts, built.settings).metrics for step in (1, 2)][-1]
    return StepTiming(
        seconds={phase: metrics[f"seconds_{phase}"] for phase in PHASES},
        flops={phase: metrics[f"cost/flops_{phase}"] for phase in PHASES},
        answer_tokens=metrics["length"],
    )


def plan_data(plan: CostPlan) -> dict[str, Any]:
    """The plan as JSON data: a step, the whole run, memory by phase and item, methods beside each other, bytes on a wire.

    `seconds` and what depends on them are None without a calibration.
    """
    run, recipe, record, step = plan.run, plan.run.recipe, plan.run.record, plan.run.metrics
    cost = cost_summary([step])
    steps = recipe.train.steps
    flops = {phase: cost[phase]["flops"] for phase in PHASES}
    seconds = None if plan.calibration is None else plan.calibration.predict(flops)
    whole = cost_summary([step] * steps)
    money = None
    if recipe.prices is not None:
        without_clock = (
            recipe.prices.model_copy(update={"machine_hour": None})
            if seconds is None
            else recipe.prices
        )
        money = without_clock.money(
            whole, 0.0 if seconds is None else steps * sum(seconds.values())
        )
    teacher = next((scorer.shape for scorer in record.scorers.values()), None)
    rows = methods(
        run.prompts, run.answer_tokens, recipe.rollout.n, record.shape, record.learning, teacher
    )
    return {
        "recipe": recipe.name,
        "answer_tokens": run.answer_tokens,
        "models": {
            "student": _model(record.shape) | {"learns": record.learning.parameters},
            **{name: _model(scorer.shape) for name, scorer in record.scorers.items()},
        },
        "step": {"cost": cost, "seconds": seconds},
        "run": {
            "steps": steps,
            "cost": whole,
            "seconds": None if seconds is None else steps * sum(seconds.values()),
            "money": money,
        },
        "memory": {
            "limit": plan.limit,
            "peak": plan.memory.peak,
            "phase": plan.memory.largest,
            "fits": plan.fits,
            "phases": {phase: dict(items) for phase, items in plan.memory.phases.items()},
            "largest_micro_batch": plan.largest_micro_batch,
            "micro_batch": update_tokens(run),
            "recompute": run.graph.recompute,
            "change": None if plan.change is None else list(plan.change),
        },
        "methods": rows,
        "break_even": break_even(rows),
        "wire_bytes": {
            name: wire_bytes(
                sum(len(request.tokens) for request in record.scored[name]),
                sum(len(request.prompt_tokens) for request in record.scored[name]),
                scorer.shape,
            )
            for name, scorer in record.scorers.items()
            if record.scored.get(name)
        },
    }


def _model(shape: Any) -> dict[str, int]:
    return {
        "parameters": shape.parameters,
        "body": shape.body,
        "head": shape.head,
        "layers": shape.layers,
        "width": shape.width,
        "vocabulary": shape.vocabulary,
    }


def _largest_micro_batch(run: DryRun, memory: Memory, limit: int) -> int:
    """How many tokens may go through the student together within the limit; 0 where the rest fills it already."""
    others = sum(
        size for name, size in memory.phases["update"].items() if name != "graph and its gradients"
    )
    room = (limit - others) // estimate_fragmentation(run) - run.body.update.fixed
    return max(room // max(run.body.update.each, 1), 0)


def _change(
    recipe: Recipe, limit: int, process: int, answer_tokens: int | None, largest: int
) -> tuple[str, ...] | None:
    """The first of the changes, alone and then with those before it, under which the recipe fits; None where none helps."""
    if limit < process:
        return None
    patches = [
        tuple(text.replace("FITS", str(largest)) for text in patch)
        for patch in PATCHES[0 if largest else 1 :]
    ]
    together = [tuple(chain(*patches[: count + 1])) for count in range(1, len(patches))]
    for patch in [*patches, *together]:
        changed = _patched(recipe, patch)
        if changed is None:
            continue
        texts, other = changed
        try:
            with hide_notes():
                run = dry_run(other, answer_tokens)
        except PracticumError:
            continue  # a change that this recipe cannot have
        if estimate_memory(run, process).peak <= limit:
            return texts
    return None


def _patched(recipe: Recipe, patch: Sequence[str]) -> tuple[tuple[str, ...], Recipe] | None:
    """The recipe with a change, and the change as it is written; None where it has no such place."""
    layers = str(max((recipe.student.trainable_layers or 2) // 2, 1))
    texts = tuple(text.replace("HALF", layers) for text in patch)
    texts = tuple({text.partition("=")[0]: text for text in texts}.values())
    if (
        any(text.startswith("teacher.residency") for text in texts)
        and recipe.teacher.type != "model"
    ):
        texts = tuple(text for text in texts if not text.startswith("teacher.residency"))
    if not texts:
        return None
    data = resolved(recipe)
    for text in texts:
        override(data, text)
    try:
        return texts, parse_recipe(data, recipe.name)
    except PracticumError:
        return None
