"""Weights of the tokens: non-negative, detached, zero outside the mask."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from practicum.functional.precision import precise
from practicum.functional.table import Number, Table, defaults_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStatistics:
    """Statistics of each token of a flat batch; None if a statistic was not computed.

    `positions` counts the tokens of each completion from 0 and `rows` the completions. `loss_mask`
    is true for supervised tokens. `sampled_rank` is the number of tokens that the teacher finds
    more likely than this token, and `greedy_rank` than the student's most likely token.
    `reference_logprobs` are the reference's of the sampled tokens.
    `drafted_rank` is the number of the student's drafts that the teacher rejects before it accepts
    one, see `practicum.functional.speculative`. `special`
    is true for tokens outside the text, such as the stop token. `turns` numbers the turns of a
    conversation from 0.
    """

    loss_mask: Bool[Tensor, " T"] | Float[Tensor, " T"]
    student_entropy: Float[Tensor, " T"] | None = None
    teacher_entropy: Float[Tensor, " T"] | None = None
    divergence: Float[Tensor, " T"] | None = None
    logprobs: Float[Tensor, " T"] | None = None
    teacher_logprobs: Float[Tensor, " T"] | None = None
    reference_logprobs: Float[Tensor, " T"] | None = None
    positions: Int[Tensor, " T"] | None = None
    rows: Int[Tensor, " T"] | None = None
    sampled_rank: Int[Tensor, " T"] | None = None
    greedy_rank: Int[Tensor, " T"] | None = None
    drafted_rank: Int[Tensor, " T"] | None = None
    special: Bool[Tensor, " T"] | None = None
    turns: Int[Tensor, " T"] | None = None


RANK_STATISTICS = frozenset({"sampled_rank", "greedy_rank", "drafted_rank"})
"""The statistics that need the teacher's whole vocabulary."""

TEACHER_STATISTICS = RANK_STATISTICS | {
    "teacher_entropy",
    "teacher_logprobs",
    "reference_logprobs",
    "divergence",
}
"""The statistics that need a teacher."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One way to weight tokens: `function(statistics, **parameters)`, and the facts that decide
    where it can be used.

    - needs: the statistics that it reads in addition to the mask; `{model}` in a name is replaced
      by the value of the parameter `model`
    - pointwise: a token's weight depends on that token only, so that it is known without the rest
      of the batch
    - identity: the parameter values at which all tokens have the same weight, if there are any
    - drops: it may give the weight 0 to a token in the mask
    """

    name: str
    function: Callable[..., Tensor]
    summary: str
    paper: str = ""
    needs: tuple[str, ...] = ()
    pointwise: bool = False
    identity: Mapping[str, Number] | None = None
    drops: bool = True

    @property
    def defaults(self) -> Mapping[str, Number]:
        """The parameters with their defaults."""
        return defaults_of(self.function)

    def needed(self, parameters: Mapping[str, Number]) -> frozenset[str]:
        """Return the statistics that are read with these parameters."""
        return frozenset(need.format(**parameters) for need in self.needs)


WEIGHTS = Table(Weight, "weights")
"""Every token weight by name."""

_BOTH_LOGPROBS = ("logprobs", "teacher_logprobs")
_ALL_TOKENS = {"fraction": 1.0}


@WEIGHTS.enter("every supervised token counts 1", pointwise=True, identity={}, drops=False)
def all(statistics: TokenStatistics) -> Float[Tensor, " T"]:
    """Return 1 for every supervised token."""
    return _mask(statistics)


@WEIGHTS.enter("the least certain tokens", "2506.01939", ("{model}_entropy",), identity=_ALL_TOKENS)
def entropy_top(
    statistics: TokenStatistics, fraction: float = 0.2, model: str = "student"
) -> Float[Tensor, " T"]:
    """Mark the student's (or teacher's) least certain `fraction` of tokens (arXiv 2506.01939)."""
    if model not in ("student", "teacher"):
        raise ValueError(f"entropy_top: model must be student or teacher, got {model!r}")
    return _top(
        _mask(statistics), _statistic("entropy_top", statistics, f"{model}_entropy"), fraction
    )


@WEIGHTS.enter("the tokens of largest divergence", needs=("divergence",), identity=_ALL_TOKENS)
def divergence_top(statistics: TokenStatistics, fraction: float = 0.5) -> Float[Tensor, " T"]:
    """Mark the `fraction` of tokens with the largest divergence of student and teacher."""
    return _top(_mask(statistics), _statistic("divergence_top", statistics, "divergence"), fraction)


