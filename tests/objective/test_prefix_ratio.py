"""With `prefix_ratio` samples of a stale policy give exactly the gradient of fresh ones, by enumeration."""

import itertools

import pytest
import torch

from practicum import functional as F
from practicum.objective import Objective, TeacherTokens, TokenBatch, logit_side, token_side

V, T = 3, 3
SEQUENCES = list(itertools.product(range(V), repeat=T))


def states() -> dict[tuple[int, ...], int]:
    prefixes = [prefix for length in range(T) for prefix in itertools.product(range(V), repeat=length)]
    return {prefix: place for place, prefix in enumerate(prefixes)}


def tables() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(len(states()), V, generator=generator, dtype=torch.float64) for _ in range(3))


def path(sequence: tuple[int, ...]) -> list[int]:
    places = states()
    return [places[sequence[:length]] for length in range(T)]


def sequence_logprob(table: torch.Tensor, sequence: tuple[int, ...]) -> torch.Tensor:
    return table.log_softmax(-1)[path(sequence), list(sequence)].sum()


def expected_gradient(objective: Objective) -> torch.Tensor:
    """The library's gradient in expectation over sequences drawn from another policy."""
    student, teacher, sampler = tables()
    student.requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for sequence in SEQUENCES:
        ids, rows = torch.tensor(sequence), path(sequence)
        drawn = sampler.log_softmax(-1)[rows, ids]
        ones, zeros = torch.ones(T, dtype=torch.float64), torch.zeros(T, dtype=torch.long)
        batch = TokenBatch(
            tokens=ids,
            rows=zeros,
            positions=torch.arange(T),
            sampling_logprobs=drawn,
            policy_logprobs=drawn,
            aggregate=ones,
            draws=torch.zeros(T, 0),
            rewards=(None,),
            groups=("x",),
            texts=("",),
            sources=("student",),
            first=(0,),
        )
        (values,) = logit_side(
            student.log_softmax(-1)[rows], TeacherTokens(full=teacher.log_softmax(-1)[rows]), batch, objective
        )
        share = token_side(objective.losses[0], values.detached(), batch)
        total = total + drawn.sum().exp() * (share * values.value).sum()
    return torch.autograd.grad(total, student)[0]


def on_policy_gradient(whole_sequence: bool) -> torch.Tensor:
    student, teacher, _ = tables()
    student.requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for sequence in SEQUENCES:
        weight = sequence_logprob(student, sequence).exp()
        rows = path(sequence)
        if whole_sequence:
            total = total + weight * (sequence_logprob(student, sequence) - sequence_logprob(teacher, sequence))
        else:
            divergence = F.reverse_kl(student.log_softmax(-1)[rows], teacher.log_softmax(-1)[rows])
            total = total + weight.detach() * divergence.sum()
    return torch.autograd.grad(total, student)[0]


@pytest.mark.parametrize(
    ("estimator", "whole_sequence"),
    [("pathwise", False), ("score_function(0)", False), ("score_function(1)", True)],
)
def test_stale_samples_give_the_fresh_gradient(estimator: str, whole_sequence: bool) -> None:
    objective = Objective.model_validate(
        {"estimator": estimator, "correction": "prefix_ratio", "aggregate": "seq_mean_token_sum"}
    )
    torch.testing.assert_close(expected_gradient(objective), on_policy_gradient(whole_sequence), rtol=1e-10, atol=1e-12)


def test_without_it_they_do_not() -> None:
    objective = Objective.model_validate({"estimator": "score_function(1)", "aggregate": "seq_mean_token_sum"})
    assert (expected_gradient(objective) - on_policy_gradient(True)).abs().max() > 1e-3
