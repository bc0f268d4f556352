"""The verdict of a finished run, from the evaluations before and after training.

The verdict is computed once, stored in `summary.json`, and read from there by everything that shows
it: the terminal, the page, the notebook, the model card, comparisons and trackers. Both evaluations
are known, so no rule needs a baseline of several steps. docs/evaluation.md has the rules as a table.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from practicum.run_dir.shapes import VerdictWord
from practicum.statistics import FEWEST_PROMPTS, Estimate, has_width

MOVED, MIN_NATS = 1.25, 0.02
"""The ratio of two reverse KLs, and their difference in nats per token, that count as a change."""

FAR, FAR_NATS = 3.0, 1.0
"""The ratio and the difference in nats per token at which divergence by itself means a collapse."""

DOUBLED = 2.0
"""The ratio of two reverse KLs that is one sign of a collapse."""

RISE, MOST, LOW_ENTROPY = 0.5, 0.9, 0.05
"""The rise of a share of answers that is a sign, the share of equal answers that is a sign, and the
share of the entropy before below which the entropy after is a sign.
"""

HIGH_RATE = 3.0
"""The multiple of the table's learning rate above which the table's rate is the advice."""

RUN = "RUN"
"""The place of the run folder in a stored command: the folder may move, and its bytes do not
change."""

SIGNS = 2
"""The number of signs that make a collapse."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of a run that its verdict depends on, and that its next command changes.

    `usual_rate` is the learning rate of the table of settings for the student, None if the table has
    none. `aims_at_teacher` is True if the objective minimizes a divergence and has no reward. Closeness
    to a teacher that follows the student (`teacher_moves`) is not an improvement.
    """

    learning_rate: float
    prompts: int
    steps: int
    aims_at_teacher: bool
    teacher_moves: bool = False
    usual_rate: float | None = None


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """The verdict in one word, the reasons with their numbers, and commands to try next."""

    verdict: VerdictWord
    reasons: list[str]
    next: list[str]


class _CollapseSign(NamedTuple):
    name: Literal["cut", "loops", "equal", "entropy", "divergence"]
    reason: str


def judge_run(summary: Mapping[str, Any], settings: RunSettings) -> RunVerdict:
    """Judge a run from its summary: `before`, `after`, `gain`, `alarms`, and a drafter's `draft_gain`."""
    before, after = summary["before"], summary["after"]
    if before is None or after is None:
        reason = "no held-out prompts were evaluated before and after training"
        return RunVerdict("TOO FEW PROMPTS", [reason], _ask_for_prompts(0, settings))
    prompts = min(before["prompts"], after["prompts"])
    has_few = prompts < FEWEST_PROMPTS
    name, gain = read_gain(summary)
    change = 0 if has_few else _judge_gain(gain)
    distances = read_measure(before, "reverse_kl"), read_measure(after, "reverse_kl")
    closeness = _judge_divergence(*distances)
    signs = _find_signs(before, after)
    # A sharp teacher with one answer makes its student so; only without it is that a collapse.
    counted = [sign for sign in signs if closeness < 1 or sign.name not in ("equal", "entropy")]
    is_far = settings.aims_at_teacher and _is_far(*distances)
    word: VerdictWord
    if change < 1 and (is_far or len(counted) >= SIGNS):
        word = "COLLAPSED"
    elif has_few:
        word = "TOO FEW PROMPTS"
    elif change:
        word = "BETTER" if change > 0 else "WORSE"
    elif settings.aims_at_teacher and closeness < 0:
        word = "WORSE"
    elif settings.aims_at_teacher and closeness > 0 and not settings.teacher_moves:
        # Loops are easy to predict: a low divergence has no meaning if answers stopped ending.
        is_cut = any(sign.name in ("cut", "loops") for sign in signs)
        word = "NO DETECTABLE CHANGE" if is_cut else "BETTER"
    else:
        word = "NO DETECTABLE CHANGE"
    reasons = [
        *_describe_gain(summary),
        *(_describe_divergence(*distances, closeness) if name == "accuracy" else ()),
        *(sign.reason for sign in signs if sign.reason),
    ]
    if summary["alarms"]:
        reasons.append(f"alarms: {', '.join(sorted(summary['alarms'], key=_order_alarm))}")
    if not reasons:
        reasons.append("neither an accuracy nor a reverse KL was measured")
    if word == "TOO FEW PROMPTS":
        reasons.append(_describe_few(prompts, gain, closeness))
    best = summary.get("best")
    if best is not None:
        reasons.append(_describe_best(best, summary["steps"]))
    commands = _list_next(word, settings, prompts)
    if best is not None and best["step"] is not None and best["score"] != best["last"]:
        commands.insert(0, f"practicum eval {RUN}@best --rows OTHER_ROWS.jsonl")
    return RunVerdict(word, reasons, commands)


