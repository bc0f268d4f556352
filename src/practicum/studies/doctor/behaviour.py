"""The checks of the student's completions before training: loops, length, variety, and horizon."""

import torch

from practicum.pictures import is_picture
from practicum.runs.check_outcome import CheckOutcome, Status, skip_check
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
from practicum.types import Rollout

MAX_LOOPING = 0.3
MIN_LOOP_TOKENS = 16
MAX_CUT_OFF, MAX_TEACHER_CUT_OFF, MAX_ENDED_AT_ONCE = 0.9, 0.5, 0.5
"""Shares of answers: the student's at the limit, the teacher's, and those that end at once. A student
that runs on learns from its teacher to end, if the teacher's answers have room."""

LONG_TOKENS = 256.0
WINDOW_TOKENS, WINDOWS, TRAP_SHARE = 64, 4, 0.7
"""The tokens, number and quantile of the windows of a low-KL trap (arXiv 2606.09471)."""


def check_loops(evidence: Evidence) -> CheckOutcome:
    """P8: Count answers that end in a loop, by compression or a repeated n-gram, and low-KL
    traps."""
    share = evidence.estimate_share(is_looping)
    if share is None:
        return skip_check("no answer was sampled")
    details = {"share of answers in a low-KL trap": _measure_trapped_share(evidence)}
    if share.mean == 0.0:
        return CheckOutcome("pass", "no answer loops", share, "of answers", details=details)
    status = "warn" if share.mean < MAX_LOOPING else "fail"
    text = (
        f"{share.mean:.0%} of the answers loop; "
        "the teacher gives loops a high probability, so the student would learn them"
    )
    return CheckOutcome(status, text, share, "of answers", ("rollout.top_p=0.9",), details=details)


def check_length(evidence: Evidence) -> CheckOutcome:
    """P9: Count answers that the token limit cuts off and answers that end at once."""
    cut_off = evidence.estimate_share(lambda rollout: rollout.stop_reason == "length")
    if cut_off is None:
        return skip_check("no answer was sampled")
    lengths = torch.tensor([float(len(rollout.tokens)) for rollout in evidence.rollouts])
    median, late = quantiles(lengths, (0.5, 0.95))
    limit = evidence.plan.sampling.max_new_tokens
    empty = sum(not rollout.text.strip() for rollout in evidence.rollouts)
    details: dict[str, float | None] = {"median length": median, "95 % quantile": late}
    details |= {"limit": float(limit), "empty": empty / len(lengths)}
    teachers = [answer.stop_reason == "length" for answer in evidence.answers or ()]
    teacher_cut_off = sum(teachers) / max(len(teachers), 1)
    details["cut off of the teacher's"] = teacher_cut_off if teachers else None
    status: Status = "pass"
    text = (
        f"{cut_off.mean:.0%} of the answers are cut off at {limit} tokens "
        f"(median length {median:.0f})"
    )
    fix: tuple[str, ...] = ()
    ended = [rollout for rollout in evidence.rollouts if rollout.stop_reason != "length"]
    at_once = sum(len(rollout.tokens) <= 1 for rollout in ended) / len(lengths)
    if at_once >= MAX_ENDED_AT_ONCE:
        status, text = "fail", f"{at_once:.0%} of the answers end with their first token"
    elif teacher_cut_off > MAX_TEACHER_CUT_OFF or cut_off.mean > MAX_CUT_OFF:
        status, fix = "fail", (f"rollout.max_new_tokens={2 * limit}",)
        text += ": hardly any of them ends"
        if evidence.answers is not None:
            status = "fail" if teacher_cut_off > MAX_TEACHER_CUT_OFF else "warn"
            text += f", and {teacher_cut_off:.0%} of the teacher's are cut off"
    return CheckOutcome(status, text, cut_off, "cut off", fix, details=details)


