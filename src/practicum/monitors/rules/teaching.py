"""Rules about student and teacher: their distance, and whether the student can still learn."""

from itertools import pairwise
from statistics import median

from practicum.monitors import patches
from practicum.monitors.history import StepView
from practicum.monitors.table import (
    CERTAIN,
    MONITORS,
    TINY,
    RuleResult,
    Thresholds,
    is_sharper_than_teacher,
    require_limit,
)


@MONITORS.enter_as(
    "M9",
    "stalled",
    "within {change:g} for 30 steps, under 0.95, with reverse_kl flat and over half its baseline; or "
    "reverse_kl at its baseline (over {level:g} of it, and as little above it) for 40 steps",
    (patches.sample_from_teacher, patches.add_dataset_answers, patches.halve_learning_rate),
    "2604.13016; a healthy run without a rise is known",
    level=0.9,
    change=0.01,
)
def judge_stall(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Overlap is flat below its maximum while divergence is flat and high, or nothing has moved."""
    overlap, divergence = view.get_last("overlap", 30), view.get_last("reverse_kl", 30)
    base = view.get_baseline("reverse_kl")
    if "reverse_kl" not in view.row or base is None or len(divergence) < 30:
        return None
    if result := _judge_motion(view, base, require_limit(limits.level)):
        return result
    if "overlap" not in view.row or len(overlap) < 30:
        return None
    early, late = median(divergence[:10]), median(divergence[-10:])
    is_flat = late > 0.5 * base and abs(late - early) <= 0.05 * abs(early) and max(overlap) < 0.95
    spread = max(overlap) - min(overlap)
    score = require_limit(limits.change) / max(spread, TINY) if is_flat else 0.0
    return RuleResult("overlap", spread, score)


def _judge_motion(view: StepView, base: float, level: float) -> RuleResult | None:
    """Return a result if the divergence is where it was at the start, for 40 steps."""
    divergence = view.get_last("reverse_kl", 40)
    spans = [median(divergence[start : start + 10]) for start in range(0, len(divergence), 10)]
    is_level = len(divergence) == 40 and min(spans) > level * base and max(spans) < base / level
    return (
        RuleResult("reverse_kl", spans[-1], spans[-1] / (level * base), base) if is_level else None
    )


@MONITORS.enter_as(
    "M10",
    "overlap mass",
    "below {level:g}, and {change:g} below the baseline",
    (patches.add_tail_bucket, patches.use_full_signal, patches.halve_learning_rate),
    "2604.13016: 0.97 to 0.99 even in weak runs",
    level=0.9,
    change=0.05,
)
def judge_overlap_mass(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The student's mass on the top tokens of both models is low, and lower than at the start."""
    mass, base = view.smooth("overlap_mass"), view.get_baseline("overlap_mass")
    if mass is None or base is None:
        return None
    low, fall = (1.0 - mass) / (1.0 - require_limit(limits.level)), base - mass
    return RuleResult("overlap_mass", mass, min(low, fall / require_limit(limits.change)), base)


@MONITORS.enter_as(
    "M11",
    "entropy gap",
    "rising over 6 spans of 5 steps, by {change:g} of itself, after step 50",
    (patches.halve_learning_rate,),
    "2604.13016",
    change=0.2,
)
def judge_entropy_gap(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Entropies of student and teacher move apart over six spans of five steps, after step 50."""
    gaps = view.get_last("entropy_gap", 30)
    if "entropy_gap" not in view.row or len(gaps) < 30 or view.step <= 50:
        return None
    spans = [median(gaps[start : start + 5]) for start in range(0, 30, 5)]
    is_rising = all(later > earlier for earlier, later in pairwise(spans))
    rise = spans[-1] / max(spans[0], TINY) - 1.0
    score = rise / require_limit(limits.change) if is_rising else 0.0
    return RuleResult("entropy_gap", spans[-1], score, spans[0])


@MONITORS.enter_as(
    "M12",
    "student entropy",
    "at most {change:g} times the baseline or {level:g} nats, and under half of the teacher's, "
    f"which is {CERTAIN:g} or more",
    (patches.use_bounded_divergence, patches.halve_learning_rate),
    "2603.07079",
    level=0.1,
    change=0.5,
)
def judge_student_entropy(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Student entropy is low against its baseline and, if known, against the teacher's."""
    entropy, base = view.smooth("student_entropy"), view.get_baseline("student_entropy")
    if entropy is None or base is None:
        return None
    # In completions that end at once, the entropy is the entropy of one stop token: M33 reports them.
    is_silent = (view.smooth("empty") or 0.0) > 0.5
    score = max(require_limit(limits.change) * base, require_limit(limits.level)) / max(
        entropy, TINY
    )
    # Without the teacher's entropy, a student that comes nearer or earns more may be surer.
    sharper = is_sharper_than_teacher(view)
    reward, reward_base = view.smooth("reward", 5), view.get_baseline("reward")
    is_better = reward is not None and reward_base is not None and reward > reward_base
    if is_silent or sharper is False or (sharper is None and (is_better or view.is_approaching)):
        score = 0.0
    return RuleResult("student_entropy", entropy, score, base)


@MONITORS.enter_as(
    "M14",
    "low-KL traps",
    "{level:g} of all completions, or {change:g} above the baseline",
    (patches.train_on_prefix, patches.add_dataset_answers, patches.halve_learning_rate),
    "2606.09471",
    level=0.5,
    change=0.3,
)
def judge_traps(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Wrong completions with a long part on which the teacher agrees unusually well."""
    rate, base = view.smooth("trap_rate"), view.get_baseline("trap_rate")
    if rate is None:
        return None
    rise = 0.0 if base is None else (rate - base) / require_limit(limits.change)
    return RuleResult("trap_rate", rate, max(rate / require_limit(limits.level), rise), base)


@MONITORS.enter_as(
    "M19",
    "teacher health",
    "{level:g} of the completions left unanswered by a teacher that answered all before",
    (patches.save_every_step,),
    action="pause",
    level=0.01,
)
def judge_teacher_health(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Completions that a teacher leaves unanswered after it answered all at the start."""
    share, base = view.row.get("unanswered"), view.get_baseline("unanswered")
    if share is None or base != 0.0:
        return None
    return RuleResult("unanswered", share, share / require_limit(limits.level), base)


@MONITORS.enter_as(
    "M22",
    "no signal",
    "at most {level:g} of the completions differ from the teacher by 0.0001 nats per token",
    (patches.add_dataset_answers, patches.double_completions),
    "TRL, issue 2217",
    level=0.0,
)
def judge_signal(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Share of completions with signal."""
    if view.row.get("tokens") == 0.0:
        return RuleResult("tokens", 0.0, 1.0)
    share = view.row.get("signal_share")
    if share is None:
        return None
    return RuleResult("signal_share", share, float(share <= require_limit(limits.level)))


@MONITORS.enter_as(
    "M26",
    "teachers' shares",
    "one of several teachers has over {level:g} of the loss (of two: 0.8), or under {change:g}",
    (patches.use_bounded_divergence, patches.halve_learning_rate),
    "2608.19098",
    level=0.6,
    change=0.05,
)
def judge_teacher_shares(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The share of the loss that comes from each of several teachers."""
    smoothed = {name: view.smooth(name, 5) for name in view.history.list_names("teacher_share/")}
    shares = {name: share for name, share in smoothed.items() if share is not None}
    if len(shares) < 2:
        return None
    most, least = max(shares, key=lambda name: shares[name]), min(shares, key=lambda n: shares[n])
    # With two teachers an even share is 0.5, so the bound must be higher than for three or more.
    bound = max(require_limit(limits.level), 1.6 / len(shares))
    high = RuleResult(most, shares[most], shares[most] / bound)
    low = RuleResult(least, shares[least], require_limit(limits.change) / max(shares[least], TINY))
    return high if high.score >= low.score else low


@MONITORS.enter_as(
    "M27",
    "refresh shock",
    "at most {change:g} times the divergence before the copy, at two copies in a row",
    (patches.use_ema_teacher, patches.halve_learning_rate),
    "2605.02943",
    change=0.3,
    persistence=2,
)
def judge_refresh_shock(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The divergence right after a new copy of the teacher, against the step before."""
    divergence, period = view.get_last("reverse_kl", 2), view.facts.refresh_period
    if period is None or view.step == 1 or (view.step - 1) % period or len(divergence) < 2:
        return None
    before, after = divergence
    if before <= 0:
        return None
    score = require_limit(limits.change) * before / max(after, TINY)
    return RuleResult("reverse_kl", after, score, before)


@MONITORS.enter_as(
    "M29",
    "divergence",
    "{change:g} times the divergence of the first two steps, and {level:g} nats above it",
    (patches.halve_learning_rate,),
    "python -m benchmarks settings: 0.13 to 1.18 in two steps at ten times the rate",
    level=0.5,
    change=1.8,
    persistence=8,
)
def judge_divergence(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The divergence to the teacher against the first two steps, if the objective uses no rewards."""
    # The baseline of ten steps is no use: too high a learning rate has ruined the student by then.
    divergence = view.smooth("reverse_kl", 5)
    if divergence is None or view.facts.has_rewards or view.step < 3:
        return None
    base = view.start_divergence
    ratio = divergence / (require_limit(limits.change) * max(base, TINY))
    score = min(ratio, (divergence - base) / require_limit(limits.level))
    return RuleResult("reverse_kl", divergence, score, base)


@MONITORS.enter_as(
    "M35",
    "constant teacher",
    "{level:g} of the completions have one teacher score for all of their tokens: look at the "
    "teacher's weights, above all after they were moved",
    (patches.save_every_step,),
    "Relax, pull request 287",
    action="pause",
    level=0.5,
    persistence=1,
)
def judge_constancy(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Completions with the same teacher score for every token: the teacher has lost its weights."""
    share = view.row.get("constant_teacher")
    if share is None:
        return None
    return RuleResult("constant_teacher", share, share / require_limit(limits.level))
