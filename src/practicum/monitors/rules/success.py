"""Rules about measures of success: rewards, held-out accuracy and divergence."""

from practicum.monitors import patches
from practicum.monitors.history import StepView
from practicum.monitors.table import (
    MONITORS,
    TINY,
    RuleResult,
    Thresholds,
    find_worst,
    require_limit,
)


@MONITORS.enter_as(
    "M21",
    "held-out accuracy",
    "the upper end of the gain's 95 % interval is below {level:g} in two evaluations in "
    "a row; three end the run",
    (patches.halve_learning_rate,),
    "2604.13016, section 3.3",
    action="checkpoint",
    level=0.0,
    persistence=2,
    escalation=(2.0, "stop"),
)
def judge_heldout_accuracy(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Held-out accuracy below the start's by more than chance; twice in a row counts double."""
    if "heldout_gain_high" not in view.row:
        return None
    # The first evaluation has no earlier evaluation, so its score is at most 1.
    bounds = view.get_last("heldout_gain_high", 2)
    *before, is_worse = [bound < require_limit(limits.level) for bound in bounds]
    score = 1.0 + sum(before) if is_worse else 0.0
    return RuleResult("heldout_gain", view.row["heldout_gain"], score, 0.0)


@MONITORS.enter_as(
    "M24",
    "settled prompts",
    "over {level:g} of the prompts have all completions right or all wrong",
    (patches.double_completions,),
    "2603.11178",
    level=0.8,
)
def judge_settled_prompts(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Prompts with only right or only wrong completions, if the objective uses rewards."""
    share = view.smooth("settled_prompts", 5) if view.facts.has_rewards else None
    if share is None:
        return None
    return RuleResult("settled_prompts", share, share / require_limit(limits.level))


@MONITORS.enter_as(
    "M30",
    "overconfidence",
    "confidence exceeds accuracy by {level:g}, by {change:g} more than at the start, and "
    "the 95 % interval of the rise is above 0",
    (patches.raise_teacher_temperature, patches.use_forward_kl, patches.halve_learning_rate),
    "2604.16830",
    level=0.3,
    change=0.2,
)
def judge_overconfidence(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Held-out completions are over-confident, and over-confidence grew by more than chance."""
    readings = view.get_all("heldout_overconfidence", "heldout_surer", "heldout_surer_low")
    if readings is None:
        return None
    overconfidence, growth, growth_low = readings
    score = min(overconfidence / require_limit(limits.level), growth / require_limit(limits.change))
    score = score if growth_low > 0 else 0.0
    return RuleResult("heldout_overconfidence", overconfidence, score, overconfidence - growth)


@MONITORS.enter_as(
    "M31",
    "plateau",
    "over {level:g}, and no more than {change:g} above its last rise",
    (patches.halve_learning_rate,),
    "patience, as in early stopping",
    action="off",
    level=0.0,
    change=0.02,
    persistence=3,
)
def judge_plateau(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Held-out accuracy no longer rises, once it is above the level."""
    # Patience, as in early stopping. The accuracy to exceed is the accuracy at the last counted
    # rise, at first the accuracy before training, so that many small rises count together.
    accuracies = view.history.get_evaluations("heldout_accuracy")
    first_gain = view.history.get_first("heldout_gain", 1)
    if "heldout_accuracy" not in view.row:
        return None
    if first_gain:
        accuracies = [accuracies[0] - first_gain[0], *accuracies]
    *before, accuracy = accuracies
    best = accuracies[0]
    for earlier in before:
        best = earlier if _is_rise(earlier, best, limits) else best
    is_above_level = bool(before) and max(best, accuracy) > require_limit(limits.level)
    score = float(is_above_level and not _is_rise(accuracy, best, limits))
    return RuleResult("heldout_accuracy", accuracy, score, best)


@MONITORS.enter_as(
    "M36",
    "scorer gap",
    "the scorer's value minus the reward is {change:g} above its baseline, the reward is not, and "
    "the scorer ranks right above wrong answers with {level:g} or less, or nothing is right",
    (patches.use_verifier,),
    "2210.10760",
    level=0.6,
    change=0.2,
    persistence=3,
)
def judge_scorer_gap(view: StepView, limits: Thresholds) -> RuleResult | None:
    """A scorer that a term learns from rewards more and more answers that the verifier rejects."""
    reward, reward_base = view.smooth("reward", 5), view.get_baseline("reward")
    if reward is None or reward_base is None:
        return None
    results = []
    for scorer in view.facts.teaching_scorers:
        name = f"scorer-{scorer}/gap"
        gap, base = view.smooth(name, 5), view.get_baseline(name)
        if gap is None or base is None:
            continue
        # Without right answers, agreement cannot be measured.
        agreement = view.smooth(f"scorer-{scorer}/agreement", 5)
        is_trusted = agreement is not None and agreement > require_limit(limits.level)
        is_better = reward > reward_base
        score = 0.0 if is_trusted or is_better else (gap - base) / require_limit(limits.change)
        results.append(RuleResult(name, gap, score, base))
    return find_worst(results)


@MONITORS.enter_as(
    "M39",
    "distance",
    "{change:g} times the held-out divergence before training, and {level:g} nats per token above it",
    (patches.halve_learning_rate,),
    action="stop",
    level=0.2,
    change=3.0,
    persistence=1,
)
def judge_distance(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The held-out divergence against its value before training; runs without rewards."""
    return None if view.facts.has_rewards else _judge_heldout_divergence(view, limits)


@MONITORS.enter_as(
    "M40",
    "distance with rewards",
    "{change:g} times the held-out divergence before training, and {level:g} nats per token above it",
    (patches.halve_learning_rate,),
    level=0.2,
    change=3.0,
    persistence=1,
)
def judge_distance_with_rewards(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The held-out divergence against its value before training; runs with rewards."""
    return _judge_heldout_divergence(view, limits) if view.facts.has_rewards else None


@MONITORS.enter_as(
    "M41",
    "nothing right",
    "no completion is right in {level:g} steps: check the verifier, the template, the token limit",
    (patches.sample_from_teacher, patches.add_dataset_answers),
    level=20,
    persistence=1,
)
def judge_rewards(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Steps without a right completion, if the task has a verifier; losses need not use it."""
    count = int(require_limit(limits.level))
    rewards = view.get_last("reward", count)
    if "reward" not in view.row or len(rewards) < count:
        return None
    best = max(rewards)
    return RuleResult("reward", best, float(best <= 0))


def _judge_heldout_divergence(view: StepView, limits: Thresholds) -> RuleResult | None:
    name = "heldout_reverse_kl"
    readings = view.get_all(name, f"{name}_rise")
    if readings is None:
        name = "heldout_reverse_kl_estimate"
        readings = view.get_all(name, f"{name}_rise_low")
    if readings is None:
        return None
    divergence, rise = readings
    before = divergence - rise
    ratio = divergence / (require_limit(limits.change) * max(before, TINY))
    return RuleResult(name, divergence, min(ratio, rise / require_limit(limits.level)), before)


def _is_rise(accuracy: float, best: float, limits: Thresholds) -> bool:
    return accuracy - best > require_limit(limits.change) + TINY
