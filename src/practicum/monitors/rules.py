"""The rules of the monitors, one function each, in the order of the table.

A function returns the reading it looked at, what it compares with, and a score: 1 and above breaks
the rule, below 0.8 the reading has recovered. None means that the step cannot be judged.
`practicum ls monitors` and docs/monitors.md show the docstrings, so they name what a rule looks at.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from practicum.monitors.history import StepView
from practicum.monitors.readings import EDGES

TINY = 1e-12


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The thresholds of a rule: an absolute level, and a change against the run's own beginning."""

    level: float | None = None
    change: float | None = None


@dataclass(frozen=True, slots=True)
class RuleResult:
    """The value of a reading, its baseline, and a score that breaks the rule from 1 on."""

    reading: str
    value: float
    score: float
    baseline: float | None = None


def judge_numbers(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Updates of the last 20 steps left out because a loss or a gradient was not finite."""
    rows = view.history.get_rows(20)
    count = sum(float(bool(row.get("skipped") or row.get("nonfinite"))) for row in rows)
    return RuleResult("skipped", count, count / _require(limits.level))


def judge_gradient_spike(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The gradient norm against the median of the 20 steps before."""
    earlier = [norm for norm in view.get_last("grad_norm", 21)[:-1] if norm > 0]
    if "grad_norm" not in view.row or len(earlier) < 5:
        return None
    norm, base = view.row["grad_norm"], median(earlier)
    return RuleResult("grad_norm", norm, norm / (_require(limits.change) * base), base)


def judge_gradient_collapse(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The gradient vanishes while the divergence stays."""
    norm, norm_base = view.smooth("grad_norm"), view.get_baseline("grad_norm")
    kl, kl_base = view.smooth("reverse_kl"), view.get_baseline("reverse_kl")
    if norm is None or norm_base is None or kl is None or kl_base is None:
        return None
    score = _require(limits.change) * norm_base / max(norm, TINY) if kl > 0.5 * kl_base else 0.0
    return RuleResult("grad_norm", norm, score, norm_base)


def judge_truncation(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Completions cut off by the token limit: many more than at the start, or nearly all."""
    share, base = view.smooth("truncated", 5), view.get_baseline("truncated")
    if share is None or base is None:
        return None
    # Some runs cut off nearly all completions from the start: only a rise of 0.1 makes it an alarm.
    nearly_all = share / _require(limits.level) if share - base >= 0.1 else 0.0
    score = max((share - base) / _require(limits.change), nearly_all)
    return RuleResult("truncated", share, score, base)


def judge_repetition(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Completions that loop, against the share of the start."""
    share, base = view.row.get("repetition"), view.get_baseline("repetition") or 0.0
    if share is None:
        return None
    return RuleResult("repetition", share, (share - base) / _require(limits.level), base)


def judge_length(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Completions much longer or shorter than within the last 30 steps, by four tokens or more."""
    lengths = view.get_last("length", 30)
    if "length" not in view.row or len(lengths) < 13:
        return None
    length, before = median(lengths[-3:]), median(lengths[:10])
    longer = length / max(before, TINY) / _require(limits.level)
    shorter = _require(limits.change) * before / max(length, TINY)
    score = max(longer, shorter) if abs(length - before) >= 4 else 0.0
    return RuleResult("length", length, score, before)


def judge_length_hacking(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The teacher prefers repeated tokens to the others, by more than twice the error."""
    readings = view.get_all("repeated_gap", "repeated_gap_error", "repeated_tokens")
    if readings is None:
        return None
    gap, error, share = readings
    score = min(gap / _require(limits.level), share / 0.05) if gap > 2 * error else 0.0
    return RuleResult("repeated_gap", gap, score)


def judge_stops(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The teacher finds the student's stop tokens very unlikely, even the most plausible tenth."""
    # Gap and level are both negative, so a gap further below zero gives a ratio over 1.
    gap = view.row.get("stop_gap_p90")
    return None if gap is None else RuleResult("stop_gap_p90", gap, gap / _require(limits.level))


def judge_stall(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Overlap stays flat below its maximum for 30 steps while divergence stays flat and high."""
    overlap, divergence = view.get_last("overlap", 30), view.get_last("reverse_kl", 30)
    base = view.get_baseline("reverse_kl")
    if "overlap" not in view.row or base is None or min(len(overlap), len(divergence)) < 30:
        return None
    early, late = median(divergence[:10]), median(divergence[-10:])
    is_flat = late > 0.5 * base and abs(late - early) <= 0.05 * abs(early) and max(overlap) < 0.95
    spread = max(overlap) - min(overlap)
    score = _require(limits.change) / max(spread, TINY) if is_flat else 0.0
    return RuleResult("overlap", spread, score)


def judge_overlap_mass(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The student's mass on the top tokens of both models is low, and lower than at the start."""
    mass, base = view.smooth("overlap_mass"), view.get_baseline("overlap_mass")
    if mass is None or base is None:
        return None
    low, fall = (1.0 - mass) / (1.0 - _require(limits.level)), base - mass
    return RuleResult("overlap_mass", mass, min(low, fall / _require(limits.change)), base)


def judge_entropy_gap(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Entropies of student and teacher move apart over six spans of five steps, after step 50."""
    gaps = view.get_last("entropy_gap", 30)
    if "entropy_gap" not in view.row or len(gaps) < 30 or view.step <= 50:
        return None
    spans = [median(gaps[start : start + 5]) for start in range(0, 30, 5)]
    is_rising = all(later > earlier for earlier, later in pairwise(spans))
    rise = spans[-1] / max(spans[0], TINY) - 1.0
    score = rise / _require(limits.change) if is_rising else 0.0
    return RuleResult("entropy_gap", spans[-1], score, spans[0])


def judge_student_entropy(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Student entropy is low against its baseline and, if known, against the teacher's."""
    entropy, base = view.smooth("student_entropy"), view.get_baseline("student_entropy")
    if entropy is None or base is None:
        return None
    # The entropy of completions that end at once is that of one stop token: M33 reports them.
    is_silent = (view.smooth("empty") or 0.0) > 0.5
    score = max(_require(limits.change) * base, _require(limits.level)) / max(entropy, TINY)
    if is_silent or _is_sharper_than_teacher(view) is False:
        score = 0.0
    return RuleResult("student_entropy", entropy, score, base)


def judge_tail_entropy(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Entropy rises at the end of long completions and not at their beginning."""
    results = []
    for reading in ("student_entropy", "teacher_entropy"):
        bins = [f"{reading}_at_{edge}" for edge in EDGES if f"{reading}_at_{edge}" in view.row]
        if len(bins) < 2:
            continue
        head, tail = view.smooth(bins[0]), view.smooth(bins[-1])
        head_base, tail_base = view.get_baseline(bins[0]), view.get_baseline(bins[-1])
        if head is None or tail is None or head_base is None or tail_base is None:
            continue
        is_flat = head < 1.5 * max(head_base, 0.05)
        score = tail / (_require(limits.change) * max(tail_base, 0.05)) if is_flat else 0.0
        results.append(RuleResult(bins[-1], tail, score, tail_base))
    return _find_worst(results)


def judge_traps(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Wrong completions with a long part on which the teacher agrees unusually well."""
    rate, base = view.smooth("trap_rate"), view.get_baseline("trap_rate")
    if rate is None:
        return None
    rise = 0.0 if base is None else (rate - base) / _require(limits.change)
    return RuleResult("trap_rate", rate, max(rate / _require(limits.level), rise), base)


def judge_dominant_tokens(view: StepView, limits: Thresholds) -> RuleResult | None:
    """A few tokens that the teacher would never write, or that hold half of the divergence."""
    far, few = view.smooth("far_gaps"), view.smooth("concentration")
    level = _require(limits.level)
    results = []
    if far is not None:
        results.append(RuleResult("far_gaps", far, far / level))
    # The fewer tokens hold half of the divergence, the worse, so this ratio is the other way up.
    if few is not None:
        results.append(RuleResult("concentration", few, level / max(few, TINY)))
    return _find_worst(results)


def judge_engine_error(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The sampler's probabilities against the learner's, under the same weights."""
    error, base = view.row.get("probability_error"), view.get_baseline("probability_error")
    if error is None:
        return None
    drift = 0.0 if base is None else (error - base) / _require(limits.change)
    score = max((error - 1.0) / (_require(limits.level) - 1.0), drift)
    return RuleResult("probability_error", error, score, base)


def judge_importance(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The importance weights between the policy that sampled and the policy in training."""
    readings = view.get_all("effective_share", "chi_squared", "importance_mean")
    if readings is None:
        return None
    share, chi_squared, mean = readings
    low_share = _require(limits.level) / max(share, TINY)
    score = max(low_share, chi_squared, mean / 2.0, 0.5 / max(mean, TINY))
    return RuleResult("effective_share", share, score)


def judge_staleness(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The staleness of the oldest twentieth of the completions, in updates."""
    lag = view.row.get("staleness_p95")
    if lag is None or limits.level is None:
        return None
    # Lags are whole numbers: a lag equal to the level is allowed, the next one scores just over 1.
    return RuleResult("staleness_p95", lag, lag / (limits.level + 1.0) + 1e-9)


def judge_teacher_health(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Completions that a teacher leaves unanswered after it answered all at the start."""
    share, base = view.row.get("unanswered"), view.get_baseline("unanswered")
    if share is None or base != 0.0:
        return None
    return RuleResult("unanswered", share, share / _require(limits.level), base)


def judge_constancy(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Completions whose tokens the teacher all finds equally likely: it has lost its weights."""
    share = view.row.get("constant_teacher")
    if share is None:
        return None
    return RuleResult("constant_teacher", share, share / _require(limits.level))


def judge_diversity(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Completions of a prompt become alike, though not right, and the teacher's are not alike."""
    results = []
    for name in ("unique_answers", "distinct_2", "heldout_unique"):
        share, base = view.smooth(name), view.get_baseline(name)
        if share is not None and base is not None and base > 0:
            score = (1.0 - share / base) / _require(limits.change)
            results.append(RuleResult(name, share, score, base))
    worst = _find_worst(results)
    if worst is None:
        return None
    # Right answers are alike by nature. Without rewards, the teacher's entropy decides instead.
    passes, passes_base = view.smooth("pass_at_n", 5), view.get_baseline("pass_at_n")
    is_loss = _is_sharper_than_teacher(view) is not False
    if passes is not None and passes_base:
        is_loss = passes < passes_base
    return worst if is_loss else replace(worst, score=0.0)


def judge_heldout_accuracy(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Held-out accuracy below the start's by more than chance; twice in a row counts double."""
    if "heldout_gain_high" not in view.row:
        return None
    # The first evaluation has none before it, so its score is 1 at most.
    bounds = view.get_last("heldout_gain_high", 2)
    *before, is_worse = [bound < _require(limits.level) for bound in bounds]
    score = 1.0 + sum(before) if is_worse else 0.0
    return RuleResult("heldout_gain", view.row["heldout_gain"], score, 0.0)


def judge_signal(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Share of completions with signal."""
    if view.row.get("tokens") == 0.0:
        return RuleResult("tokens", 0.0, 1.0)
    share = view.row.get("signal_share")
    if share is None:
        return None
    return RuleResult("signal_share", share, float(share <= _require(limits.level)))


def judge_empty_updates(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Updates for which filters, weights and advantages left no token to train on."""
    # An update left out for a number that is not finite trains on nothing either: M1 reports it.
    if "empty_updates" not in view.row or view.row.get("nonfinite"):
        return None
    count = view.row["empty_updates"]
    return RuleResult("empty_updates", count, count / _require(limits.level))


def judge_empty_answers(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Completions without any text."""
    share = view.smooth("empty")
    return None if share is None else RuleResult("empty", share, share / _require(limits.level))


def judge_engagement(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Token weights drop most tokens or almost none."""
    share = view.smooth("weightless")
    if share is None:
        return None
    score = max(share / _require(limits.level), _require(limits.change) / max(share, TINY))
    return RuleResult("weightless", share, score)


def judge_settled_prompts(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Prompts whose completions are all right or all wrong, if the objective uses rewards."""
    share = view.smooth("settled_prompts", 5) if view.facts.has_rewards else None
    if share is None:
        return None
    return RuleResult("settled_prompts", share, share / _require(limits.level))


def judge_scorer_gap(view: StepView, limits: Thresholds) -> RuleResult | None:
    """A scorer that a term learns from rewards more and more what the verifier does not."""
    reward, reward_base = view.smooth("reward", 5), view.get_baseline("reward")
    if reward is None or reward_base is None:
        return None
    results = []
    for scorer in view.facts.teaching_scorers:
        name = f"scorer-{scorer}/gap"
        gap, base = view.smooth(name, 5), view.get_baseline(name)
        if gap is None or base is None:
            continue
        # Without right answers there is no agreement to be measured, and none to trust.
        agreement = view.smooth(f"scorer-{scorer}/agreement", 5)
        is_trusted = agreement is not None and agreement > _require(limits.level)
        is_better = reward > reward_base
        score = 0.0 if is_trusted or is_better else (gap - base) / _require(limits.change)
        results.append(RuleResult(name, gap, score, base))
    return _find_worst(results)


def judge_scorer_numbers(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Updates of a scorer in the last 20 steps left out because its loss or gradient was not finite."""
    names = {name for name in view.history.list_names("scorer-") if name.endswith("/skipped")}
    counts = {
        name: float(sum(bool(row.get(name)) for row in view.history.get_rows(20))) for name in names
    }
    level = _require(limits.level)
    return _find_worst([RuleResult(name, n, n / level) for name, n in sorted(counts.items())])


def judge_teacher_shares(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The share of the loss that comes from each of several teachers."""
    smoothed = {name: view.smooth(name, 5) for name in view.history.list_names("teacher_share/")}
    shares = {name: share for name, share in smoothed.items() if share is not None}
    if len(shares) < 2:
        return None
    most, least = max(shares, key=lambda name: shares[name]), min(shares, key=lambda n: shares[n])
    # With two teachers an even share is 0.5, so the bound must be higher than for three or more.
    bound = max(_require(limits.level), 1.6 / len(shares))
    high = RuleResult(most, shares[most], shares[most] / bound)
    low = RuleResult(least, shares[least], _require(limits.change) / max(shares[least], TINY))
    return high if high.score >= low.score else low


def judge_refresh_shock(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The divergence right after the teacher is copied anew, against the step before."""
    divergence, period = view.get_last("reverse_kl", 2), view.facts.refresh_period
    if period is None or view.step == 1 or (view.step - 1) % period or len(divergence) < 2:
        return None
    before, after = divergence
    if before <= 0:
        return None
    score = _require(limits.change) * before / max(after, TINY)
    return RuleResult("reverse_kl", after, score, before)


def judge_divergence(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The divergence to the teacher against the first step, if the objective uses no rewards."""
    # The baseline of ten steps is no use: too high a learning rate has ruined the student by then.
    divergence, start = view.smooth("reverse_kl", 5), view.history.get_first("reverse_kl", 1)
    if divergence is None or view.facts.has_rewards or view.step < 3:
        return None
    base = start[0]
    ratio = divergence / (_require(limits.change) * max(base, TINY))
    score = min(ratio, (divergence - base) / _require(limits.level))
    return RuleResult("reverse_kl", divergence, score, base)


def judge_distance(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The held-out divergence to the teacher compared with that before training, in a run without rewards."""
    return None if view.facts.has_rewards else _judge_heldout_divergence(view, limits)


def judge_distance_with_rewards(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The held-out divergence to the teacher compared with that before training, in a run with rewards."""
    return _judge_heldout_divergence(view, limits) if view.facts.has_rewards else None


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
    ratio = divergence / (_require(limits.change) * max(before, TINY))
    return RuleResult(name, divergence, min(ratio, rise / _require(limits.level)), before)


def judge_overconfidence(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Held-out completions are more confident than right, and more so by more than chance."""
    readings = view.get_all("heldout_overconfidence", "heldout_surer", "heldout_surer_low")
    if readings is None:
        return None
    overconfidence, growth, growth_low = readings
    score = min(overconfidence / _require(limits.level), growth / _require(limits.change))
    score = score if growth_low > 0 else 0.0
    return RuleResult("heldout_overconfidence", overconfidence, score, overconfidence - growth)


def judge_plateau(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Held-out accuracy no longer rises, once it is above the level."""
    # Patience, as in early stopping. The accuracy to exceed is that of the last rise that counted,
    # at first the accuracy before training, so that many small rises count together.
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
    is_above_level = bool(before) and max(best, accuracy) > _require(limits.level)
    score = float(is_above_level and not _is_rise(accuracy, best, limits))
    return RuleResult("heldout_accuracy", accuracy, score, best)


def _is_rise(accuracy: float, best: float, limits: Thresholds) -> bool:
    return accuracy - best > _require(limits.change) + TINY


def _is_sharper_than_teacher(view: StepView) -> bool | None:
    """Return True if student entropy is under half the teacher's, or None if one is not known."""
    student, teacher = view.smooth("student_entropy"), view.smooth("teacher_entropy")
    return None if student is None or teacher is None else student < 0.5 * teacher


def _find_worst(results: list[RuleResult]) -> RuleResult | None:
    return max(results, key=lambda result: result.score, default=None)


def judge_derailment(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Turns after a wrong turn are wrong more often than turns after right ones, in 32 or more."""
    readings = view.get_all("wrong_after", "wrong_before", "turns_after_wrong")
    if readings is None or readings[2] < 32:
        return None
    after, before, _ = readings
    return RuleResult("wrong_after", after, (after - before) / _require(limits.change), before)


def judge_needless_calls(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Right answers call more tools than others to the same prompt."""
    surplus = view.smooth("calls_surplus")
    if surplus is None:
        return None
    return RuleResult("calls_surplus", surplus, surplus / _require(limits.level))


def _require(limit: float | None) -> float:
    assert limit is not None, "the table gives this monitor the threshold that its rule reads"
    return limit
