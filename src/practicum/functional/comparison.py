"""Compare two distributions at each token: divergences, entropies, overlap of the top tokens.

Evaluations, traces, the doctor and the metrics of an update all use these definitions.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.functional.distributions import entropy, overlap_of_top
from practicum.functional.divergences import forward_kl, reverse_kl
from practicum.functional.sequence import gather_logprobs

TOP = 16
"""The default number of top tokens to compare (arXiv 2604.13016)."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Measures of student and teacher at each of T tokens, in nats.

    A measure is None if it was not requested or a distribution is unknown. `*_logprobs` are the
    log-probabilities of the tokens themselves, `*_top_*` the K most likely tokens in descending
    order. `overlap` is the share of the student's K tokens that are among the teacher's K, and
    `*_mass` the probability on these shared tokens (arXiv 2604.13016).
    """

    student_logprobs: Float[Tensor, " T"] | None = None
    teacher_logprobs: Float[Tensor, " T"] | None = None
    student_entropy: Float[Tensor, " T"] | None = None
    teacher_entropy: Float[Tensor, " T"] | None = None
    student_top_ids: Int[Tensor, "T K"] | None = None
    student_top_logprobs: Float[Tensor, "T K"] | None = None
    teacher_top_ids: Int[Tensor, "T K"] | None = None
    teacher_top_logprobs: Float[Tensor, "T K"] | None = None
    reverse_kl: Float[Tensor, " T"] | None = None
    forward_kl: Float[Tensor, " T"] | None = None
    overlap: Float[Tensor, " T"] | None = None
    student_mass: Float[Tensor, " T"] | None = None
    teacher_mass: Float[Tensor, " T"] | None = None

    def known(self) -> dict[str, Tensor]:
        """Return the measures that are not None, by name."""
        return {name: values for name in MEASURES if (values := getattr(self, name)) is not None}


MEASURES = tuple(field.name for field in fields(Comparison))

Part = tuple[Float[Tensor, "t V"] | None, Float[Tensor, "t V"] | None, Int[Tensor, " t"]]
"""Student and teacher log-probabilities at consecutive tokens (None if unknown), and the tokens."""


def compare(parts: Iterable[Part], measures: Collection[str], k: int = TOP) -> Comparison:
    """Compute the named measures, one part after another.

    If `parts` is a generator, only one part is in memory at a time. `k` is the number of top
    tokens; if the vocabulary is smaller, all of it is used.
    """
    if unknown := sorted(set(measures) - set(MEASURES)):
        raise ValueError(f"no measure named {unknown[0]!r}; known: {', '.join(MEASURES)}")
    values: dict[str, list[Tensor]] = {}
    for student, teacher, tokens in parts:
        sides = [
            None if logprobs is None else _Side(logprobs, tokens, k)
            for logprobs in (student, teacher)
        ]
        part_values: dict[str, Tensor] = {}
        for role, side in zip(("student", "teacher"), sides, strict=True):
            if side is not None:
                part_values |= {
                    name: measure(side)
                    for suffix, measure in _SIDE_MEASURES.items()
                    if (name := f"{role}_{suffix}") in measures
                }
        if sides[0] is not None and sides[1] is not None:
            part_values |= {
                name: measure(sides[0], sides[1])
                for name, measure in PAIR_MEASURES.items()
                if name in measures
            }
        for name, tensor in part_values.items():
            values.setdefault(name, []).append(tensor)
    return Comparison(**{name: torch.cat(tensors) for name, tensors in values.items()})


@dataclass(frozen=True)
class _Side:
    """One of the two distributions, with its top tokens computed at most once."""

    logprobs: Float[Tensor, "t V"]
    tokens: Int[Tensor, " t"]
    k: int

    @cached_property
    def top(self) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of the top tokens, and their ids."""
        return self.logprobs.topk(min(self.k, self.logprobs.shape[-1]), dim=-1)


_SIDE_MEASURES: dict[str, Callable[[_Side], Tensor]] = {
    "logprobs": lambda side: gather_logprobs(side.logprobs, side.tokens.to(side.logprobs.device)),
    "entropy": lambda side: entropy(side.logprobs),
    "top_ids": lambda side: side.top[1],
    "top_logprobs": lambda side: side.top[0],
}

PAIR_MEASURES: dict[str, Callable[[_Side, _Side], Tensor]] = {
    "reverse_kl": lambda student, teacher: reverse_kl(student.logprobs, teacher.logprobs),
    "forward_kl": lambda student, teacher: forward_kl(student.logprobs, teacher.logprobs),
    "overlap": lambda student, teacher: overlap_of_top(*student.top, teacher.top[1])[0],
    "student_mass": lambda student, teacher: overlap_of_top(*student.top, teacher.top[1])[1],
    "teacher_mass": lambda student, teacher: overlap_of_top(*teacher.top, student.top[1])[1],
}
"""The measures that need both distributions."""