@WEIGHTS.enter(
    "uncertain or confidently wrong",
    "2604.14084",
    ("student_entropy", "divergence"),
    identity=_ALL_TOKENS,
)
def soft_or(statistics: TokenStatistics, fraction: float = 0.5) -> Float[Tensor, " T"]:
    """Mark the `fraction` of tokens with the highest h + d - h d: uncertain, or confidently wrong
    (TIP, arXiv 2604.14084).

    h and d are the student's entropy and the divergence, each divided by its largest value in the
    batch.
    """
    return _top(_mask(statistics), soft_or_score(statistics), fraction)


def soft_or_score(statistics: TokenStatistics) -> Float[Tensor, " T"]:
    """Return h + d - h d in [0, 1], the score of `soft_or`."""
    mask = _mask(statistics)
    h = _share(_statistic("soft_or", statistics, "student_entropy"), mask)
    d = _share(_statistic("soft_or", statistics, "divergence"), mask)
    return h + d - h * d


@WEIGHTS.enter(
    "the first tokens of each completion",
    "",
    ("positions",),
    pointwise=True,
    identity={"length": 1 << 40},
)
def prefix(statistics: TokenStatistics, length: int = 1024) -> Float[Tensor, " T"]:
    """Mark the first `length` tokens of each completion."""
    if length < 0:
        raise ValueError(f"prefix: length must not be negative, got {length}")
    return _mask(statistics) * (_statistic("prefix", statistics, "positions") < length)


@WEIGHTS.enter(
    "each turn of a conversation less than the previous turn",
    needs=("turns",),
    pointwise=True,
    identity={"decay": 1.0},
    drops=False,
)
def turn(statistics: TokenStatistics, decay: float = 0.9) -> Float[Tensor, " T"]:
    """Return `decay` to the power of the turn's number, so that the first turn counts 1."""
    if not 0 < decay <= 1:
        raise ValueError(f"turn: decay must be above 0 and at most 1, got {decay}")
    turns = _statistic("turn", statistics, "turns")
    return _mask(statistics) * decay ** turns.to(torch.float32)


@WEIGHTS.enter(
    "tokens at which a statistic exceeds a value",
    "2603.07079",
    ("{statistic}",),
    pointwise=True,
    identity={"above": -math.inf},
)
def threshold(
    statistics: TokenStatistics,
    above: float = 0.0,
    statistic: str = "teacher_entropy",
    below: float = math.inf,
) -> Float[Tensor, " T"]:
    """Mark the tokens with a statistic in (above, below] (Entropy-Aware OPD, arXiv 2603.07079)."""
    value = _statistic("threshold", statistics, statistic, MEASURES)
    return _mask(statistics) * ((value > above) & (value <= below))


@WEIGHTS.enter(
    "min(T / S, maximum) of the token", needs=_BOTH_LOGPROBS, pointwise=True, drops=False
)
def trust(statistics: TokenStatistics, maximum: float = 1.0) -> Float[Tensor, " T"]:
    """Return min(T / S, maximum) of the sampled token: 1 if the teacher finds it at least as likely
    (TrOPD).

    With `maximum` 1 it is the probability that speculative decoding accepts the token (arXiv
    2211.17192).
    """
    if maximum <= 0:
        raise ValueError(f"trust: maximum must be positive, got {maximum}")
    gap = _statistic("trust", statistics, "teacher_logprobs") - _statistic(
        "trust", statistics, "logprobs"
    )
    return _mask(statistics) * precise(gap).clamp(max=math.log(maximum)).exp()


@WEIGHTS.enter(
    "1 - min(T / S, 1): how surely the teacher rejects it",
    "2310.07177",
    _BOTH_LOGPROBS,
    pointwise=True,
)
def distrust(statistics: TokenStatistics) -> Float[Tensor, " T"]:
    """Return 1 - min(T / S, 1): the probability that the teacher rejects the sampled token (OSD,
    arXiv 2310.07177).
    """
    return _mask(statistics) - trust(statistics)


@WEIGHTS.enter("tokens the teacher finds at least as likely", needs=_BOTH_LOGPROBS, pointwise=True)
def positive_advantage(statistics: TokenStatistics) -> Float[Tensor, " T"]:
    """Mark the tokens that the teacher finds at least as likely as the student does."""
    return _mask(statistics) - negative_advantage(statistics)


@WEIGHTS.enter("tokens the teacher finds less likely", "2605.06387", _BOTH_LOGPROBS, pointwise=True)
def negative_advantage(statistics: TokenStatistics) -> Float[Tensor, " T"]:
    """Mark tokens that the teacher finds less likely than the student (AOPD, arXiv 2605.06387)."""
    teacher = _statistic("negative_advantage", statistics, "teacher_logprobs")
    return _mask(statistics) * (teacher < _statistic("negative_advantage", statistics, "logprobs"))