def check_variety(evidence: Evidence) -> CheckOutcome:
    """P15: Record quantities that training usually lowers: entropy, different answers to a prompt,
    calibration, pass@k."""
    entropy = evidence.estimate_mean(lambda row: row.student_entropy)
    if entropy is None:
        return skip_check("no answer has a token")
    pairs = [(rollout.prompt.id, rollout) for rollout in evidence.rollouts]
    groups = list(group_pairs(pairs).values())
    texts = [[rollout.text.strip() for rollout in group] for group in groups]
    tokens = [[rollout.tokens.tolist() for rollout in group] for group in groups]
    details: dict[str, float | None] = {
        "distinct 2-grams": mean_of([distinct_ngrams(group, 2) for group in tokens]),
        "different answers": mean_of([unique_share(group) for group in texts]),
        **_measure_calibration(evidence, groups, texts),
    }
    rewards = evidence.group_rewards(evidence.rollouts).values()
    counts = [(len(group), sum(reward >= 1.0 for reward in group)) for group in rewards]
    for k in (1, evidence.samples):
        details[f"pass@{k}"] = mean_of([pass_at_k(n, right, k) for n, right in counts])
    text = "recorded as the baseline that a run is compared with"
    return CheckOutcome("pass", text, entropy, "nats of entropy per token", details=details)


def check_horizon(evidence: Evidence) -> CheckOutcome:
    """P16: Test if answers are long enough for errors to add up, which on-policy training
    corrects."""
    tokens = evidence.estimate_rollout_mean(lambda row: float(len(row.rollout.tokens)))
    if tokens is None:
        return skip_check("no answer was sampled")
    details = {"weights of the teacher over the student's": compute_capacity_ratio(evidence)}
    if tokens.mean >= LONG_TOKENS:
        text = "answers are long, where learning on one's own answers pays"
        return CheckOutcome("pass", text, tokens, "tokens", details=details)
    text = (
        f"answers of {tokens.mean:.0f} tokens are short, "
        "where supervised learning on given answers often does as well"
    )
    return CheckOutcome("warn", text, tokens, "tokens", details=details)


def compute_capacity_ratio(evidence: Evidence) -> float | None:
    """Return the weights of the largest model behind the teacher over the student's.

    None for a self-teacher.
    """
    sizes = [scorer.shape.parameters for scorer in evidence.scorers if scorer.shape is not None]
    student = evidence.components.student.dims
    return max(sizes) / student.parameters if sizes and student is not None else None


def is_looping(rollout: Rollout) -> bool:
    """Return True if a completion is degenerate (arXiv 2604.08527), or at least half of it repeats
    one n-gram.

    The n-gram has up to 8 tokens, and the repetition at least 16.
    """
    # A picture of an environment is many equal tokens.
    tokens = [token for token in rollout.tokens.tolist() if not is_picture(token)]
    least = max(MIN_LOOP_TOKENS, len(tokens) / 2)
    return is_degenerate(rollout.text) or longest_run(tokens) >= least


def _measure_trapped_share(evidence: Evidence) -> float | None:
    """Return the share of long completions in a low-KL trap (KAT, arXiv 2606.09471).

    None if none is long.
    """
    scored = [row.divergence for row in evidence.measurements if row.divergence is not None]
    divergences = [values for values in scored if len(values) >= WINDOW_TOKENS * WINDOWS]
    if not divergences:
        return None
    # KAT's threshold is relative: a quantile of the smallest window of each completion.
    smallest = torch.stack([window_means(values, WINDOW_TOKENS).min() for values in divergences])
    threshold = quantiles(smallest, (TRAP_SHARE,))[0]
    return mean_of(
        has_low_divergence_run(values, threshold, WINDOW_TOKENS, WINDOWS) for values in divergences
    )


def _measure_calibration(
    evidence: Evidence, groups: list[list[Rollout]], texts: list[list[str]]
) -> dict[str, float | None]:
    """Return calibration error and over-confidence of the most frequent answers' shares."""
    if evidence.samples < 2 or any(rollout.reward is None for rollout in evidence.rollouts):
        return {}
    pairs = [
        majority_agreement(answers, [(rollout.reward or 0.0) >= 1.0 for rollout in group])
        for answers, group in zip(texts, groups, strict=True)
    ]
    confidences, correct = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    excess = (sum(confidences) - sum(correct)) / len(pairs)
    return {"calibration error": calibration_error(confidences, correct), "over-confidence": excess}
