"""Loss terms on an environment's tokens, in addition to the terms on the student's tokens.

The terms on the environment's tokens use a separate pass over the conversations. The aggregate and
the returns of all other terms are therefore not affected by the environment's tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

from practicum.core.randomness import seed_of
from practicum.objective import Objective
from practicum.ports import TrainingClient
from practicum.types import Datum, ForwardResult


def accumulate_gradient(
    student: TrainingClient, datums: Sequence[Datum], objective: Objective, seed: int
) -> ForwardResult:
    """Accumulate the gradient of the objective, with a second pass for the environment's tokens.

    The result is about the student's tokens; if all terms are on environment tokens, it is about
    the environment's tokens.
    """
    of_writers, observed = objective.split_observed()
    if observed is None:
        return student.forward_backward(datums, objective, seed)
    conversations = [_turn_to_environment(datum) for datum in datums]
    if of_writers is None:
        return student.forward_backward(conversations, observed, seed)
    result = student.forward_backward(datums, of_writers, seed)
    conversations = [datum for datum in conversations if datum.rollout.loss_mask.any()]
    metrics = {"observed_tokens": float(sum(int(d.rollout.loss_mask.sum()) for d in conversations))}
    if conversations:
        more = student.forward_backward(conversations, observed, seed_of(seed, "observed"))
        metrics |= {
            f"observed_{name}": value
            for name, value in more.metrics.items()
            if name.startswith("loss")
        }
    return replace(result, metrics=result.metrics | metrics)


def _turn_to_environment(datum: Datum) -> Datum:
    """Return the datum with a loss only at the environment's tokens."""
    mask = datum.rollout.mark_tokens_by("environment")
    return replace(datum, rollout=replace(datum.rollout, loss_mask=mask))