def is_destroyed(summary: Mapping[str, Any], settings: RunSettings) -> bool:
    """Return True if a student is judged COLLAPSED, or its answers stopped ending for no gain.

    Answers that loop are easy to predict, so such a student could have the lowest reverse KL.
    """
    if judge_run(summary, settings).verdict == "COLLAPSED":
        return True
    signs = _find_signs(summary["before"], summary["after"])
    _, gain = read_gain(summary)
    return _judge_gain(gain) < 1 and any(sign.name in ("cut", "loops") for sign in signs)


def format_verdict(verdict: Mapping[str, Any], folder: str) -> str:
    """Return a stored verdict as one line: the word, its reasons, and the first fix to try."""
    line, commands = format_reasons(verdict), list_commands(verdict, folder)
    return f"{line}. Try next: {commands[0]}" if commands else line


def list_commands(verdict: Mapping[str, Any], folder: str) -> list[str]:
    """Return the commands to try next, for the run in this folder."""
    path = shlex.quote(folder)
    return [command.replace(f" {RUN}", f" {path}", 1) for command in verdict["next"]]


def format_reasons(verdict: Mapping[str, Any]) -> str:
    """Return a stored verdict as one line: the word and its reasons."""
    return f"{verdict['verdict']}: {'; '.join(verdict['reasons'])}"


def read_gain(summary: Mapping[str, Any]) -> tuple[str, Mapping[str, float] | None]:
    """Return the quantity that a run is judged by, and the gain in it if it was measured."""
    if summary.get("draft_gain"):
        return "tokens per target call", summary["draft_gain"]
    return "accuracy", summary["gain"]


def read_measure(evaluation: Mapping[str, Any], name: str) -> Estimate | None:
    """Return `reverse_kl` or `student_entropy`, with a standard error of 0 if it is exact."""
    if evaluation[name] is not None:
        return Estimate(evaluation[name], 0.0)
    estimate = evaluation[f"{name}_estimate"]
    return None if estimate is None else Estimate(estimate["mean"], estimate["se"])


def _judge_gain(gain: Mapping[str, float] | None) -> int:
    """Return 1 for a rise by more than chance, -1 for a fall, and 0 if neither is known."""
    if gain is None or not has_width(gain["low"], gain["high"]):
        return 0
    return (gain["low"] > 0.0) - (gain["high"] < 0.0)


def _judge_divergence(before: Estimate | None, after: Estimate | None) -> int:
    """Return 1 if the student came closer to its teacher, -1 if it went away, else 0."""
    if before is None or after is None or not _is_resolved(before, after):
        return 0
    low, high = sorted((before.mean, after.mean))
    # Estimates from sampled tokens can be negative, and then have no ratio.
    if high - low < MIN_NATS or high < MOVED * max(low, 0.0):
        return 0
    return 1 if before.mean > after.mean else -1


def _is_resolved(before: Estimate, after: Estimate) -> bool:
    """Return True if the 95 % interval of the difference excludes 0; exact numbers have no width."""
    bound = before.bound_difference(after)
    return bound is not None and abs(after.mean - before.mean) >= bound


def _is_far(before: Estimate | None, after: Estimate | None) -> bool:
    if before is None or after is None or not _is_resolved(before, after):
        return False
    return after.mean >= FAR * max(before.mean, 0.0) and after.mean - before.mean >= FAR_NATS


