"""Loss terms in the teacher's context, with a separate pass, or on an environment's tokens.

The aggregate and the returns of all other terms are not affected by these terms.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from practicum.core.randomness import seed_of
from practicum.objective import Objective
from practicum.pictures import is_picture
from practicum.ports import Teacher, TrainingClient
from practicum.types import Datum, ForwardResult


def accumulate_gradient(
    student: TrainingClient, datums: Sequence[Datum], objective: Objective, seed: int
) -> ForwardResult:
    """Accumulate the gradient of the objective, in one pass per prompt.

    The result is about the first terms: the student's tokens after its own prompt, if any term is
    about them. Other terms add their number of tokens and their losses to its metrics.
    """
    results = []
    for part in objective.split_by(lambda term: term.context).values():
        # Answers without a loss still count in the mean reward of their group.
        data = [_turn(datum, part) for datum in datums]
        stream = seed_of(seed, "context") if results else seed
        results.append(student.forward_backward(data, part, stream))
    return results[0].add_losses("context", *results[1:])


def add_contexts(datums: Sequence[Datum], objective: Objective, teacher: Teacher) -> list[Datum]:
    """Return the datums with the prompts of the teacher's context, if a term reads them."""
    if not any(term.context == "teacher" for term in objective.losses):
        return list(datums)
    bound = [teacher.bind_prompt(datum.rollout.prompt) for datum in datums]
    return [
        replace(datum, context=None if client is None else client.prompt_tokens)
        for datum, client in zip(datums, bound, strict=True)
    ]


def _turn(datum: Datum, objective: Objective) -> Datum:
    """Return the datum after the prompt of the terms, with a loss where they learn."""
    rollout, views = datum.rollout, {term.view for term in objective.losses}
    if views == {(False, False)}:
        return datum
    if (False, True) in views:
        mask = rollout.loss_mask & ((False, False) in views)
        # A picture is no token that a model could predict.
        observed = rollout.mark_tokens_by("environment") & ~is_picture(rollout.tokens)
        changed = replace(rollout, loss_mask=mask | observed)
    elif datum.context is None:
        changed = replace(rollout, loss_mask=torch.zeros_like(rollout.loss_mask))
    else:
        # States that the student kept while it wrote belong to its own prompt.
        changed = replace(rollout, prompt_tokens=datum.context, states=None)
    return replace(datum, rollout=changed)