@WEIGHTS.enter(
    "tokens that the teacher accepts, by its top k or by k drafts",
    "2510.24021",
    ("{of}_rank",),
    pointwise=True,
    identity={"k": 1 << 40},
)
def accepted(
    statistics: TokenStatistics, k: int = 5, of: str = "sampled", rejected: float = 0.0
) -> Float[Tensor, " T"]:
    """Return 1 where the teacher's top k have the sampled token (or with `of=greedy` the student's
    most likely one), and `rejected` elsewhere (SelecTKD, arXiv 2510.24021).

    With `of=drafted` it is 1 where the teacher accepts one of k independent drafts of the student,
    each with probability min(T / S, 1): Spec-k.
    """
    if k < 1:
        raise ValueError(f"accepted: k must be at least 1, got {k}")
    if of not in ("sampled", "greedy", "drafted"):
        raise ValueError(f"accepted: of must be sampled, greedy or drafted, got {of!r}")
    if rejected < 0:
        raise ValueError(f"accepted: rejected must not be negative, got {rejected}")
    accepts = _statistic("accepted", statistics, f"{of}_rank") < k
    mask = _mask(statistics)
    return mask * torch.where(accepts, torch.ones_like(mask), rejected)


@WEIGHTS.enter("tokens outside the teacher's top k", needs=("sampled_rank",), pointwise=True)
def rejected(statistics: TokenStatistics, k: int = 5) -> Float[Tensor, " T"]:
    """Mark the sampled tokens outside the teacher's top k."""
    return _mask(statistics) - accepted(statistics, k)


@WEIGHTS.enter("tokens of the text, no special tokens", "2603.25562", ("special",), pointwise=True)
def not_special(statistics: TokenStatistics) -> Float[Tensor, " T"]:
    """Mark the tokens of the text: if templates differ, scores of special tokens are meaningless
    (Revisiting OPD, arXiv 2603.25562).
    """
    return _mask(statistics) * ~_statistic("not_special", statistics, "special")


@WEIGHTS.enter(
    "exp(-beta H)",
    "2604.02288",
    ("{model}_entropy",),
    pointwise=True,
    identity={"beta": 0.0},
    drops=False,
)
def certain(
    statistics: TokenStatistics, beta: float = 1.0, model: str = "teacher"
) -> Float[Tensor, " T"]:
    """Return exp(-beta H): low if the teacher (or student) is unsure (SRPO, arXiv 2604.02288)."""
    if model not in ("student", "teacher"):
        raise ValueError(f"certain: model must be student or teacher, got {model!r}")
    if beta < 0:
        raise ValueError(f"certain: beta must not be negative, got {beta}")
    return _mask(statistics) * torch.exp(
        -beta * precise(_statistic("certain", statistics, f"{model}_entropy"))
    )


@WEIGHTS.enter(
    "early tokens more, by their share of the log-ratio",
    "2606.22600",
    ("rows", *_BOTH_LOGPROBS),
    identity={"gamma": 0.0},
    drops=False,
)
def importance(statistics: TokenStatistics, gamma: float = 0.5) -> Float[Tensor, " T"]:
    """Return 1 + gamma (1 - c), c the share of the completion's |log T - log S| up to the token
    (arXiv 2606.22600).
    """
    if gamma < 0:
        raise ValueError(f"importance: gamma must not be negative, got {gamma}")
    mask, rows = _mask(statistics), _statistic("importance", statistics, "rows")
    gap = _statistic("importance", statistics, "teacher_logprobs") - _statistic(
        "importance", statistics, "logprobs"
    )
    size = torch.where(mask > 0, precise(gap).abs(), 0.0)
    count = int(rows.max()) + 1 if len(rows) else 0
    totals = size.new_zeros(count).index_add_(0, rows, size)
    # Tokens of a completion are consecutive, so one running sum serves all completions: subtract
    # the sum of the completions before.
    before = totals.cumsum(0) - totals
    share = (size.cumsum(0) - before[rows]) / totals[rows].clamp(min=torch.finfo(size.dtype).tiny)
    return mask * (1.0 + gamma * (1.0 - share.clamp(0.0, 1.0)))


