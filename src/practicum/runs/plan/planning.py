"""The plan of a recipe: FLOPs, bytes, memory and what fits; seconds only if a step was timed."""

import logging
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from practicum.core.notes import hide_notes
from practicum.core.waits import show_wait
from practicum.costs import PHASES, summarize_costs
from practicum.costs.workload import Gpu
from practicum.errors import PracticumError, RecipeError, ResourceError
from practicum.recipe import Recipe
from practicum.runs.assembly import assemble_run
from practicum.runs.overrides import apply_overrides
from practicum.runs.plan.dry_runs import DryRun, simulate_step
from practicum.runs.plan.memory import (
    Memory,
    count_update_tokens,
    estimate_fragmentation,
    estimate_memory,
    measure_process,
    read_memory_limit,
)
from practicum.runs.plan.methods import compare_methods, count_wire_bytes, find_break_even
from practicum.training.loop import train_step

log = logging.getLogger(__name__)

SAVINGS = (
    "backend.micro_batch_tokens=FITS",
    "backend.graph_mib=256",
    "backend.graph_mib=64",
    "backend.chunk_tokens=32",
    "backend.sampling_batch=16",
    "backend.sampling_batch=4",
    "teacher.residency=disk",
    "student.trainable_layers=HALF",
    "student.lora={rank: 16, alpha: 32}",
)
"""Overrides that save memory, the cheapest first.

First overrides that change only rounding and time, then the placement of weights, then the trained
weights.
"""


