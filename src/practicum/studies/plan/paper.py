"""One step on paper: the real loop over the recipe's own prompts, with models that have sizes and no weights."""

import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from practicum.costs import Footprint, GraphPlan
from practicum.ports.paper import PaperRecord
from practicum.recipe import Recipe
from practicum.runs.assembly import assemble_on_paper
from practicum.training.loop import train_step
from practicum.types import Metrics


@dataclass(frozen=True, slots=True)
class DryRun:
    """A recipe without weights: what its first step asks of whom, what that costs, and how the update is cut into passes.

    `body` is what a pass through the student takes in that update.
    """

    recipe: Recipe
    record: PaperRecord
    metrics: Metrics
    prompts: list[tuple[int, ...]]
    graph: GraphPlan
    body: Footprint
    answer_tokens: int


def dry_run(recipe: Recipe, answer_tokens: int | None) -> DryRun:
    """Go through the first step of a recipe; answers have `answer_tokens`, or as many as they may."""
    tokens = min(answer_tokens or recipe.rollout.max_new_tokens, recipe.rollout.max_new_tokens)
    with tempfile.TemporaryDirectory() as folder:
        built, paper = assemble_on_paper(recipe, Path(folder), tokens)
        with closing(built):
            result = train_step(1, built.parts, built.settings)
    record = paper.record
    graph = record.cut(record.data)
    prompts = list(dict.fromkeys(rollout.prompt_tokens for rollout in result.rollouts))
    return DryRun(
        recipe, record, result.metrics, prompts, graph, record.body(graph.recompute), tokens
    )