@WEIGHTS.enter(
    "tokens of the largest log T - log R, averaged apart from the rest",
    "",
    ("rows", "teacher_logprobs", "reference_logprobs"),
)
def by_context(
    statistics: TokenStatistics, fraction: float = 0.2, share: float = 0.5
) -> Float[Tensor, " T"]:
    """Give `share` of a completion's weight to the `fraction` of its tokens with the largest log T - log R,
    and the rest to its other tokens.

    If the reference is the teacher without a part of its prompt, such as a picture, the first group depends
    most on this part. The weights of a completion sum to its number of tokens.
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"by_context: share must be in (0, 1), got {share}")
    names = ("rows", "teacher_logprobs", "reference_logprobs")
    rows, teacher, reference = (_statistic("by_context", statistics, name) for name in names)
    mask = _mask(statistics)
    is_high = _top_of_rows(mask, precise(teacher) - precise(reference), rows, fraction)
    parts = mask * is_high, mask * ~is_high
    shares = torch.where(is_high, share, 1 - share)
    # A completion with one group of tokens counts as without groups.
    counts = [_divide_sums(rows, mask, part) for part in parts]
    has_both = _divide_sums(rows, parts[0], mask) * _divide_sums(rows, parts[1], mask) > 0
    return mask * torch.where(has_both, shares * torch.where(is_high, *counts), 1.0)


@WEIGHTS.enter("a mean over tokens with a signal", needs=("rows",), drops=False)
def scored_mean(statistics: TokenStatistics) -> Float[Tensor, " T"]:
    """Divide by the completion's share of tokens with a signal, so that a mean is over these tokens."""
    mask, rows = _mask(statistics), _statistic("scored_mean", statistics, "rows")
    return mask * _divide_sums(rows, torch.ones_like(mask), mask)


_TOTALS = ("rows", "logprobs", "divergence")


@WEIGHTS.enter("a divergence as large as the cross-entropy", "2605.21699", _TOTALS, drops=False)
def ce_scale(statistics: TokenStatistics) -> Float[Tensor, " T"]:
    """Scale a completion's divergence to its cross-entropy (arXiv 2605.21699, NVIDIA-NeMo/RL).

    The code scales each micro-batch, by default one text. A divergence of 0 keeps its scale.
    """
    rows, logprobs, divergence = (_statistic("ce_scale", statistics, name) for name in _TOTALS)
    mask = _mask(statistics)
    return mask * _divide_sums(rows, logprobs, torch.where(mask > 0, divergence, 0.0))


MEASURES = ("student_entropy", "teacher_entropy", "divergence", "logprobs", "teacher_logprobs")
"""The statistics that `threshold` can compare."""


def _mask(statistics: TokenStatistics) -> Tensor:
    mask = statistics.loss_mask
    return precise((mask != 0).to(mask.dtype if mask.is_floating_point() else torch.float32))


def _statistic(
    weight: str, statistics: TokenStatistics, name: str, allowed: tuple[str, ...] = ()
) -> Tensor:
    if allowed and name not in allowed:
        raise ValueError(f"{weight}: no statistic named {name!r}; known: {', '.join(allowed)}")
    value = getattr(statistics, name)
    if value is None:
        raise ValueError(f"{weight} needs {name}, which the signal of this term does not give")
    return value.detach()


def _divide_sums(rows: Tensor, *parts: Tensor) -> Tensor:
    """Return the ratio of the sizes of two sums over each token's completion; 1 over 0."""
    # Number only rows with tokens: rows without a loss may have higher numbers than there are tokens.
    _, rows = rows.unique(return_inverse=True)
    totals = torch.stack([precise(part) for part in parts])
    totals = totals.new_zeros(2, len(rows) + 1).index_add_(1, rows, totals).abs()
    return torch.where(totals[1] > 0, totals[0] / totals[1], 1.0)[rows]


def _share(values: Tensor, mask: Tensor) -> Tensor:
    values = torch.where(mask > 0, precise(values), 0.0).clamp(min=0.0)
    largest = values.max() if len(values) else values.sum()
    return values / largest if largest > 0 else values


def _top_of_rows(mask: Tensor, score: Tensor, rows: Tensor, fraction: float) -> Tensor:
    """Return True at the `fraction` of each row's tokens with the highest score, rounded up."""
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"fraction must be in (0, 1], got {fraction}")
    _, rows = rows.unique(return_inverse=True)
    ordered = torch.where(mask > 0, score, -math.inf).argsort(descending=True, stable=True)
    ordered = ordered[rows[ordered].argsort(stable=True)]
    sizes = torch.bincount(rows, minlength=1)
    starts = (sizes.cumsum(0) - sizes)[rows[ordered]]
    ranks = torch.empty_like(rows)
    ranks[ordered] = torch.arange(len(rows), device=rows.device) - starts
    counts = mask.new_zeros(len(sizes)).index_add_(0, rows, mask)
    return (mask > 0) & (ranks < (fraction * counts - 1e-9).ceil()[rows])


def _top(mask: Tensor, score: Tensor, fraction: float) -> Tensor:
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"fraction must be in (0, 1], got {fraction}")
    # The small step back keeps 0.1 * 30 = 3.0000000000000004 from being four tokens.
    count = math.ceil(fraction * int(mask.sum()) - 1e-9)
    order = torch.where(mask > 0, precise(score), -math.inf).argsort(descending=True, stable=True)
    return torch.zeros_like(mask).index_fill(0, order[:count], 1.0) * mask
