"""Loss terms with a separate pass: in the teacher's context, or on an environment's tokens.

The aggregate and the returns of all other terms are therefore not affected by these terms.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from practicum.core.randomness import seed_of
from practicum.objective import Objective
from practicum.ports import Teacher, TrainingClient
from practicum.types import Datum, ForwardResult


def accumulate_gradient(
    student: TrainingClient, datums: Sequence[Datum], objective: Objective, seed: int
) -> ForwardResult:
    """Accumulate the gradient of the objective, in one pass for each kind of term.

    The result is about the first pass: the student's tokens after its own prompt, if any term is
    about them. Later passes add their number of tokens and their losses to its metrics.
    """
    (first, objective), *later = objective.split_passes().items()
    result = student.forward_backward([_CHANGES[first](d) for d in datums], objective, seed)
    metrics = dict(result.metrics)
    for name, part in later:
        changed = [_CHANGES[name](datum) for datum in datums]
        metrics[f"{name}_tokens"] = float(sum(int(d.rollout.loss_mask.sum()) for d in changed))
        if metrics[f"{name}_tokens"]:
            # Answers without a loss still count in the mean reward of their group.
            more = student.forward_backward(changed, part, seed_of(seed, name))
            metrics |= {
                f"{name}_{metric}": value
                for metric, value in more.metrics.items()
                if metric.startswith("loss")
            }
    return replace(result, metrics=metrics)


def add_contexts(datums: Sequence[Datum], objective: Objective, teacher: Teacher) -> list[Datum]:
    """Return the datums with the prompts of the teacher's context, if a term reads them."""
    if not any(term.context == "teacher" for term in objective.losses):
        return list(datums)
    bound = [teacher.bind_prompt(datum.rollout.prompt) for datum in datums]
    return [
        replace(datum, context=None if client is None else client.prompt_tokens)
        for datum, client in zip(datums, bound, strict=True)
    ]


def _turn_to_context(datum: Datum) -> Datum:
    """Return the datum after the prompt of the teacher's context; without one it has no loss."""
    rollout = datum.rollout
    if datum.context is None:
        mask = torch.zeros_like(rollout.loss_mask)
        return replace(datum, rollout=replace(rollout, loss_mask=mask))
    # States that the student kept while it wrote belong to its own prompt.
    return replace(datum, rollout=replace(rollout, prompt_tokens=datum.context, states=None))


def _turn_to_environment(datum: Datum) -> Datum:
    """Return the datum with a loss only at the environment's tokens."""
    mask = datum.rollout.mark_tokens_by("environment")
    return replace(datum, rollout=replace(datum.rollout, loss_mask=mask))


_CHANGES: Mapping[str, Callable[[Datum], Datum]] = {
    "own": lambda datum: datum,
    "context": _turn_to_context,
    "observed": _turn_to_environment,
}
