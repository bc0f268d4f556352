"""Rules about the updates: gradients, importance weights, and tokens that are trained on."""

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
    "M1",
    "numbers",
    "{level:g} or more updates of 20 were left out because a loss or gradient was not finite",
    (patches.halve_learning_rate,),
    level=1.0,
    persistence=1,
)
def judge_numbers(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Updates of the last 20 steps left out because a loss or a gradient was not finite."""
    rows = view.history.get_rows(20)
    count = sum(float(bool(row.get("skipped") or row.get("nonfinite"))) for row in rows)
    return RuleResult("skipped", count, count / require_limit(limits.level))


@MONITORS.enter_as(
    "M3",
    "gradient collapse",
    "at most {change:g} times the baseline while reverse_kl is over half of its baseline",
    (patches.use_bounded_divergence, patches.halve_learning_rate),
    "2604.13016, section 6.2",
    change=0.1,
    persistence=4,
)
def judge_gradient_collapse(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The gradient vanishes while the divergence does not fall."""
    norm, norm_base = view.smooth("grad_norm"), view.get_baseline("grad_norm")
    kl, kl_base = view.smooth("reverse_kl"), view.get_baseline("reverse_kl")
    if norm is None or norm_base is None or kl is None or kl_base is None:
        return None
    score = (
        require_limit(limits.change) * norm_base / max(norm, TINY) if kl > 0.5 * kl_base else 0.0
    )
    return RuleResult("grad_norm", norm, score, norm_base)


@MONITORS.enter_as(
    "M16",
    "engine error",
    "over {level:g}, or {change:g} over the baseline",
    (patches.leave_engine_out, patches.correct_importance),
    "NeMo-RL, its GRPO guide",
    "published",
    action="stop",
    level=1.05,
    change=0.02,
    persistence=5,
)
def judge_engine_error(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The sampler's probabilities against the learner's, under the same weights."""
    error, base = view.row.get("probability_error"), view.get_baseline("probability_error")
    if error is None:
        return None
    drift = 0.0 if base is None else (error - base) / require_limit(limits.change)
    score = max((error - 1.0) / (require_limit(limits.level) - 1.0), drift)
    return RuleResult("probability_error", error, score, base)


@MONITORS.enter_as(
    "M17",
    "importance weights",
    "an effective share under {level:g}, a chi-squared over 1, or a mean outside 0.5 to 2",
    (patches.correct_importance, patches.reduce_staleness),
    "verl, docs/algo/rollout_corr.md",
    "published",
    level=0.3,
)
def judge_importance(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The importance weights between the policy that sampled and the policy in training."""
    readings = view.get_all("effective_share", "chi_squared", "importance_mean")
    if readings is None:
        return None
    share, chi_squared, mean = readings
    low_share = require_limit(limits.level) / max(share, TINY)
    score = max(low_share, chi_squared, mean / 2.0, 0.5 / max(mean, TINY))
    return RuleResult("effective_share", share, score)


@MONITORS.enter_as(
    "M18",
    "staleness",
    "over the level, which has to be set",
    (patches.reduce_staleness,),
    "verl, docs/advance/fully_async.md",
)
def judge_staleness(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The staleness of the oldest twentieth of the completions, in updates."""
    lag = view.row.get("staleness_p95")
    if lag is None or limits.level is None:
        return None
    # Lags are whole numbers: a lag equal to the level is allowed, the next one scores just over 1.
    return RuleResult("staleness_p95", lag, lag / (limits.level + 1.0) + 1e-9)


@MONITORS.enter_as(
    "M23",
    "engagement",
    "weights drop over {level:g} of the tokens, or under {change:g}",
    (patches.use_all_tokens,),
    "the SimOPD audit",
    action="log",
    level=0.5,
    change=0.001,
)
def judge_engagement(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Token weights drop most tokens or almost none."""
    share = view.smooth("weightless")
    if share is None:
        return None
    score = max(
        share / require_limit(limits.level), require_limit(limits.change) / max(share, TINY)
    )
    return RuleResult("weightless", share, score)


@MONITORS.enter_as(
    "M32",
    "empty updates",
    "{level:g} or more updates of a step had no token to train on and were skipped",
    (patches.remove_filters, patches.double_completions),
    level=1.0,
)
def judge_empty_updates(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Updates for which filters, weights and advantages left no token to train on."""
    # An update that was skipped because of a number that is not finite also trains on nothing: M1
    # reports it.
    if "empty_updates" not in view.row or view.row.get("nonfinite"):
        return None
    count = view.row["empty_updates"]
    return RuleResult("empty_updates", count, count / require_limit(limits.level))


@MONITORS.enter_as(
    "M38",
    "scorer's numbers",
    "{level:g} or more updates of a scorer in 20 steps were left out because its loss or gradient "
    "was not finite",
    (patches.halve_scorer_rates,),
    level=1.0,
    persistence=1,
)
def judge_scorer_numbers(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Updates of a scorer in the last 20 steps left out because its loss or gradient was not finite."""
    names = {name for name in view.history.list_names("scorer-") if name.endswith("/skipped")}
    counts = {
        name: float(sum(bool(row.get(name)) for row in view.history.get_rows(20))) for name in names
    }
    level = require_limit(limits.level)
    return find_worst([RuleResult(name, n, n / level) for name, n in sorted(counts.items())])
