"""Recipe changes to suggest at an alarm: the first of a monitor's patches that the recipe accepts.

A patch maps places of the resolved recipe to new values, as overrides on the command line do.
"""

from collections.abc import Callable, Mapping
from typing import Any

from practicum.monitors.facts import find_self_teachers, get_choice_name
from practicum.objective import VERIFIER

Patch = Callable[[Mapping[str, Any]], dict[str, Any] | None]
"""A function from a resolved recipe to changes, or to None if the recipe has nothing to change."""


def _write_always(place: str, value: str | int) -> Patch:
    """Return the patch that writes a value at a place of any recipe."""
    return lambda recipe: {place: value}


def halve_learning_rate(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Halve the learning rate."""
    return {"optimizer.learning_rate": round_digits(recipe["optimizer"]["learning_rate"] / 2)}


def add_dataset_answers(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """Add a reference answer to the student's own answers: the mixture of Stable-OPD (2604.08527)."""
    return {"rollout.source": "join(dataset)"} if _is_on_policy(recipe) else None


def sample_from_teacher(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """Start cold, on completions of the teacher (2604.13016)."""
    return {"rollout.source": "teacher"} if _is_on_policy(recipe) else None


use_bounded_divergence = _write_always("objective.losses.0.divergence", "jsd(0.5)")
"""Use a divergence that one token cannot blow up and that covers the teacher (GKD 2306.13649)."""


def raise_teacher_temperature(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """Soften a teacher target to temperature 2: students inherit sharpness (2604.00626, 7.2)."""
    if get_choice_name(recipe["objective"]["losses"][0]["target"]) != "teacher":
        return None
    return {"objective.losses.0.target": "teacher(temperature=2)"}


use_forward_kl = _write_always("objective.losses.0.divergence", "forward_kl")
"""Use a divergence that covers all that the teacher would write, not only the most likely part."""


def halve_completions(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """Halve the number of new tokens."""
    half = recipe["rollout"]["max_new_tokens"] // 2
    return {"rollout.max_new_tokens": half} if half else None


def train_on_prefix(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """Train on the first half of a completion only (2605.31490, 2605.07804)."""
    half = recipe["rollout"]["max_new_tokens"] // 2
    return {"objective.losses.0.weights": f"prefix({half})"} if half else None


drop_implausible_tokens = _write_always("objective.losses.0.weights", "trust")
"""Drop the tokens that the teacher would never have written."""

clip_advantage = _write_always("objective.losses.0.clip", "advantage(-5, 5)")
"""Clip the advantage of each token (2603.11137)."""

correct_importance = _write_always("objective.losses.0.correction", "ratio_truncate(2)")
"""Weight each token by the truncated ratio of learner to sampler."""

use_full_signal = _write_always("objective.losses.0.signal", "full")
"""Use the whole distribution."""

add_tail_bucket = _write_always("objective.losses.0.signal", "topk(64, student, bucket)")
"""Use the top candidates and one bucket for all other tokens."""

use_all_tokens = _write_always("objective.losses.0.weights", "all")
"""Train on every token with equal weight."""


def remove_filters(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """Train on every completion, in each term that filters them."""
    filtered = [
        index for index, term in enumerate(recipe["objective"]["losses"]) if term["filter"] != "all"
    ]
    return {f"objective.losses.{index}.filter": "all" for index in filtered} or None


def double_completions(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Sample twice as many completions of each prompt."""
    return {"rollout.n": 2 * recipe["rollout"]["n"]}


def reduce_staleness(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Halve the staleness, or without any the number of completions that replay draws from."""
    staleness = recipe["rollout"]["max_staleness"]
    if staleness:
        return {"rollout.max_staleness": staleness // 2}
    return {"rollout.replay_size": max(recipe["rollout"]["replay_size"] // 2, 1)}


def leave_engine_out(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """Sample in the trainer, so the sampler's probabilities are the learner's."""
    engine = recipe["rollout"]["engine"]
    return None if engine is None or engine["type"] == "local" else {"rollout.engine": "local"}


def use_verifier(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """Take the verifier's reward in the first term that learns from another scorer's."""
    for number, term in enumerate(recipe["objective"]["losses"]):
        if term["scorer"] != VERIFIER:
            return {f"objective.losses.{number}.scorer": VERIFIER}
    return None


def halve_scorer_rates(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """Halve the learning rate of each scorer that learns."""
    rates = {
        f"scorers.{name}.learning_rate": round_digits(scorer["learning_rate"] / 2)
        for name, scorer in (recipe.get("scorers") or {}).items()
        if "learning_rate" in scorer
    }
    return rates or None


save_every_step = _write_always("train.checkpoint_every", 1)
"""Save a checkpoint at every step, so that no step is lost if the teacher becomes unavailable."""


def use_ema_teacher(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """Let the self-teacher follow by an average instead of by copies (2605.02943)."""
    # A pool names its teachers freely, and an override cannot address a name with a dot in it.
    writable = [keys for keys in find_self_teachers(recipe) if not any("." in key for key in keys)]
    return {f"{'.'.join(keys)}.weights": "ema" for keys in writable} or None


def grow_conversations(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """Begin with conversations of one turn and let them grow, as a curriculum over turns does."""
    if recipe["rollout"]["max_turns"] is not None:
        return None
    # Tasks of a fixed length set the number of turns; 8 is the limit of tasks with tools.
    return {"rollout.max_turns": f"linear(1, {recipe['task'].get('turns', 8)})"}


def correct_turns(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """Let the expert write the first wrong turn of each conversation (SCoRe 2509.14257)."""
    knows_turns = recipe["teacher"]["type"] == "expert" and recipe["rollout"]["max_staleness"] == 0
    return {"rollout.source": "correct"} if knows_turns and _is_on_policy(recipe) else None


def halve_tool_turns(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """Halve the turns with calls after which a conversation ends."""
    # Only tasks with tools count bad calls.
    turns = recipe["task"].get("turns", 1) if "bad_calls" in recipe["task"] else 1
    return {"task.turns": turns // 2} if turns > 1 else None


def round_digits(value: float) -> float:
    """Round a number to six significant digits."""
    return float(f"{value:.6g}")


def _is_on_policy(recipe: Mapping[str, Any]) -> bool:
    return get_choice_name(recipe["rollout"]["source"]) == "student"
