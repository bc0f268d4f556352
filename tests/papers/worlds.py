"""Small worlds in float64: random batches, and policies so small that every answer can be enumerated."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from practicum.losses import (
    TokenBatch,
    build_token_batch,
    compute_coefficients,
    compute_term_values,
)
from practicum.objective import Objective, TeacherDistribution
from practicum.types import Datum, Prompt, Rollout, Source, TeacherSignal


def answer(
    ids: Tensor,
    sampler: Tensor,
    reward: float | None = None,
    *,
    group: str = "a",
    source: Source = "student",
    sample: int = 0,
) -> Rollout:
    """Return a completion of given tokens, where every token is learned from."""
    return Rollout(
        prompt=Prompt(group, ()),
        prompt_tokens=(1,),
        tokens=ids,
        loss_mask=torch.ones(len(ids), dtype=torch.bool),
        sampling_logprobs=sampler,
        policy_logprobs=sampler,
        policy_version=0,
        stop_reason="stop",
        text="",
        sample=sample,
        reward=reward,
        source=source,
    )


@dataclass
class RolloutBatch:
    """Complete answers with the log-probabilities of each model [T, V]; `logits` are the student's."""

    answers: list[Rollout]
    logits: Tensor
    T: Tensor
    R: Tensor

    @property
    def S(self) -> Tensor:
        """The student's log-probabilities."""
        return torch.log_softmax(self.logits, -1)

    @property
    def ids(self) -> Tensor:
        """All tokens."""
        return torch.cat([row.tokens for row in self.answers])

    @property
    def sampler(self) -> Tensor:
        """The sampler's log-probability of each token."""
        return torch.cat([row.sampling_logprobs for row in self.answers])

    @property
    def rows(self) -> Tensor:
        """The answer of each token."""
        lengths = torch.tensor([len(row.tokens) for row in self.answers])
        return torch.repeat_interleave(torch.arange(len(self.answers)), lengths)

    def of(self, logprobs: Tensor) -> Tensor:
        """Return one model's log-probability of each token."""
        return logprobs.gather(-1, self.ids[:, None])[:, 0]

    def leaf(self) -> "RolloutBatch":
        """Return the same batch with logits that require a gradient."""
        return replace(self, logits=self.logits.clone().requires_grad_())

    def tokens(self, objective: Objective, seed: int = 0) -> TokenBatch:
        """Return the library's token batch of the answers."""
        return build_token_batch(
            [Datum(row, TeacherSignal()) for row in self.answers], objective, seed
        )


ROWS = [
    ("a", 1.0, 3),
    ("a", 0.0, 2),
    ("a", 0.0, 4),
    ("b", 1.0, 2),
    ("b", 1.0, 1),
    ("c", 0.0, 3),
    ("c", 1.0, 2),
]
"""Prompt, reward and length of each answer."""


def random_batch(
    seed: int = 0, vocabulary: int = 7, rows: list[tuple[str, float, int]] | None = None
) -> RolloutBatch:
    """Return random answers of a slightly older student."""
    generator = torch.Generator().manual_seed(seed)
    rows = ROWS if rows is None else rows
    count = sum(length for *_, length in rows)

    def logits() -> Tensor:
        return 1.5 * torch.randn(count, vocabulary, generator=generator, dtype=torch.float64)

    student, teacher, reference = logits(), logits().log_softmax(-1), logits().log_softmax(-1)
    ids = torch.randint(vocabulary, (count,), generator=generator)
    noise = 0.5 * torch.randn(count, generator=generator, dtype=torch.float64)
    sampler = (student.log_softmax(-1).gather(-1, ids[:, None])[:, 0] + noise).clamp(max=-1e-3)
    lengths = [length for *_, length in rows]
    pieces = zip(ids.split(lengths), sampler.split(lengths), rows, strict=True)
    answers = [
        answer(tokens, drawn, reward, group=group, sample=number)
        for number, (tokens, drawn, (group, reward, _)) in enumerate(pieces)
    ]
    return RolloutBatch(answers, student, teacher, reference)


def coefficients(choice: Mapping[str, Any], batch: RolloutBatch) -> Tensor:
    """Return the coefficient [T] of each token in the loss of an objective with one term."""
    objective = Objective.model_validate(choice)
    tokens = batch.tokens(objective)
    (values,) = compute_term_values(
        batch.S,
        TeacherDistribution(full=batch.T),
        tokens,
        objective,
        TeacherDistribution(full=batch.R),
    )
    return compute_coefficients(objective.losses[0], values.detach(), tokens)


