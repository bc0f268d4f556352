"""How much each token counts: non-negative, detached, zero off the mask."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from practicum.functional.precision import precise


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStatistics:
    """What is known about each token of a flat batch; a statistic that nobody computed is None.

    `positions` counts the tokens of each completion from 0; `loss_mask` is true where the student chose the token.
    """

    loss_mask: Bool[Tensor, " T"] | Float[Tensor, " T"]
    student_entropy: Float[Tensor, " T"] | None = None
    teacher_entropy: Float[Tensor, " T"] | None = None
    divergence: Float[Tensor, " T"] | None = None
    logprobs: Float[Tensor, " T"] | None = None
    teacher_logprobs: Float[Tensor, " T"] | None = None
    positions: Int[Tensor, " T"] | None = None


def all(statistics: TokenStatistics) -> Float[Tensor, " T"]:
    """Every supervised token counts 1."""
    return _mask(statistics)


def entropy_top(statistics: TokenStatistics, fraction: float = 0.2, of: str = "student") -> Float[Tensor, " T"]:
    """The `fraction` of tokens at which the student (or teacher) is least certain (arXiv 2506.01939)."""
    if of not in ("student", "teacher"):
        raise ValueError(f"entropy_top: of must be student or teacher, got {of!r}")
    return _top(_mask(statistics), _statistic("entropy_top", statistics, f"{of}_entropy"), fraction)


def divergence_top(statistics: TokenStatistics, fraction: float = 0.5) -> Float[Tensor, " T"]:
    """The `fraction` of tokens at which student and teacher disagree most."""
    return _top(_mask(statistics), _statistic("divergence_top", statistics, "divergence"), fraction)


def soft_or(statistics: TokenStatistics, fraction: float = 0.5) -> Float[Tensor, " T"]:
    """The `fraction` of tokens of highest h + d - h d: uncertain, or confidently wrong (TIP, arXiv 2604.14084).

    h and d are the student's entropy and the divergence, each divided by its largest value in the batch.
    """
    return _top(_mask(statistics), soft_or_score(statistics), fraction)


def soft_or_score(statistics: TokenStatistics) -> Float[Tensor, " T"]:
    """h + d - h d in [0, 1], the score that `soft_or` ranks by."""
    mask = _mask(statistics)
    h = _share(_statistic("soft_or", statistics, "student_entropy"), mask)
    d = _share(_statistic("soft_or", statistics, "divergence"), mask)
    return h + d - h * d


def prefix(statistics: TokenStatistics, length: int = 1024) -> Float[Tensor, " T"]:
    """The first `length` tokens of each completion."""
    if length < 0:
        raise ValueError(f"prefix: length must not be negative, got {length}")
    return _mask(statistics) * (_statistic("prefix", statistics, "positions") < length)


def threshold(statistics: TokenStatistics, above: float = 0.0, of: str = "teacher_entropy") -> Float[Tensor, " T"]:
    """The tokens at which a statistic exceeds a fixed value (Entropy-Aware OPD, arXiv 2603.07079)."""
    return _mask(statistics) * (_statistic("threshold", statistics, of, MEASURES) > above)


MEASURES = ("student_entropy", "teacher_entropy", "divergence", "logprobs", "teacher_logprobs")
"""The statistics that `threshold` can compare."""


def _mask(statistics: TokenStatistics) -> Tensor:
    mask = statistics.loss_mask
    return precise((mask != 0).to(mask.dtype if mask.is_floating_point() else torch.float32))


def _statistic(weight: str, statistics: TokenStatistics, name: str, allowed: tuple[str, ...] = ()) -> Tensor:
    if allowed and name not in allowed:
        raise ValueError(f"{weight}: no statistic named {name!r}; known: {', '.join(allowed)}")
    value = getattr(statistics, name)
    if value is None:
        raise ValueError(f"{weight} needs {name}, which the signal of this term does not give")
    return value.detach()


def _share(values: Tensor, mask: Tensor) -> Tensor:
    values = torch.where(mask > 0, precise(values), 0.0).clamp(min=0.0)
    largest = values.max() if len(values) else values.sum()
    return values / largest if largest > 0 else values


def _top(mask: Tensor, score: Tensor, fraction: float) -> Tensor:
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"fraction must be in (0, 1], got {fraction}")
    # The small step back keeps 0.1 * 30 = 3.0000000000000004 from being four tokens.
    count = math.ceil(fraction * int(mask.sum()) - 1e-9)
    order = torch.where(mask > 0, precise(score), -math.inf).argsort(descending=True, stable=True)
    return torch.zeros_like(mask).index_fill(0, order[:count], 1.0) * mask


@dataclass(frozen=True, slots=True)
class Weight:
    """One way to weight tokens: `function(statistics, **parameters)`, and the parameters at which all weigh alike."""

    name: str
    function: Callable[..., Tensor]
    summary: str
    defaults: Mapping[str, int | float | str] = field(default_factory=dict)
    identity: Mapping[str, int | float | str] = field(default_factory=dict)
    paper: str = ""


_ALL_OF_THEM = {"fraction": 1.0}
_LEAST_CERTAIN = {"fraction": 0.2, "of": "student"}

WEIGHTS: dict[str, Weight] = {
    entry.name: entry
    for entry in (
        Weight("all", all, "every supervised token counts 1"),
        Weight("entropy_top", entropy_top, "the least certain tokens", _LEAST_CERTAIN, _ALL_OF_THEM, "2506.01939"),
        Weight("divergence_top", divergence_top, "the tokens of most disagreement", {"fraction": 0.5}, _ALL_OF_THEM),
        Weight("soft_or", soft_or, "uncertain or confidently wrong", {"fraction": 0.5}, _ALL_OF_THEM, "2604.14084"),
        Weight("prefix", prefix, "the first tokens of each completion", {"length": 1024}, {"length": 1 << 40}),
        Weight(
            "threshold",
            threshold,
            "tokens at which a statistic exceeds a value",
            {"above": 0.0, "of": "teacher_entropy"},
            {"above": -math.inf},
            "2603.07079",
        ),
    )
}
"""Every token weight by name."""
