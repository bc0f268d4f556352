"""Distributions over the vocabulary as log-probabilities: tempered, combined, restricted."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from practicum.functional.precision import IMPOSSIBLE, finite, precise

SUPPORTS = ("student", "teacher", "union", "intersection")
"""The models that can choose the candidates by their top-k tokens."""

TAILS = ("bucket", "renorm", "drop", "sampled")
"""The treatments of the mass outside the candidates."""

SMALLEST_TAIL = 1e-7
"""The smallest tail mass: smaller ones are rounding errors of float32 and are raised to it."""


def entropy(logprobs: Float[Tensor, "*s V"]) -> Float[Tensor, "*s"]:
    """Return the Shannon entropy in nats."""
    logprobs = finite(logprobs)
    return -(logprobs.exp() * logprobs).sum(dim=-1)


def overlap(
    student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"], k: int
) -> tuple[Float[Tensor, "*s"], Float[Tensor, "*s"]]:
    """Return the share of the student's top-k tokens that are in the teacher's top k, and the
    student's mass on these shared tokens.

    arXiv 2604.13016 uses it to measure how well a teacher fits a student.
    """
    k = min(k, student.shape[-1])
    return overlap_of_top(*student.topk(k, dim=-1), teacher.topk(k, dim=-1).indices)


def overlap_of_top(
    logprobs: Float[Tensor, "*s K"], ids: Int[Tensor, "*s K"], other_ids: Int[Tensor, "*s L"]
) -> tuple[Float[Tensor, "*s"], Float[Tensor, "*s"]]:
    """Return the share of the first model's top tokens that are also top tokens of the second
    model, and the first model's mass on these shared tokens.
    """
    both = (ids[..., :, None] == other_ids[..., None, :]).any(dim=-1)
    mass = torch.where(both, precise(logprobs).exp(), 0.0).sum(dim=-1)
    return both.to(mass).mean(dim=-1), mass


def temper(logprobs: Float[Tensor, "*s V"], temperature: float) -> Float[Tensor, "*s V"]:
    """Change a distribution's temperature: `softmax(logprobs / temperature)` (arXiv 1503.02531)."""
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return torch.log_softmax(precise(logprobs) / temperature, dim=-1)


def log_linear(parts: Sequence[tuple[float, Float[Tensor, "*s V"]]]) -> Float[Tensor, "*s V"]:
    """Return the renormalised geometric combination `log_softmax(sum_i c_i * log p_i)`.

    This is the formula of the targets of Veto (arXiv 2601.07155), TAID (2501.16937) and AlignDistil
    (2503.02832), and of the geometric pool of several teachers. A part with coefficient 0 has no
    effect; a token that any other part considers impossible is impossible. Detach the student's
    part before passing it.
    """
    if not parts:
        raise ValueError("log_linear needs at least one part")
    total = torch.zeros_like(precise(parts[0][1]))
    impossible = torch.zeros_like(total, dtype=torch.bool)
    for coefficient, logprobs in parts:
        if coefficient != 0.0:
            total = total + coefficient * finite(logprobs)
            impossible = impossible | torch.isneginf(logprobs)
    return torch.log_softmax(total.masked_fill(impossible, -math.inf), dim=-1)


def mixture(parts: Sequence[tuple[float, Float[Tensor, "*s V"]]]) -> Float[Tensor, "*s V"]:
    """Return the arithmetic combination `log(sum_i w_i * p_i)`, with weights that sum to 1 (GKD,
    arXiv 2306.13649, eq. 1).
    """
    weights = [weight for weight, _ in parts]
    if min(weights, default=-1.0) < 0 or not math.isclose(sum(weights), 1.0, abs_tol=1e-6):
        raise ValueError(f"mixture weights must be non-negative and sum to 1, got {weights}")
    used = [(weight, logprobs) for weight, logprobs in parts if weight > 0]
    stacked = torch.stack([math.log(weight) + finite(logprobs) for weight, logprobs in used])
    impossible = torch.stack([torch.isneginf(logprobs) for _, logprobs in used]).all(dim=0)
    return torch.logsumexp(stacked, dim=0).masked_fill(impossible, -math.inf)


def greedy(logprobs: Float[Tensor, "*s V"]) -> Float[Tensor, "*s V"]:
    """Return a distribution with all probability on the most likely token: the expert's action in
    DAgger (arXiv 1011.0686).
    """
    top_tokens = logprobs.argmax(dim=-1, keepdim=True)
    return torch.full_like(precise(logprobs), -math.inf).scatter(-1, top_tokens, 0.0)


def contrast(
    teacher: Float[Tensor, "*s V"], reference: Float[Tensor, "*s V"], scale: float, floor: float
) -> tuple[Float[Tensor, "*s V"], Float[Tensor, "*s"]]:
    """Return `log_softmax((1 + w) log T - w log R)` and its `w = scale TV(T, R) + floor`
    (AlignDistil, arXiv 2503.02832).
    """
    teacher, reference = finite(teacher), finite(reference)
    w = scale * 0.5 * (teacher.exp() - reference.exp()).abs().sum(dim=-1) + floor
    return torch.log_softmax(teacher + w[..., None] * (teacher - reference), dim=-1), w


