"""A training step of your own from the library's calls: `python examples/own_step.py`.

The student learns only from its wrong answers, and the teacher scores no others. Models, task and objective come from a
recipe; the step is yours, so it may leave out, repeat or replace any of its four calls. A test proves that the step
without its own line is the library's.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import practicum
from practicum.recipe import Recipe
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.training.loop import assemble, generate_rollouts
from practicum.types import Rollout

Choice = Callable[[Sequence[Rollout]], list[Rollout]]


def keep_mistakes(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the answers that the task's verifier does not accept."""
    return [rollout for rollout in rollouts if rollout.reward == 0.0]


def take_step(run: RunComponents, step: int, choose: Choice) -> dict[str, float]:
    """Sample and reward, score, differentiate, update; returns the metrics of the step."""
    parts, plan = run.parts, run.settings.plan(step)
    rollouts = generate_rollouts(step, plan, parts, run.settings, parts.sampler, version=step - 1)
    chosen = choose(rollouts)
    metrics = {"answers": float(len(rollouts)), "trained": float(len(chosen))}
    if not chosen or plan.objective.signal is None:
        return metrics
    datums = assemble(chosen, parts.teacher.score(chosen, plan.objective.signal))
    result = parts.student.forward_backward(datums, plan.objective, seed=step)
    return {**metrics, **result.metrics, **parts.student.optim_step(plan.adam)}


def train(recipe: Recipe, choose: Choice) -> list[dict[str, float]]:
    """Take all steps of a recipe; returns a row of metrics a step."""
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(assemble_run(recipe, Path(folder))) as run,
    ):
        for step in range(1, recipe.train.steps + 1):
            rows.append(take_step(run, step, choose))
            if step % 10 == 0 or step == 1:
                row = rows[-1]
                print(
                    f"step {step:2d}  {row['trained']:.0f} of {row['answers']:.0f} answers are wrong, "
                    f"reverse KL {row.get('reverse_kl', 0.0):.2f} nats per token"
                )
    return rows


def main() -> None:
    """Run sixty steps of the toy recipe: the student comes closer to its teacher."""
    train(practicum.load_recipe("smoke/toy", ["train.steps=60"]), keep_mistakes)


if __name__ == "__main__":
    main()