GPU_SAVINGS = (
    "backend.micro_batch_tokens=FITS",
    "backend.sampling_batch=64",
    "backend.sampling_batch=16",
    "backend.graph_mib=1024",
    "backend.chunk_tokens=256",
    "backend.chunk_tokens=64",
    "teacher.residency=swap",
    "student.trainable_layers=HALF",
    "student.lora={rank: 16, alpha: 32}",
    "teacher.quantization=nf4",
    "student.quantization=nf4",
)
"""The same for a GPU, where a loss over fewer than 64 tokens at a time would take too long."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The seconds and FLOPs of each phase of a timed step, and the mean length of its answers."""

    seconds: Mapping[str, float]
    flops: Mapping[str, float]
    answer_tokens: float

    def predict(self, flops: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of each phase for new FLOPs at the same pace."""
        return {
            phase: self.seconds[phase] * flops[phase] / self.flops[phase]
            if self.flops[phase]
            else self.seconds[phase]
            for phase in PHASES
        }


@dataclass(frozen=True, slots=True)
class CostPlan:
    """The predicted cost of a recipe; `change` are overrides with which it would fit.

    `largest_micro_batch` is in tokens, `limit` in bytes.
    """

    run: DryRun
    memory: Memory
    limit: int
    largest_micro_batch: int
    change: tuple[str, ...] | None
    calibration: StepTiming | None

    @property
    def fits(self) -> bool:
        """True if the largest phase stays within the limit."""
        return self.memory.peak <= self.limit


def plan(
    recipe: Recipe,
    *,
    limit: int | None = None,
    answer_tokens: int | None = None,
    calibrate: bool = False,
    process: int | None = None,
    for_cluster: bool = False,
    gpu: Gpu | None = None,
) -> CostPlan:
    """Plan a recipe; with `calibrate`, run two steps of it to estimate seconds.

    `limit` is the memory in bytes (None: this machine's). `process` is the memory of Python and its
    libraries in bytes (None: this process's). With `for_cluster`, suggest no change for this
    machine, and measure the inputs of `describe_clusters`. `gpu` is the planned GPU (None: this
    machine's, if the student is on one).
    """
    own_gpu = find_gpu(recipe)
    gpu = gpu or own_gpu
    if gpu is not None and recipe.student.device == "cpu":
        raise ResourceError("plan: student.device is cpu; remove it, or --gpu")
    if recipe.student.drafter is not None:
        raise RecipeError(
            "student.drafter: the cost of drafting and of a drafter's update is not planned; run a "
            "few steps, with train.steps=3"
        )
    process = measure_process() if process is None else process
    # The dry run refuses recipes that cannot be planned, so it comes before the calibration steps.
    with show_wait("one step without weights"):
        run = simulate_step(recipe, answer_tokens, for_cluster=for_cluster, gpu=gpu)
    calibration = time_step(recipe) if calibrate else None
    if calibration is not None and answer_tokens is None:
        # Answers as long as they really were, not as long as they may be.
        answer_tokens = max(round(calibration.answer_tokens), 1)
        with hide_notes():
            run = simulate_step(recipe, answer_tokens, for_cluster=for_cluster, gpu=gpu)
    memory = estimate_memory(run, process)
    if limit is None:
        limit = read_memory_limit("cpu") if gpu is None else gpu.usable_memory
        limit = (
            min(limit, read_memory_limit("cuda")) if gpu is not None and gpu is own_gpu else limit
        )
    largest = _find_largest_micro_batch(run, memory, limit)
    change = None
    if not for_cluster and (0 if gpu else process) <= limit < memory.peak:
        with show_wait("looking for a change that fits into memory"):
            change = _find_change(run, limit, process, largest)
    return CostPlan(run, memory, limit, largest, change, calibration)


def choose_device(recipe: Recipe) -> str:
    """Return the device of the student's weights, `cuda` or `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() and recipe.student.device != "cpu" else "cpu"


def find_gpu(recipe: Recipe) -> Gpu | None:
    """Return this machine's GPU if the student is on it."""
    import torch

    if choose_device(recipe) == "cpu":
        return None
    device = torch.cuda.get_device_properties(0)
    # The rates do not matter to a plan of memory.
    return Gpu(device.name, 1.0, 1.0, 1.0, device.total_memory)


def time_step(recipe: Recipe) -> StepTiming:
    """Run two steps of a recipe in a temporary folder, and time the second."""
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(assemble_run(recipe, Path(folder), scores=Path(folder) / "scores")) as components,
    ):
        log.info("calibrating: two steps, the first to warm up")
        with show_wait("steps to time", total=2) as wait:
            train_step(1, components.parts, components.settings)
            wait.advance()
            metrics = train_step(2, components.parts, components.settings).metrics
    return StepTiming(
        seconds={phase: metrics[f"seconds_{phase}"] for phase in PHASES},
        flops={phase: metrics[f"cost/flops_{phase}"] for phase in PHASES},
        answer_tokens=metrics["length"],
    )


def describe_plan(plan: CostPlan) -> dict[str, Any]:
    """Return the plan as JSON data: a step, the run, memory, methods, and bytes on a wire.

    `seconds` and what depends on them are None without a calibration.
    """
    run, recipe, record, step = plan.run, plan.run.recipe, plan.run.record, plan.run.metrics
    steps = recipe.train.steps
    step_cost, run_cost = summarize_costs([step]), summarize_costs([step] * steps)
    seconds = run_seconds = money = None
    if plan.calibration is not None:
        seconds = plan.calibration.predict({phase: step_cost[phase]["flops"] for phase in PHASES})
        run_seconds = steps * sum(seconds.values())
    prices = recipe.prices
    if prices is not None:
        if seconds is None:
            prices = prices.model_copy(update={"machine_hour": None})
        money = prices.compute_money(run_cost, run_seconds or 0.0)
    teacher = next((scorer.dims for scorer in record.scorers.values()), None)
    dims, learning = record.dims, record.trainable_dims
    rows = compare_methods(
        run.prompts, run.answer_tokens, recipe.rollout.n, dims, learning, teacher
    )
    return {
        "recipe": recipe.name,
        "answer_tokens": run.answer_tokens,
        "models": {
            "student": asdict(dims) | {"learns": learning.parameters},
            **{name: asdict(scorer.dims) for name, scorer in record.scorers.items()},
            **{
                name: asdict(scalar.dims) | {"learns": scalar.trainable_dims.parameters}
                for name, scalar in record.scalars.items()
            },
        },
        "step": {"cost": step_cost, "seconds": seconds},
        "run": {
            "steps": steps,
            "cost": run_cost,
            "seconds": run_seconds,
            "money": money,
            "currency": prices and prices.currency,
        },
        "memory": {
            "limit": plan.limit,
            "peak": plan.memory.peak,
            "phase": plan.memory.largest,
            "fits": plan.fits,
            "phases": {phase: dict(items) for phase, items in plan.memory.phases.items()},
            "gpu": plan.run.gpu and plan.run.gpu.name,
            "largest_micro_batch": plan.largest_micro_batch,
            "micro_batch": count_update_tokens(run),
            "recompute": run.graph.recompute,
            "change": None if plan.change is None else list(plan.change),
        },
        "methods": rows,
        "break_even": find_break_even(rows),
        "repeats_prompts": recipe.rollout.n > 1 and not _learns_from_groups(recipe),
        "wire_bytes": {
            name: count_wire_bytes(
                sum(len(request.tokens) for request in record.score_requests[name]),
                sum(len(request.prompt_tokens) for request in record.score_requests[name]),
                scorer.dims,
            )
            for name, scorer in record.scorers.items()
            if record.score_requests.get(name)
        },
    }


def _learns_from_groups(recipe: Recipe) -> bool:
    """Return True if a term learns from rewards, or from several answers to a prompt together."""
    return any(
        term.learns_from_reward
        or term.filter != "all"
        or term.samples_by
        or term.gradient.subtracts == "group_mean"
        for term in recipe.objective.losses
    )


def _find_largest_micro_batch(run: DryRun, memory: Memory, limit: int) -> int:
    """Return the most tokens that may go through the student at once.

    0 if other items fill the limit.
    """
    other_bytes = sum(
        size for name, size in memory.phases["update"].items() if name != "graph and its gradients"
    )
    available = (limit - other_bytes) // estimate_fragmentation(run) - run.body.update.fixed
    return max(available // max(run.body.update.each, 1), 0)


def _find_change(run: DryRun, limit: int, process: int, largest: int) -> tuple[str, ...] | None:
    """Return the first saving with which the recipe fits, else the shortest list of the first savings, else None."""
    recipe = run.recipe

    def fits(change: tuple[str, ...]) -> bool:
        try:
            with hide_notes():
                changed = apply_overrides(recipe, change)
                changed_run = simulate_step(changed, run.answer_tokens, gpu=run.gpu)
        except PracticumError:
            return False  # a change that this recipe cannot have
        return estimate_memory(changed_run, process).peak <= limit

    layers = max((recipe.student.trainable_layers or 2) // 2, 1)
    savings = [
        text.replace("FITS", str(largest)).replace("HALF", str(layers))
        for text in (SAVINGS if run.gpu is None else GPU_SAVINGS)
        if (largest or "FITS" not in text)
        and (recipe.teacher.type == "model" or not text.startswith("teacher."))
    ]
    # One change is easier to accept than several, so lists come after all single ones.
    singles = [(text,) for text in savings]
    together = [savings[:count] for count in range(2, len(savings) + 1)]
    for texts in (*singles, *together):
        # Of two values for one key the later, stronger one counts.
        values = {text.partition("=")[0]: text for text in texts}
        if "student.lora" in values:
            values.pop("student.trainable_layers", None)  # adapters in all layers are milder
        if fits(tuple(values.values())):
            for key in list(values):
                fewer = {name: text for name, text in values.items() if name != key}
                values = fewer if fewer and fits(tuple(fewer.values())) else values
            return tuple(values.values())
    return None