def candidates(
    student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"], k: int, support: str
) -> tuple[Int[Tensor, "*s K"], Bool[Tensor, "*s K"]]:
    """Return the ids of the candidates at each position, and a mask of the valid candidates.

    `student` and `teacher` give K = k. `union` gives K = 2k, and ids of the teacher that repeat ids
    of the student are not valid. `intersection` gives the student's k, and only the ids among the
    teacher's k are valid. A k above the size of the vocabulary is reduced to it.
    """
    if support not in SUPPORTS:
        raise ValueError(f"no support named {support!r}; known: {', '.join(SUPPORTS)}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    k = min(k, student.shape[-1])
    if support in ("student", "teacher"):
        ids = (student if support == "student" else teacher).topk(k, dim=-1).indices
        return ids, torch.ones_like(ids, dtype=torch.bool)
    student_ids, teacher_ids = student.topk(k, dim=-1).indices, teacher.topk(k, dim=-1).indices
    same = student_ids.unsqueeze(-1) == teacher_ids.unsqueeze(-2)
    if support == "intersection":
        return student_ids, same.any(dim=-1)
    fresh = ~same.any(dim=-2)
    return torch.cat([student_ids, teacher_ids], dim=-1), torch.cat(
        [torch.ones_like(fresh), fresh], dim=-1
    )


def restrict(
    logprobs: Float[Tensor, "*s V"],
    ids: Int[Tensor, "*s K"],
    valid: Bool[Tensor, "*s K"],
    tail: str,
    outside: int | None = None,
) -> Float[Tensor, "*s C"]:
    """Restrict a distribution to its valid candidates; see `restrict_candidates` for the treatment
    of the remaining mass.

    `outside` is the number of impossible ids of a folded distribution; the last entry of such a
    distribution is a bucket. See `practicum.functional.support`.
    """
    chosen = logprobs.gather(-1, ids.long().masked_fill(~valid, 0))
    if outside is None:
        return restrict_candidates(chosen, valid, tail, vocabulary=logprobs.shape[-1])
    vocabulary = logprobs.shape[-1] - 1 - outside
    return restrict_candidates(chosen, valid, tail, vocabulary, bucket=logprobs[..., -1])


def restrict_candidates(
    candidate_logprobs: Float[Tensor, "*s K"],
    valid: Bool[Tensor, "*s K"],
    tail: str,
    vocabulary: int | None = None,
    bucket: Float[Tensor, "*s"] | None = None,
) -> Float[Tensor, "*s C"]:
    """Restrict a distribution like `restrict`, from the candidates' log-probabilities only. Invalid
    candidates are -inf in every mode.

    - bucket: one more entry, C = K + 1, holds the log of all other mass. It is at least
      `log(SMALLEST_TAIL)`, or -inf if the candidates are known to be the whole `vocabulary`: then
      the tail is the given `bucket`, the mass outside the vocabulary. A divergence of bucketed
      distributions never exceeds the divergence of the whole distributions (data processing).
    - renorm: the candidates are renormalised to mass 1.
    - drop, sampled: the candidates unchanged, a sub-distribution; with `sampled` the caller
      estimates the tail from the sampled token.
    """
    if tail not in TAILS:
        raise ValueError(f"no tail named {tail!r}; known: {', '.join(TAILS)}")
    # Sums use finite substitutes for -inf, because logsumexp over only -inf has a NaN gradient.
    chosen = finite(candidate_logprobs).masked_fill(~valid, IMPOSSIBLE)
    impossible = ~valid | torch.isneginf(candidate_logprobs)
    if tail == "renorm":
        return torch.log_softmax(chosen, dim=-1).masked_fill(impossible, -math.inf)
    head = chosen.masked_fill(impossible, -math.inf)
    if tail != "bucket":
        return head
    log_tail = _log_complement(torch.logsumexp(chosen, dim=-1))
    if vocabulary is not None:
        is_whole = valid.sum(dim=-1) >= vocabulary
        log_tail = log_tail.masked_fill(is_whole, -math.inf)
        log_tail = log_tail if bucket is None else torch.where(is_whole, bucket, log_tail)
    return torch.cat([head, log_tail.unsqueeze(-1)], dim=-1)


def _log_complement(log_mass: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return `log(1 - exp(log_mass))`, accurate on either side of mass 1/2 (Maechler 2012)."""
    log_mass = log_mass.clamp(max=math.log1p(-SMALLEST_TAIL))
    large = torch.log(-torch.expm1(log_mass))
    small = torch.log1p(-log_mass.clamp(max=-math.log(2.0)).exp())
    return torch.where(log_mass > -math.log(2.0), large, small)