def gradient(choice: Mapping[str, Any], batch: RolloutBatch, draws: Tensor | None = None) -> Tensor:
    """Return the gradient [T, V] of the library's objective in the student's logits; `draws` replace the random numbers."""
    return _gradient(batch, lambda here: loss(choice, here, draws))


def loss(choice: Mapping[str, Any], batch: RolloutBatch, draws: Tensor | None = None) -> Tensor:
    """Return a number with the gradient of the library's objective."""
    objective = Objective.model_validate(choice)
    tokens = batch.tokens(objective)
    if draws is not None:
        tokens = replace(tokens, draws=draws)
    values = compute_term_values(
        batch.S,
        TeacherDistribution(full=batch.T),
        tokens,
        objective,
        TeacherDistribution(full=batch.R),
    )
    pairs = list(zip(objective.losses, values, strict=True))
    return torch.stack(
        [
            (compute_coefficients(term, value.detach(), tokens) * value.loss_value).sum()
            for term, value in pairs
        ]
    ).sum()


def formula_gradient(formula: Callable[[RolloutBatch], Tensor], batch: RolloutBatch) -> Tensor:
    """Return the gradient [T, V] of a formula in the student's logits."""
    return _gradient(batch, formula)


def _gradient(batch: RolloutBatch, function: Callable[[RolloutBatch], Tensor]) -> Tensor:
    here = batch.leaf()
    return torch.autograd.grad(function(here), here.logits)[0]


@dataclass
class Policies:
    """Student, teacher and reference as tables of logits [states, V], one row for each beginning of at most LENGTH - 1."""

    student: Tensor
    teacher: Tensor
    reference: Tensor


SYMBOLS, LENGTH = 3, 3
BEGINNINGS = {
    beginning: place
    for place, beginning in enumerate(
        beginning
        for length in range(LENGTH)
        for beginning in itertools.product(range(SYMBOLS), repeat=length)
    )
}


def policies(seed: int = 3) -> Policies:
    """Return random policies."""
    generator = torch.Generator().manual_seed(seed)
    tables = (
        torch.randn(len(BEGINNINGS), SYMBOLS, generator=generator, dtype=torch.float64)
        for _ in range(3)
    )
    return Policies(*tables)


def every_answer() -> Iterator[tuple[Tensor, list[int]]]:
    """Yield every answer of LENGTH symbols, with the states it goes through."""
    for symbols in itertools.product(range(SYMBOLS), repeat=LENGTH):
        yield torch.tensor(symbols), [BEGINNINGS[symbols[:length]] for length in range(LENGTH)]


def expected_gradient(choice: Mapping[str, Any], world: Policies) -> Tensor:
    """Return the library's gradient in the student's table, in exact expectation over the student's own answers."""
    return _expected(
        world, lambda batch: loss({"aggregate": "seq_mean_token_sum", **choice}, batch)
    )


def expected_formula(formula: Callable[[RolloutBatch], Tensor], world: Policies) -> Tensor:
    """Return the gradient of a formula in the student's table, with the formula's answers held fixed."""
    return _expected(world, formula)


def _expected(world: Policies, function: Callable[[RolloutBatch], Tensor]) -> Tensor:
    table = world.student.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for ids, path in every_answer():
        drawn = table.detach().log_softmax(-1)[path, ids]
        teacher, reference = (
            world.teacher.log_softmax(-1)[path],
            world.reference.log_softmax(-1)[path],
        )
        total = total + drawn.sum().exp() * function(
            RolloutBatch([answer(ids, drawn)], table[path], teacher, reference)
        )
    return torch.autograd.grad(total, table)[0]


def sequence_gradient(world: Policies) -> Tensor:
    """Return the gradient of KL(S || T) between whole answers, through the probability of every answer."""
    table = world.student.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for ids, path in every_answer():
        own = table.log_softmax(-1)[path, ids].sum()
        total = total + own.exp() * (own - world.teacher.log_softmax(-1)[path, ids].sum())
    return torch.autograd.grad(total, table)[0]


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-6) -> None:
    """Assert equality to a tolerance, and that not both are zero."""
    assert theirs.abs().max() > 0
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * 1e-2)
