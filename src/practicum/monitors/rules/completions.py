"""Rules about the student's answers: their length, their words, their turns."""

from dataclasses import replace
from statistics import median

from practicum.monitors import patches
from practicum.monitors.history import StepView
from practicum.monitors.readings import EDGES
from practicum.monitors.table import (
    MONITORS,
    TINY,
    RuleResult,
    Thresholds,
    find_worst,
    is_sharper_than_teacher,
    require_limit,
)


@MONITORS.enter_as(
    "M4",
    "truncation",
    "{change:g} above the baseline, or {level:g} and 0.1 above it",
    (patches.add_dataset_answers, patches.halve_learning_rate),
    "2604.08527",
    action="pause",
    level=0.9,
    change=0.25,
)
def judge_truncation(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Completions cut off by the token limit: many more than at the start, or nearly all."""
    share, base = view.smooth("truncated", 5), view.get_baseline("truncated")
    if share is None or base is None:
        return None
    # Some runs cut off nearly all completions from the start: only a rise of 0.1 makes it an alarm.
    nearly_all = share / require_limit(limits.level) if share - base >= 0.1 else 0.0
    score = max((share - base) / require_limit(limits.change), nearly_all)
    return RuleResult("truncated", share, score, base)


@MONITORS.enter_as(
    "M5",
    "repetition",
    "{level:g} above the baseline; 2 times that ends the run",
    (patches.add_dataset_answers, patches.halve_learning_rate),
    "2604.08527",
    action="checkpoint",
    level=0.1,
    escalation=(2.0, "stop"),
)
def judge_repetition(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Completions that loop, against the share of the start."""
    share, base = view.row.get("repetition"), view.get_baseline("repetition") or 0.0
    if share is None:
        return None
    return RuleResult("repetition", share, (share - base) / require_limit(limits.level), base)


@MONITORS.enter_as(
    "M6",
    "length",
    "{level:g} times or {change:g} times the length of up to 30 steps before; the run "
    "pauses at 1.5 times that",
    (patches.add_dataset_answers, patches.halve_learning_rate),
    "2604.08527",
    level=1.5,
    change=0.5,
    escalation=(1.5, "pause"),
)
def judge_length(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Completions much longer or shorter than within the last 30 steps, by four tokens or more."""
    lengths = view.get_last("length", 30)
    if "length" not in view.row or len(lengths) < 13:
        return None
    length, before = median(lengths[-3:]), median(lengths[:10])
    longer = length / max(before, TINY) / require_limit(limits.level)
    shorter = require_limit(limits.change) * before / max(length, TINY)
    score = max(longer, shorter) if abs(length - before) >= 4 else 0.0
    return RuleResult("length", length, score, before)


@MONITORS.enter_as(
    "M7",
    "length hacking",
    "{level:g} nats and twice its error above all unrepeated tokens, with 0.1 more of the tokens "
    "repeated than at the start",
    (patches.add_dataset_answers, patches.halve_learning_rate),
    "2604.08527",
    level=0.1,
)
def judge_length_hacking(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The teacher prefers repeated to unrepeated tokens, and the student repeats more of them."""
    readings = view.get_all("repeated_gap", "repeated_gap_error", "repeated_tokens")
    base = view.get_baseline("repeated_tokens")
    if readings is None or base is None:
        return None
    gap, error, share = readings
    # Some tasks have repeated letters in their answers from the start.
    score = min(gap / require_limit(limits.level), (share - base) / 0.1)
    score = score if gap > 2 * error else 0.0
    return RuleResult("repeated_gap", gap, score)


@MONITORS.enter_as(
    "M8",
    "stop event",
    "{level:g} nats or less at the best tenth of the student's stops",
    (patches.drop_implausible_tokens, patches.clip_advantage, patches.use_bounded_divergence),
    "the SimOPD audit; 2607.13399",
    action="pause",
    level=-5.0,
)
def judge_stops(view: StepView, limits: Thresholds) -> RuleResult | None:
    """The teacher finds the student's stop tokens very unlikely, even the most plausible tenth."""
    # Gap and level are both negative, so a gap further below zero gives a ratio over 1.
    gap = view.row.get("stop_gap_p90")
    if gap is None:
        return None
    # A student that is being destroyed stops anywhere, and no weights of tokens help it.
    patch = patches.halve_learning_rate if view.is_leaving else None
    return RuleResult("stop_gap_p90", gap, gap / require_limit(limits.level), patch=patch)


@MONITORS.enter_as(
    "M13",
    "tail entropy",
    "{change:g} times the baseline in the last bin of positions, the first being flat",
    (patches.halve_completions, patches.train_on_prefix, patches.halve_learning_rate),
    "2604.13016, section 6.1",
    change=4.0,
)
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
        is_flat = head < 1.5 * max(head_base, 0.05) and not view.is_approaching
        score = tail / (require_limit(limits.change) * max(tail_base, 0.05)) if is_flat else 0.0
        results.append(RuleResult(bins[-1], tail, score, tail_base))
    return find_worst(results)


@MONITORS.enter_as(
    "M20",
    "diversity",
    "{change:g} of it lost, though answers did not become right, the teacher's are not alike and the "
    "student comes no nearer",
    (patches.use_bounded_divergence, patches.halve_learning_rate),
    "2604.10688; 2606.26091",
    change=0.3,
    persistence=3,
)
def judge_diversity(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Completions of a prompt become alike, though not right, and the teacher's are not alike."""
    results = []
    for name in ("unique_answers", "distinct_2", "heldout_unique"):
        share, base = view.smooth(name), view.get_baseline(name)
        if share is not None and base is not None and base > 0:
            score = (1.0 - share / base) / require_limit(limits.change)
            results.append(RuleResult(name, share, score, base))
    worst = find_worst(results)
    if worst is None:
        return None
    # Right answers are alike by nature. Without rewards, the teacher's entropy decides instead.
    passes, passes_base = view.smooth("pass_at_n", 5), view.get_baseline("pass_at_n")
    is_loss = is_sharper_than_teacher(view) is not False
    if passes is not None and passes_base:
        is_loss = passes < passes_base - 0.1 and not view.is_approaching
    return worst if is_loss else replace(worst, score=0.0)


@MONITORS.enter_as(
    "M33",
    "empty answers",
    "{level:g} of the completions have no text: check student.template, student.thinking "
    "and student.stop",
    (patches.add_dataset_answers, patches.sample_from_teacher),
    level=0.5,
)
def judge_empty_answers(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Completions without any text."""
    share = view.smooth("empty")
    return (
        None if share is None else RuleResult("empty", share, share / require_limit(limits.level))
    )


@MONITORS.enter_as(
    "M34",
    "derailment",
    "turns after a wrong turn are wrong more often by {change:g} than turns after right ones",
    (patches.correct_turns, patches.grow_conversations, patches.halve_learning_rate),
    "the compounding of errors over turns, 1011.0686",
    change=0.3,
    persistence=3,
)
def judge_derailment(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Turns after a wrong turn are wrong more often than turns after right ones, in 32 or more."""
    readings = view.get_all("wrong_after", "wrong_before", "turns_after_wrong")
    if readings is None or readings[2] < 32:
        return None
    after, before, _ = readings
    return RuleResult("wrong_after", after, (after - before) / require_limit(limits.change), before)


@MONITORS.enter_as(
    "M37",
    "needless calls",
    "right answers make {level:g} or more calls of tools beyond the fewest that a right answer to "
    "the same prompt made, on average: an answer costs more and is no better",
    (patches.halve_tool_turns, patches.halve_learning_rate),
    level=0.5,
    persistence=3,
)
def judge_needless_calls(view: StepView, limits: Thresholds) -> RuleResult | None:
    """Right answers call more tools than others to the same prompt."""
    surplus = view.smooth("calls_surplus")
    if surplus is None:
        return None
    return RuleResult("calls_surplus", surplus, surplus / require_limit(limits.level))
