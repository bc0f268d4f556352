"""Results on held-out prompts: answers, intervals, traces, and differences between two results."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from practicum.statistics.answer_sets import equal_share, majority_agreement
from practicum.statistics.groups import group_pairs
from practicum.statistics.intervals import Estimate, Interval
from practicum.statistics.paired import difference
from practicum.statistics.repetition import is_looping
from practicum.types import CallOutcome

Column = list[float | None]


@dataclass(frozen=True, slots=True)
class Candidates:
    """A model's most likely tokens at each of T positions: texts and probabilities, descending."""

    texts: list[list[str]]
    probabilities: list[list[float]]


@dataclass(frozen=True, slots=True)
class TokenTrace:
    """One held-out answer, token by token.

    `text` holds each token as text, and `control` is True for special tokens. Log-probabilities belong
    to the sampled tokens. Reverse KL and entropies are in nats and of full distributions. A
    number is None if the teacher does not give it, as one that scores only sampled tokens, or if
    the student did not write the token.
    """

    prompt: str
    question: str
    expected: str | None
    reward: float | None
    text: list[str]
    control: list[bool]
    logprobs: Column
    teacher_logprobs: Column
    reverse_kl: Column
    student_entropy: Column
    teacher_entropy: Column
    student: Candidates | None
    teacher: Candidates | None


