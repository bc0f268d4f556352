"""What to write into a recipe against what a monitor found: candidates in order, of which the first that the recipe takes is shown.

A candidate is a mapping of places in the resolved recipe to what should stand there, as an override on the command line has it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from practicum.monitors.facts import find_self_teachers, name_of

Patch = Callable[[Mapping[str, Any]], dict[str, Any] | None]
"""From a resolved recipe to changes, or None where there is nothing of the kind to change."""


def _always(place: str, value: str | int) -> Patch:
    """Return the patch that writes one value at one place, whatever the recipe."""
    return lambda recipe: {place: value}


def halve_learning_rate(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Half the learning rate."""
    return {"optimizer.learning_rate": _digits(recipe["optimizer"]["learning_rate"] / 2)}


def with_answers(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """One good answer beside the student's own: the mixture of Stable-OPD (2604.08527)."""
    return {"rollout.source": "join(dataset)"} if _on_policy(recipe) else None


def teacher_writes(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """A cold start on the teacher's answers (2604.13016)."""
    return {"rollout.source": "teacher"} if _on_policy(recipe) else None


bounded = _always("objective.losses.0.divergence", "jsd(0.5)")
"""A divergence that no single token can blow up, and that covers what the teacher does (GKD 2306.13649)."""


def softer(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """The teacher at temperature 2, where it is the target: a student inherits its sharpness (2604.00626, section 7.2)."""
    soft = {"objective.losses.0.target": "teacher(temperature=2)"}
    return soft if name_of(recipe["objective"]["losses"][0]["target"]) == "teacher" else None


covering = _always("objective.losses.0.divergence", "forward_kl")
"""A divergence that asks for all that the teacher would say, not for the likeliest of it."""


def shorter(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """Half as many new tokens."""
    return (
        {"rollout.max_new_tokens": recipe["rollout"]["max_new_tokens"] // 2}
        if _room(recipe)
        else None
    )


def train_on_prefix(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """Learn from the first half of an answer alone (2605.31490, 2605.07804)."""
    return (
        {"objective.losses.0.weights": f"prefix({recipe['rollout']['max_new_tokens'] // 2})"}
        if _room(recipe)
        else None
    )


trusting = _always("objective.losses.0.weights", "trust")
"""Leave out the tokens that the teacher would never have written."""

clipped = _always("objective.losses.0.clip", "advantage(-5, 5)")
"""Hold the advantage of a token within bounds (2603.11137)."""

corrected = _always("objective.losses.0.correction", "ratio_truncate(2)")
"""Weigh each token by a truncated ratio of learner to sampler."""

whole = _always("objective.losses.0.signal", "full")
"""The whole distribution."""

with_tail = _always("objective.losses.0.signal", "topk(64, student, bucket)")
"""Candidates, and one bucket for all other tokens."""

unweighted = _always("objective.losses.0.weights", "all")
"""Every token counts."""


def unfiltered(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """Learn from every completion, in each term that filters them."""
    filtered = [
        place for place, term in enumerate(recipe["objective"]["losses"]) if term["filter"] != "all"
    ]
    return {f"objective.losses.{place}.filter": "all" for place in filtered} or None


def more_answers(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Twice as many completions of each prompt."""
    return {"rollout.n": 2 * recipe["rollout"]["n"]}


def reduce_staleness(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Rollouts fewer updates ahead, or replay from half as many completions."""
    ahead = recipe["rollout"]["max_staleness"]
    if ahead:
        return {"rollout.max_staleness": ahead // 2}
    return {"rollout.replay_size": max(recipe["rollout"]["replay_size"] // 2, 1)}


saved_often = _always("train.checkpoint_every", 1)
"""A checkpoint a step, so that nothing is lost when the teacher goes."""


def averaged(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """A self-teacher that follows by an average instead of copies (2605.02943)."""
    alone = [keys for keys in find_self_teachers(recipe) if not any("." in key for key in keys)]
    return {f"{'.'.join(keys)}.weights": "ema" for keys in alone} or None


def _room(recipe: Mapping[str, Any]) -> bool:
    return recipe["rollout"]["max_new_tokens"] >= 2


def _digits(value: float) -> float:
    return float(f"{value:.6g}")


def _on_policy(recipe: Mapping[str, Any]) -> bool:
    return name_of(recipe["rollout"]["source"]) == "student"
