"""A dry run: one step of the real loop over the recipe's own prompts, with weightless models."""

import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from practicum.costs import Footprint, GraphPlan
from practicum.costs.workload import Gpu
from practicum.ports.paper import PaperRecord
from practicum.recipe import Recipe
from practicum.runs.assembly import assemble_on_paper
from practicum.training.loop import train_step
from practicum.types import Metrics


@dataclass(frozen=True, slots=True)
class DryRun:
    """The first step of a recipe without weights: its requests, its metrics, and its micro-batches.

    `graph` is the cut of the update into micro-batches, `body` the memory of one of them.
    """

    recipe: Recipe
    record: PaperRecord
    metrics: Metrics
    prompts: list[tuple[int, ...]]
    graph: GraphPlan
    body: Footprint
    answer_tokens: int
    converses: bool = False
    """True if completions are conversations: their keys and values are kept from turn to turn."""
    recomputed: Footprint | None = None
    """The memory of a pass with recomputed layers, as on a cluster; None if not requested."""
    gpu: Gpu | None = None
    """The GPU that the step is planned for; None: the processor of this machine."""


def simulate_step(
    recipe: Recipe,
    answer_tokens: int | None,
    *,
    for_cluster: bool = False,
    gpu: Gpu | None = None,
) -> DryRun:
    """Run the first step of a recipe without weights.

    Every completion has `answer_tokens` tokens, at most `rollout.max_new_tokens`, which is also the
    default. With `for_cluster` or a `gpu`, `dtype: auto` is chosen for a GPU; the `gpu` also sets
    the limits of the backend.
    """
    limit = recipe.rollout.max_new_tokens
    tokens = min(answer_tokens or limit, limit)
    with tempfile.TemporaryDirectory() as folder:
        components, paper = assemble_on_paper(
            recipe,
            Path(folder),
            tokens,
            "cuda" if for_cluster or gpu else None,
            None if gpu is None else gpu.memory,
        )
        with closing(components):
            result = train_step(1, components.parts, components.settings)
        record = paper.record
        graph = record.cut(record.datums)
        # Measured while the folder of a from-scratch student is there.
        body = record.body(graph.recompute)
        recomputed = record.body(True) if for_cluster else None
    prompts = list(dict.fromkeys(rollout.prompt_tokens for rollout in result.rollouts))
    converses = components.parts.task.converses
    return DryRun(
        recipe, record, result.metrics, prompts, graph, body, tokens, converses, recomputed, gpu
    )