def read_trace(saved: dict[str, object]) -> TokenTrace:
    """Read back a trace from the result of `dataclasses.asdict`."""
    sides = {name: saved[name] for name in ("student", "teacher")}
    candidates = {
        name: Candidates(**side) if isinstance(side, dict) else None for name, side in sides.items()
    }
    return TokenTrace(**{**saved, **candidates})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class GradedCompletion:
    """One held-out completion with its prompt, the expected answer and its reward.

    `logprob` is the mean log-probability per token under the model that wrote it, untempered, `calls`
    the outcome of each call of a tool, and `pictures` the ids of the prompt's pictures.
    """

    prompt: str
    question: str
    expected: str | None
    text: str
    reward: float | None
    tokens: int = 0
    logprob: float | None = None
    calls: list[CallOutcome] = field(default_factory=list)
    pictures: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The mean confidence, its excess over the share of right answers, and the calibration error.

    `confidences` defines confidence. The error is the expected calibration error over bins of
    equally many prompts; see `practicum.statistics.calibration_error`.
    """

    confidence: float
    overconfidence: Interval
    error: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results on all held-out prompts.

    `scores` is each prompt's mean reward, empty if the task gives none. `by_domain` is the accuracy
    on the prompts of each domain. `traces` shows the first few answers token by token.
    `calibration` is None if no answer has a reward or a confidence. `reverse_kl` and
    `student_entropy` are exact, or None and estimated; see `TeacherComparison`.
    """

    answers: list[GradedCompletion]
    scores: list[float]
    accuracy: Interval | None
    length: float
    truncated: float
    student_entropy: float | None
    reverse_kl: float | None
    by_domain: dict[str, Interval] = field(default_factory=dict)
    traces: list[TokenTrace] = field(default_factory=list)
    calibration: Calibration | None = None
    reverse_kl_estimate: Estimate | None = None
    student_entropy_estimate: Estimate | None = None
    drafts: dict[str, float] = field(default_factory=dict)
    """The acceptance and the tokens per call of a drafter; empty without one."""
    draft_scores: list[float] = field(default_factory=list)
    """The score of each prompt; the mean is the tokens per call, see `score_drafts`."""

    def summarize(self) -> dict[str, Any]:
        """Return the numbers for `summary.json`, without answers, scores and traces."""
        numbers = asdict(self)
        del numbers["answers"], numbers["scores"], numbers["traces"], numbers["draft_scores"]
        drafts = numbers.pop("drafts")
        texts = group_pairs((answer.prompt, answer.text.strip()) for answer in self.answers)
        loops = sum(is_looping(answer.text) for answer in self.answers)
        return {
            "prompts": len(texts),
            "completions": len(self.answers),
            "equal_answers": equal_share(list(texts.values())),
            "looping_answers": loops / len(self.answers),
            **numbers,
            **drafts,
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Evaluation":
        """Read back an evaluation from the result of `dataclasses.asdict`."""
        accuracy, calibration = saved["accuracy"], saved.get("calibration")
        if calibration is not None:
            overconfidence = Interval(**calibration["overconfidence"])
            calibration = Calibration(**{**calibration, "overconfidence": overconfidence})
        # Not validated by pydantic: a task may give whole numbers as rewards, which would become
        # floats, and a resumed run would write other bytes than one that was never interrupted.
        fields = {
            "accuracy": None if accuracy is None else Interval(**accuracy),
            "answers": [GradedCompletion(**answer) for answer in saved["answers"]],
            "by_domain": {
                domain: Interval(**interval) for domain, interval in saved["by_domain"].items()
            },
            "traces": [read_trace(saved_trace) for saved_trace in saved.get("traces", [])],
            "calibration": calibration,
            **{
                name: None if saved[name] is None else Estimate(**saved[name])
                for name in ("reverse_kl_estimate", "student_entropy_estimate")
            },
        }
        return cls(**{**saved, **fields})


def compare_accuracy(before: Evaluation, after: Evaluation, seed: int) -> Interval | None:
    """Return the gain in accuracy with its interval, paired by prompt: see `difference`.

    Returns None if the task gives no rewards.
    """
    if not before.scores or not after.scores:
        return None
    return difference(after.scores, before.scores, seed)


def compare_drafts(before: Evaluation, after: Evaluation, seed: int) -> Interval | None:
    """Return the gain in tokens per target call, paired by prompt; None without a drafter."""
    if not before.draft_scores or not after.draft_scores:
        return None
    return difference(after.draft_scores, before.draft_scores, seed)


def compute_confidences(answers: Sequence[GradedCompletion]) -> dict[str, tuple[float, float]]:
    """Return for each prompt the confidence in [0, 1], and 1.0 if the answer is right, else 0.0.

    Prompts without a reward are left out. With several answers to every prompt, the confidence is
    the share of the most common answer, which is then right or wrong. With one answer, it is the
    probability of the whole text under the model that wrote it. For a calibrated model, this
    probability is the accuracy only if exactly one text is right; it is not informative for long
    answers.
    """
    groups: dict[str, list[GradedCompletion]] = {}
    for answer in answers:
        if answer.reward is not None:
            groups.setdefault(answer.prompt, []).append(answer)
    has_several = has_several_answers(answers)
    pairs: dict[str, tuple[float, float]] = {}
    for prompt, group in groups.items():
        first, is_right = group[0], [(answer.reward or 0.0) >= 1.0 for answer in group]
        if has_several:
            pairs[prompt] = majority_agreement([answer.text.strip() for answer in group], is_right)
        elif first.logprob is not None:
            # The log-probability is a mean over tokens; rounding can lift the sum above 0.
            confidence = math.exp(min(first.logprob * first.tokens, 0.0))
            pairs[prompt] = confidence, float(is_right[0])
    return pairs


def has_several_answers(answers: Sequence[GradedCompletion]) -> bool:
    """Return True if every prompt with rewards has several answers."""
    counts = Counter(answer.prompt for answer in answers if answer.reward is not None)
    return min(counts.values(), default=0) > 1


def compare_overconfidence(before: Evaluation, after: Evaluation, seed: int) -> Interval | None:
    """Return the growth of overconfidence with its interval, paired by prompt.

    Returns None if no prompt has a confidence in both evaluations.
    """
    old, new = (
        {
            prompt: confidence - is_right
            for prompt, (confidence, is_right) in compute_confidences(evaluation.answers).items()
        }
        for evaluation in (before, after)
    )
    shared = [prompt for prompt in old if prompt in new]
    if not shared:
        return None
    return difference([new[prompt] for prompt in shared], [old[prompt] for prompt in shared], seed)
