"""What each monitor asks of a step, one function each, in the order of the table.

A function gives the number it looked at, the number it compares with, and a score: 1 and above breaks the rule, below 0.8 the
trouble is over. None means that the step does not say.
"""

from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from practicum.monitors.history import StepView
from practicum.monitors.readings import EDGES

TINY = 1e-12


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The thresholds of a monitor: an absolute level and a change against the run's own beginning."""

    level: float | None = None
    change: float | None = None


@dataclass(frozen=True, slots=True)
class RuleResult:
    """What a monitor found: `score` times as bad as its rule allows."""

    reading: str
    value: float
    score: float
    baseline: float | None = None


def not_finite(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """Updates of the last 20 steps that were left out because a loss or a gradient was no number."""
    rows = [
        max(pair) for pair in zip(_flags(seen, "skipped"), _flags(seen, "nonfinite"), strict=True)
    ]
    return RuleResult("skipped", sum(rows), sum(rows) / _of(limits.level))


def gradient_spike(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """The gradient's norm against the median of the 20 before it."""
    earlier = [norm for norm in seen.last("grad_norm", 21)[:-1] if norm > 0]
    if "grad_norm" not in seen.row or len(earlier) < 5:
        return None
    usual = median(earlier)
    return RuleResult(
        "grad_norm",
        seen.row["grad_norm"],
        seen.row["grad_norm"] / (_of(limits.change) * usual),
        usual,
    )


def gradient_collapse(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """A gradient that is gone while the divergence is not."""
    norm, base = seen.smooth("grad_norm"), seen.baseline("grad_norm")
    far, far_base = seen.smooth("reverse_kl"), seen.baseline("reverse_kl")
    if norm is None or base is None or far is None or far_base is None:
        return None
    left = far > 0.5 * far_base
    return RuleResult(
        "grad_norm", norm, _of(limits.change) * base / max(norm, TINY) if left else 0.0, base
    )


def truncation(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """Answers cut off by the limit: many more than at the start, or nearly all where they were not."""
    cut, base = seen.smooth("truncated", 5), seen.baseline("truncated")
    if cut is None or base is None:
        return None
    nearly_all = cut / _of(limits.level) if cut - base >= 0.1 else 0.0
    return RuleResult("truncated", cut, max((cut - base) / _of(limits.change), nearly_all), base)


def repetition(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """Answers that loop, over those that did at the start."""
    base = seen.baseline("repetition") or 0.0
    now = seen.now("repetition")
    return (
        None
        if now is None
        else RuleResult("repetition", now[0], (now[0] - base) / _of(limits.level), base)
    )


def length(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """Answers much longer or shorter than they were within the last 30 steps, and by four tokens at least."""
    lengths = seen.last("length", 30)
    if "length" not in seen.row or len(lengths) < 13:
        return None
    now, before = median(lengths[-3:]), median(lengths[:10])
    score = max(
        now / max(before, TINY) / _of(limits.level), _of(limits.change) * before / max(now, TINY)
    )
    return RuleResult("length", now, score if abs(now - before) >= 4 else 0.0, before)


def repeated_advantage(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """Repeated tokens that the teacher likes better than the others, beyond twice the error of the difference."""
    now = seen.now("repeated_gap", "repeated_gap_error", "repeated_tokens")
    if now is None:
        return None
    gap, error, share = now
    return RuleResult(
        "repeated_gap", gap, min(gap / _of(limits.level), share / 0.05) if gap > 2 * error else 0.0
    )


def stop_event(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """The student's stop tokens, which the teacher would hardly ever have written: even at the best tenth of them."""
    now = seen.now("stop_gap_p90")
    return None if now is None else RuleResult("stop_gap_p90", now[0], now[0] / _of(limits.level))


def stalled(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """An overlap, short of all, that stands still for 30 steps while the divergence stands still too, and high."""
    overlap, far = seen.last("overlap", 30), seen.last("reverse_kl", 30)
    base = seen.baseline("reverse_kl")
    if "overlap" not in seen.row or base is None or min(len(overlap), len(far)) < 30:
        return None
    early, late = median(far[:10]), median(far[-10:])
    flat = late > 0.5 * base and abs(late - early) <= 0.05 * abs(early) and max(overlap) < 0.95
    moved = max(overlap) - min(overlap)
    return RuleResult("overlap", moved, _of(limits.change) / max(moved, TINY) if flat else 0.0)


def overlap_mass(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """The student's mass on the candidates that both find likeliest, low and lower than at the start."""
    now, base = seen.smooth("overlap_mass"), seen.baseline("overlap_mass")
    if now is None or base is None:
        return None
    score = min((1.0 - now) / (1.0 - _of(limits.level)), (base - now) / _of(limits.change))
    return RuleResult("overlap_mass", now, score, base)


def entropy_gap(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """The distance between the entropies of student and teacher, rising over six spans of five steps, after step 50."""
    gaps = seen.last("entropy_gap", 30)
    if "entropy_gap" not in seen.row or len(gaps) < 30 or seen.step <= 50:
        return None
    spans = [median(gaps[start : start + 5]) for start in range(0, 30, 5)]
    rising = all(later > earlier for earlier, later in pairwise(spans))
    rise = spans[-1] / max(spans[0], TINY) - 1.0
    return RuleResult(
        "entropy_gap", spans[-1], rise / _of(limits.change) if rising else 0.0, spans[0]
    )


def student_entropy(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """A student that is sure of itself: against its beginning, and against its teacher where that is known."""
    now, base = seen.smooth("student_entropy"), seen.baseline("student_entropy")
    if now is None or base is None:
        return None
    score = max(_of(limits.change) * base, _of(limits.level)) / max(now, TINY)
    # The entropy of answers that end at once is that of one stop token, and says nothing of the student's words.
    silent = (seen.smooth("empty") or 0.0) > 0.5
    return RuleResult(
        "student_entropy",
        now,
        score if _sharper_than_teacher(seen) is not False and not silent else 0.0,
        base,
    )


def tail_entropy(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """An entropy at the end of long answers that rises while that at their beginning does not."""
    scores = []
    for who in ("student_entropy", "teacher_entropy"):
        bins = [f"{who}_at_{edge}" for edge in EDGES if f"{who}_at_{edge}" in seen.row]
        if len(bins) < 2:
            continue
        first, last = seen.smooth(bins[0]), seen.smooth(bins[-1])
        first_base, base = seen.baseline(bins[0]), seen.baseline(bins[-1])
        if first is None or last is None or first_base is None or base is None:
            continue
        flat = first < 1.5 * max(first_base, 0.05)
        score = last / (_of(limits.change) * max(base, 0.05)) if flat else 0.0
        scores.append(RuleResult(bins[-1], last, score, base))
    return max(scores, key=lambda finding: finding.score, default=None)


def trap(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """Answers with a long part on which the teacher agrees more than is usual, though they are not right."""
    now, base = seen.smooth("trap_rate"), seen.baseline("trap_rate")
    if now is None:
        return None
    rise = 0.0 if base is None else (now - base) / _of(limits.change)
    return RuleResult("trap_rate", now, max(now / _of(limits.level), rise), base)


def tails(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """A few tokens that the teacher would never have written, or that hold half of all divergence."""
    far, few = seen.smooth("far_gaps"), seen.smooth("concentration")
    scores = [RuleResult("far_gaps", far, far / _of(limits.level))] if far is not None else []
    scores += (
        [RuleResult("concentration", few, _of(limits.level) / max(few, TINY))]
        if few is not None
        else []
    )
    return max(scores, key=lambda finding: finding.score, default=None)


def engine_error(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """The sampler's probabilities against the learner's, under the same weights."""
    now, base = seen.now("probability_error"), seen.baseline("probability_error")
    if now is None:
        return None
    drift = 0.0 if base is None else (now[0] - base) / _of(limits.change)
    return RuleResult(
        "probability_error", now[0], max((now[0] - 1.0) / (_of(limits.level) - 1.0), drift), base
    )


def importance(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """The weights between the policy that sampled and the one that learns."""
    now = seen.now("effective_share", "chi_squared", "importance_mean")
    if now is None:
        return None
    share, chi, mean = now
    scores = [_of(limits.level) / max(share, TINY), chi, mean / 2.0, 0.5 / max(mean, TINY)]
    return RuleResult("effective_share", share, max(scores))


def staleness(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """The age of the oldest twentieth of the completions, in updates, over what is allowed."""
    now = seen.now("staleness_p95")
    if now is None or limits.level is None:
        return None
    return RuleResult("staleness_p95", now[0], now[0] / (limits.level + 1.0) + 1e-9)


def teacher_health(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """Completions without an answer, from a teacher that had answered all."""
    now, base = seen.now("unanswered"), seen.baseline("unanswered")
    return (
        None
        if now is None or base != 0.0
        else RuleResult("unanswered", now[0], now[0] / _of(limits.level), base)
    )


def diversity(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """Answers to one prompt that become alike, and not because they become right or because the teacher's are alike."""
    found = [
        _fall(seen, name, limits) for name in ("unique_answers", "distinct_2", "heldout_unique")
    ]
    worst = max(
        (one for one in found if one is not None), key=lambda finding: finding.score, default=None
    )
    rights, base = seen.smooth("pass_at_n", 5), seen.baseline("pass_at_n")
    if worst is None:
        return None
    wrong = None if rights is None or not base else rights < base
    lost = _sharper_than_teacher(seen) is not False if wrong is None else wrong
    return worst if lost else RuleResult(worst.reading, worst.value, 0.0, worst.baseline)


def heldout_loss(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """Held-out accuracy below that of the start by more than chance; twice in a row counts double."""
    if "heldout_gain_high" not in seen.row:
        return None
    bounds = seen.last("heldout_gain_high", 2)
    worse = [bound < _of(limits.level) for bound in bounds]
    score = 0.0 if not worse[-1] else 1.0 + sum(worse[:-1])
    return RuleResult("heldout_gain", seen.row["heldout_gain"], score, 0.0)


def no_signal(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """Completions that teach something."""
    if seen.row.get("tokens") == 0.0:
        return RuleResult("tokens", 0.0, 1.0)
    now = seen.now("signal_share")
    return (
        None
        if now is None
        else RuleResult("signal_share", now[0], 1.0 if now[0] <= _of(limits.level) else 0.0)
    )


def empty_updates(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """Updates of a step for which filters, weights and advantages left no token to learn from."""
    if "empty_updates" not in seen.row or seen.row.get("nonfinite"):
        return None
    count = seen.row["empty_updates"]
    return RuleResult("empty_updates", count, count / _of(limits.level))


def empty_answers(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """Answers without any text."""
    share = seen.smooth("empty")
    return None if share is None else RuleResult("empty", share, share / _of(limits.level))


def engagement(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """Tokens that weights leave out: hardly any, or most."""
    now = seen.smooth("weightless")
    if now is None:
        return None
    return RuleResult(
        "weightless", now, max(now / _of(limits.level), _of(limits.change) / max(now, TINY))
    )


def settled(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """Prompts whose answers are all right or all wrong, where rewards are learned from."""
    now = seen.smooth("settled_prompts", 5) if seen.facts.rewarded else None
    return None if now is None else RuleResult("settled_prompts", now, now / _of(limits.level))


def teacher_share(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """The share of the loss that one of several teachers has."""
    shares = {name: seen.smooth(name, 5) for name in seen.history.names("teacher_share/")}
    known = {name: share for name, share in shares.items() if share is not None}
    if len(known) < 2:
        return None
    most, least = max(known, key=lambda name: known[name]), min(known, key=lambda name: known[name])
    bound = max(_of(limits.level), 1.6 / len(known))
    high = RuleResult(most, known[most], known[most] / bound)
    low = RuleResult(least, known[least], _of(limits.change) / max(known[least], TINY))
    return high if high.score >= low.score else low


def refresh_shock(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """The divergence in the step after the teacher was copied anew, as a share of that before."""
    far, every = seen.last("reverse_kl", 2), seen.facts.refresh
    if every is None or seen.step == 1 or (seen.step - 1) % every or len(far) < 2 or far[0] <= 0:
        return None
    return RuleResult("reverse_kl", far[1], _of(limits.change) * far[0] / max(far[1], TINY), far[0])


def divergence(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """The divergence to the teacher against that of the first step, where nothing else is learned from.

    It is not measured against the first ten steps: too fast a learner has ruined itself by then.
    """
    far, start = seen.smooth("reverse_kl", 5), seen.history.first("reverse_kl", 1)
    if far is None or seen.facts.rewarded or seen.step < 6:
        return None
    base = start[0]
    score = min(far / (_of(limits.change) * max(base, TINY)), (far - base) / _of(limits.level))
    return RuleResult("reverse_kl", far, score, base)


def overconfidence(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """Held-out answers that are surer than they are right, and grew so by more than chance."""
    now = seen.now("heldout_overconfidence", "heldout_surer", "heldout_surer_low")
    if now is None:
        return None
    value, grown, low = now
    score = min(value / _of(limits.level), grown / _of(limits.change))
    return RuleResult("heldout_overconfidence", value, score if low > 0 else 0.0, value - grown)


def plateau(seen: StepView, limits: Thresholds) -> RuleResult | None:
    """Held-out accuracy that no longer rises, once there is any: patience, as in early stopping.

    What has to be exceeded is the accuracy at the last rise that counted, at first that of the start, so that many small rises
    count together.
    """
    accuracies = seen.history.evaluations("heldout_accuracy")
    gained = seen.history.first("heldout_gain", 1)
    if "heldout_accuracy" not in seen.row:
        return None
    *before, now = [accuracies[0] - gained[0], *accuracies] if gained else accuracies
    best = before[0] if before else now
    for earlier in before:
        best = earlier if _rises(earlier, best, limits) else best
    still = bool(before) and max(best, now) > _of(limits.level) and not _rises(now, best, limits)
    return RuleResult("heldout_accuracy", now, float(still), best)


def _rises(now: float, best: float, limits: Thresholds) -> bool:
    return now - best > _of(limits.change) + TINY


def _fall(seen: StepView, name: str, limits: Thresholds) -> RuleResult | None:
    now, base = seen.smooth(name), seen.baseline(name)
    if now is None or base is None or base <= 0:
        return None
    return RuleResult(name, now, (1.0 - now / base) / _of(limits.change), base)


def _sharper_than_teacher(seen: StepView) -> bool | None:
    """Whether the student is far surer of itself than its teacher; None where the teacher's entropy is not known."""
    mine, theirs = seen.smooth("student_entropy"), seen.smooth("teacher_entropy")
    return None if mine is None or theirs is None else mine < 0.5 * theirs


def _flags(seen: StepView, name: str) -> list[float]:
    return [float(bool(row.get(name))) for row in seen.history.rows(20)]


def _of(limit: float | None) -> float:
    assert limit is not None, "the table gives this monitor the threshold that its rule reads"
    return limit