def _find_signs(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[_CollapseSign]:
    """Return the signs of a collapse in the answers after training, compared with before."""
    signs: list[_CollapseSign] = []
    if after["truncated"] - before["truncated"] >= RISE:
        signs.append(_describe_shares("cut", "of the answers cut off", before, after))
    if after["looping_answers"] - before["looping_answers"] >= RISE:
        signs.append(_describe_shares("loops", "of the answers loop", before, after))
    if after["equal_answers"] >= MOST and before["equal_answers"] <= RISE:
        signs.append(_describe_shares("equal", "of the prompts got the same answer", before, after))
    old, new = read_measure(before, "student_entropy"), read_measure(after, "student_entropy")
    if old is not None and new is not None and 0.0 < old.mean >= new.mean / LOW_ENTROPY:
        reason = f"entropy {old.mean:.2f} to {new.mean:.2f} nats per token"
        signs.append(_CollapseSign("entropy", reason))
    old, new = read_measure(before, "reverse_kl"), read_measure(after, "reverse_kl")
    if old is not None and new is not None and _judge_divergence(old, new) < 0:
        # The divergence already gives the reason.
        is_doubled = new.mean >= DOUBLED * max(old.mean, 0.0)
        signs += [_CollapseSign("divergence", "")] if is_doubled else []
    return signs


def _describe_shares(
    name: Literal["cut", "loops", "equal"],
    what: str,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> _CollapseSign:
    key = {"cut": "truncated", "loops": "looping_answers", "equal": "equal_answers"}[name]
    old, new = (round(100 * evaluation[key]) for evaluation in (before, after))
    return _CollapseSign(name, f"{new} % {what} ({old} % before)")


def _describe_gain(summary: Mapping[str, Any]) -> list[str]:
    """Describe the gain in accuracy, or a drafter's gain in tokens per call, since its target is frozen."""
    name, gain = read_gain(summary)
    if gain is None:
        return []
    before, after = summary["before"], summary["after"]
    further: list[str] = []
    if name == "accuracy":
        text = f"accuracy {before['accuracy']['mean']:.2f} to {after['accuracy']['mean']:.2f}"
    else:
        key = "drafts/acceptance"
        further = [f"acceptance {before[key]:.2f} to {after[key]:.2f}"]
        key = "drafts/tokens_per_call"
        text = f"{before[key]:.2f} to {after[key]:.2f} {name}"
    prompts = before["prompts"]
    if prompts < FEWEST_PROMPTS:
        return [f"{text} on {prompts} prompts", *further]
    if not has_width(gain["low"], gain["high"]):
        return [f"{text} (all prompts agree; no interval)", *further]
    interval = f"{gain['mean']:+.2f} [{gain['low']:+.2f}, {gain['high']:+.2f}]"
    resolved = "" if _judge_gain(gain) else ", no detectable change"
    return [f"{text} ({interval}{resolved})", *further]


def _describe_divergence(
    before: Estimate | None, after: Estimate | None, closeness: int
) -> list[str]:
    if before is None or after is None:
        return []
    is_exact = before.se == 0.0 and after.se == 0.0
    name = "reverse KL" if is_exact else "estimated reverse KL"
    numbers = f"{before.mean:.2f} to {after.mean:.2f}" if is_exact else f"{before} to {after}"
    if closeness == 0:
        # More digits, because two would often show the same number twice.
        numbers = f"{before.mean:.3f} to {after.mean:.3f}" if is_exact else numbers
        return [f"{name} to the teacher {numbers}, no detectable change"]
    if closeness > 0:
        return [f"closer to the teacher: {name} {numbers}"]
    # Below one hundredth of a nat the ratio would divide by almost nothing.
    ratio = after.mean / before.mean if before.mean > 0.01 else None
    if ratio is None or ratio < DOUBLED:
        return [f"further from the teacher: {name} {numbers}"]
    times = f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"
    return [f"{name} to the teacher {times} times as high ({numbers})"]


def _describe_best(best: Mapping[str, Any], steps: int) -> str:
    """Describe the best checkpoint; chosen on these prompts, its score is higher than on others."""
    name = best["metric"].replace("reverse_kl", "reverse KL")
    if best["step"] is None:
        return f"no evaluated step has a {name} and a sound student, so there is no best checkpoint"
    if best["step"] == steps:
        return f"best checkpoint by {name}: the last step ({best['score']:.2f})"
    last = "unknown" if best["last"] is None else f"{best['last']:.2f}"
    return f"best checkpoint by {name}: step {best['step']} of {steps} ({best['score']:.2f}, at the end {last})"


def _describe_few(prompts: int, gain: Mapping[str, float] | None, closeness: int) -> str:
    few = f"{prompts} held-out prompts are too few for a verdict"
    direction = 0 if gain is None else (gain["mean"] > 0) - (gain["mean"] < 0)
    if direction and direction == closeness:
        return f"{few}, but both point to {'better' if direction > 0 else 'worse'}"
    return few


def _order_alarm(name: str) -> tuple[int, str]:
    """Sort M3 before M12."""
    return len(name), name


def _list_next(word: VerdictWord, settings: RunSettings, prompts: int) -> list[str]:
    """Return the commands to try next, the most promising one first."""
    lower_rate = f"practicum run {RUN} optimizer.learning_rate={_choose_lower_rate(settings):.3g}"
    doctor = f"practicum doctor {RUN}"
    match word:
        case "COLLAPSED":
            return [lower_rate, doctor]
        case "WORSE":
            return [doctor, lower_rate]
        case "TOO FEW PROMPTS":
            return _ask_for_prompts(prompts, settings)
        case "NO DETECTABLE CHANGE":
            more_steps = f"practicum run {RUN} train.steps={4 * settings.steps}"
            return [more_steps, *_ask_for_prompts(prompts, settings), doctor]
        case "BETTER":
            return []


def _choose_lower_rate(settings: RunSettings) -> float:
    """Return the table's rate if the run's was far above it, else a tenth of the run's."""
    usual = settings.usual_rate
    if usual is not None and settings.learning_rate > HIGH_RATE * usual:
        return usual
    return settings.learning_rate / 10


def _ask_for_prompts(prompts: int, settings: RunSettings) -> list[str]:
    """Return the command that evaluates on more prompts: 64, or four times as many."""
    if settings.prompts > prompts:
        # The recipe allows more prompts than there were, so a higher limit would change nothing.
        return [f"add held-out prompts to the task, which has {prompts or 'none'}"]
    return [f"practicum run {RUN} evaluation.prompts={max(64, 4 * prompts)}"]
