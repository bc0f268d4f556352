"""Weights of the completions of a prompt: non-negative and detached."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from practicum.functional.table import Number, Table, defaults_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStatistics:
    """Statistics of the completions of one prompt; `kept` marks the completions that a term trains
    on.

    `student_nll`, `teacher_nll` and `reference_nll` are mean negative log-probabilities per token, so
    perplexity is their exponential.
    """

    kept: Sequence[bool]
    rewards: Sequence[float | None] = ()
    texts: Sequence[str] = ()
    student_nll: Sequence[float] = ()
    teacher_nll: Sequence[float] = ()
    reference_nll: Sequence[float] = ()


TOKEN_STATISTICS = frozenset({"student_nll", "teacher_nll", "reference_nll"})
"""The statistics that need all tokens of a completion."""


@dataclass(frozen=True, slots=True)
class SampleWeight:
    """One way to weight completions: `function(statistics, **parameters)`, and the facts that
    decide where it can be used.

    - needs: the statistics that it reads in addition to `kept`; `{model}` in a name is replaced by
      the value of the parameter `model`
    - by_reward: better completions of a prompt count more
    """

    name: str
    function: Callable[..., list[float]]
    summary: str
    paper: str = ""
    needs: tuple[str, ...] = ()
    by_reward: bool = False

    @property
    def defaults(self) -> Mapping[str, Number]:
        """The parameters with their defaults."""
        return defaults_of(self.function)

    def needed(self, parameters: Mapping[str, Number]) -> frozenset[str]:
        """Return the statistics that are read with these parameters."""
        return frozenset(need.format(**parameters) for need in self.needs)


SAMPLE_WEIGHTS = Table(SampleWeight, "samples")
"""Every sample weight by name."""


@SAMPLE_WEIGHTS.enter("every completion counts 1")
def uniform(statistics: SampleStatistics) -> list[float]:
    """Return 1 for every completion."""
    return [1.0] * len(statistics.kept)


@SAMPLE_WEIGHTS.enter("prompts neither solved nor hopeless", "2603.11178", ("rewards",))
def pass_rate(statistics: SampleStatistics, a: float = 1.0, b: float = 1.0) -> list[float]:
    """Return `p**a (1 - p)**b` for the share p of right completions: 0 if all are right or wrong
    (PACED, arXiv 2603.11178).
    """
    outcomes = [reward >= 1.0 for reward in statistics.rewards if reward is not None]
    p = sum(outcomes) / len(outcomes) if outcomes else 0.0
    return [p**a * (1.0 - p) ** b] * len(statistics.kept)


@SAMPLE_WEIGHTS.enter("by perplexity", "2604.10688", ("{model}_nll",))
def ppl_softmax(
    statistics: SampleStatistics, model: str = "student", temperature: float = 1.0
) -> list[float]:
    """Return weights that sum to 1 over the kept completions, by perplexity (SCOPE, arXiv
    2604.10688).

    With the student's perplexity, weights are proportional to `PPL**(1 / temperature)`, so that
    surprising right answers count more. With the teacher's, they are proportional to `PPL**(-1 /
    temperature)`, so that it corrects answers that it understands.
    """
    if model not in ("student", "teacher"):
        raise ValueError(f"ppl_softmax: model must be student or teacher, got {model!r}")
    if temperature <= 0:
        raise ValueError(f"ppl_softmax: temperature must be positive, got {temperature}")
    signed = (
        statistics.student_nll
        if model == "student"
        else [-value for value in statistics.teacher_nll]
    )
    return _softmax([value / temperature for value in signed], statistics.kept)


@SAMPLE_WEIGHTS.enter("by the mean of log T - log R", "", ("teacher_nll", "reference_nll"))
def by_context(statistics: SampleStatistics, temperature: float = 1.0) -> list[float]:
    """Return weights that sum to 1 over the kept completions, proportional to exp(g / `temperature`), g the mean of
    log T - log R per token.

    If the reference is the teacher without a part of its prompt, completions that depend on it count more.
    """
    if temperature <= 0:
        raise ValueError(f"by_context: temperature must be positive, got {temperature}")
    pairs = zip(statistics.teacher_nll, statistics.reference_nll, strict=True)
    scores = [(reference - teacher) / temperature for teacher, reference in pairs]
    return _softmax(scores, statistics.kept)


def _softmax(scores: Sequence[float], mask: Sequence[bool]) -> list[float]:
    """Return weights that sum to 1 over the completions of the mask, and 0 outside it."""
    chosen = [score for score, counts in zip(scores, mask, strict=True) if counts]
    if not chosen:
        return [0.0] * len(mask)
    top = max(chosen)
    total = sum(math.exp(score - top) for score in chosen)
    weights = iter(math.exp(score - top) / total for score in chosen)
    return [next(weights) if counts else 0.0 for counts in mask]


@SAMPLE_WEIGHTS.enter("a reward above the group's mean", "2606.04036", ("rewards",), by_reward=True)
def above_mean(statistics: SampleStatistics) -> list[float]:
    """Return 1 for completions with a reward above their group's mean, else 0: a positive advantage
    (SDPG, 2606.04036).
    """
    rewards = [reward for reward in statistics.rewards if reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    return [float(reward is not None and reward > mean) for reward in statistics.rewards]


@SAMPLE_WEIGHTS.enter("the best of the writer's own", "2407.14622", ("rewards",), by_reward=True)
def best(statistics: SampleStatistics) -> list[float]:
    """Return 1 for the kept completion with the highest reward, shared evenly between ties, else 0:
    best-of-N (BOND, arXiv 2407.14622).
    """
    pairs = zip(statistics.rewards, statistics.kept, strict=True)
    rewards = [reward if is_kept else None for reward, is_kept in pairs]
    top = max((reward for reward in rewards if reward is not None), default=None)
    count = sum(reward is not None and reward == top for reward in rewards)
    return [1.0 / count if reward is not None and reward == top else 0.0 for reward in rewards]


@SAMPLE_WEIGHTS.enter("the same text as most of the group", "2602.20574", ("texts",))
def consensus(statistics: SampleStatistics, share: float = 0.5) -> list[float]:
    """Return 1 for completions with the same text as at least `share` of the group, else 0 (GATES,
    arXiv 2602.20574).
    """
    texts = [text.strip() for text in statistics.texts]
    counts = Counter(texts)
    return [float(counts[text] >= share * len(texts)) for text in texts]
