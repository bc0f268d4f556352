"""What the student's answers look like before anything is learned: loops, length, variety, and how long they are."""

import torch

from practicum.statistics import (
    calibration_error,
    distinct_ngrams,
    group_pairs,
    has_low_divergence_run,
    is_degenerate,
    longest_run,
    majority_agreement,
    mean_of,
    pass_at_k,
    quantiles,
    unique_share,
    window_means,
)
from practicum.studies.doctor.evidence import Evidence
from practicum.studies.doctor.findings import CheckOutcome, Status, skipped
from practicum.types import Rollout

LOOPING = 0.05
SHORTEST_LOOP = 16
CUT_OFF, AT_ONCE = 0.9, 0.5
LONG = 256.0
WINDOW, WINDOWS, TRAP_SHARE = 64, 4, 0.7


def loops(evidence: Evidence) -> CheckOutcome:
    """P8: answers that end in a loop, by compression or by a repeated n-gram, and stretches of agreement too low to teach."""
    share = evidence.share(looping)
    if share is None:
        return skipped("there is no answer")
    details = {"share of answers in a low-KL trap": _trapped_share(evidence)}
    if share.mean == 0.0:
        return CheckOutcome("pass", "no answer loops", share, "of answers", details=details)
    status = "warn" if share.mean < LOOPING else "fail"
    text = f"{share.mean:.0%} of the answers loop; the teacher finds a loop likely, so it would be learned"
    return CheckOutcome(status, text, share, "of answers", ("rollout.top_p=0.9",), details=details)


def length(evidence: Evidence) -> CheckOutcome:
    """P9: how many answers are cut off by the limit, and how long they are."""
    cut = evidence.share(lambda rollout: rollout.stop_reason == "length")
    if cut is None:
        return skipped("there is no answer")
    lengths = torch.tensor([float(len(rollout.tokens)) for rollout in evidence.rollouts])
    median, late = quantiles(lengths, (0.5, 0.95))
    limit = evidence.plan.sampling.max_new_tokens
    details = {
        "median length": median,
        "95 % quantile": late,
        "limit": float(limit),
        "empty": sum(not rollout.text.strip() for rollout in evidence.rollouts)
        / len(evidence.rollouts),
    }
    text = (
        f"{cut.mean:.0%} of the answers are cut off at {limit} tokens (median length {median:.0f})"
    )
    at_once = sum(len(rollout.tokens) <= 1 for rollout in evidence.rollouts) / len(
        evidence.rollouts
    )
    status: Status = "fail" if at_once >= AT_ONCE or cut.mean > CUT_OFF else "pass"
    fix: tuple[str, ...] = ()
    if at_once >= AT_ONCE:
        text = f"{at_once:.0%} of the answers end with their first token"
    elif status == "fail":
        text += ": hardly any has an end"
        fix = (f"rollout.max_new_tokens={2 * limit}",)
    return CheckOutcome(status, text, cut, "cut off", fix, details=details)


def variety(evidence: Evidence) -> CheckOutcome:
    """P15: the start of what later can only fall: entropy, different answers to one prompt, confidence that is earned."""
    entropy = evidence.mean(lambda trace: trace.student_entropy)
    if entropy is None:
        return skipped("no answer has a token")
    several = list(
        group_pairs((rollout.prompt.id, rollout) for rollout in evidence.rollouts).values()
    )
    texts = [[rollout.text.strip() for rollout in group] for group in several]
    details: dict[str, float | None] = {
        "distinct 2-grams": mean_of(
            [distinct_ngrams([r.tokens.tolist() for r in group], 2) for group in several]
        ),
        "different answers": mean_of([unique_share(group) for group in texts]),
        **_calibration(evidence, several, texts),
    }
    rewards = evidence.scores(evidence.rollouts)
    for k in (1, evidence.samples):
        details[f"pass@{k}"] = mean_of(
            [pass_at_k(len(own), sum(r >= 1.0 for r in own), k) for own in rewards.values()]
        )
    text = "recorded as the baseline that a run is compared with"
    return CheckOutcome("pass", text, entropy, "nats of entropy a token", details=details)


def horizon(evidence: Evidence) -> CheckOutcome:
    """P16: are answers long enough for mistakes to pile up, which is what learning on one's own answers mends?"""
    value = evidence.mean_of_rollouts(lambda trace: float(len(trace.rollout.tokens)))
    if value is None:
        return skipped("there is no answer")
    details = {"weights of the teacher over the student's": capacity_ratio(evidence)}
    if value.mean >= LONG:
        text = "answers are long, where learning on one's own answers pays"
        return CheckOutcome("pass", text, value, "tokens", details=details)
    short = f"answers of {value.mean:.0f} tokens are short"
    text = f"{short}, where supervised learning on given answers often does as well"
    return CheckOutcome("warn", text, value, "tokens", details=details)


def capacity_ratio(evidence: Evidence) -> float | None:
    """Weights of the largest model behind the teacher over the student's; None where the student teaches itself."""
    shapes = [scorer.shape.parameters for scorer in evidence.scorers if scorer.shape is not None]
    student = evidence.built.learner.shape
    return max(shapes) / student.parameters if shapes and student is not None else None


def looping(rollout: Rollout) -> bool:
    """Whether an answer is degenerate (arXiv 2604.08527), or half of it or more repeats one n-gram of up to 8 tokens."""
    tokens = rollout.tokens.tolist()
    return is_degenerate(rollout.text) or longest_run(tokens) >= max(SHORTEST_LOOP, len(tokens) / 2)


def _trapped_share(evidence: Evidence) -> float | None:
    """KAT's low-KL traps (arXiv 2606.09471): its threshold is a quantile of the answers' own least windows."""
    long = [
        t.divergence
        for t in evidence.traces
        if t.divergence is not None and len(t.divergence) >= WINDOW * WINDOWS
    ]
    if not long:
        return None
    least = torch.stack([window_means(divergence, WINDOW).min() for divergence in long])
    below = quantiles(least, (TRAP_SHARE,))[0]
    return sum(
        has_low_divergence_run(divergence, below, WINDOW, WINDOWS) for divergence in long
    ) / len(long)


def _calibration(
    evidence: Evidence, groups: list[list[Rollout]], texts: list[list[str]]
) -> dict[str, float | None]:
    """How far the share of the commonest answer is from how often it is right, and by how much it is more."""
    if evidence.samples < 2 or any(rollout.reward is None for rollout in evidence.rollouts):
        return {}
    pairs = [
        majority_agreement(said, [(rollout.reward or 0.0) >= 1.0 for rollout in group])
        for said, group in zip(texts, groups, strict=True)
    ]
    sure, right = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return {
        "calibration error": calibration_error(sure, right),
        "over-confidence": (sum(sure) - sum(right)) / len(pairs),
    }
