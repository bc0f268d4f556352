"""Losses of pairs: autograd of the written formula, their values at known points, and their purposes."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from practicum.functional import (
    PAIR_LOSSES,
    Answers,
    measure_answers,
    pair_coefficients,
    pair_loss,
)


def log_sigmoid(value: Tensor) -> Tensor:
    return -torch.log1p(torch.exp(-value))


def written(
    name: str, chosen: list[Tensor], rejected: list[Tensor], beta: float, margin: float
) -> Tensor:
    """Compute the loss of one pair as its paper writes it, from (log S, log R) of both answers' tokens."""
    (student, reference), (other, other_reference) = chosen, rejected
    if name in ("dpo", "spin"):
        return -log_sigmoid(
            beta * (student - reference).sum() - beta * (other - other_reference).sum()
        )
    if name == "ipo":
        # As in TRL: each answer's log-ratio is divided by its number of tokens.
        h = (student - reference).mean() - (other - other_reference).mean()
        return (h - 1 / (2 * beta)) ** 2
    if name == "ipo_sum":
        h = (student.sum() - other.sum()) - (reference.sum() - other_reference.sum())
        return (h - 1 / (2 * beta)) ** 2
    if name == "simpo":
        return -log_sigmoid(beta * student.mean() - beta * other.mean() - margin)
    assert name == "orpo"

    def odds(logprobs: Tensor) -> Tensor:
        p = logprobs.mean().exp()
        return p / (1 - p)

    return -log_sigmoid(torch.log(odds(student) / odds(other)))


def draw(lengths: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw log-probabilities of student and reference, and the answer of each token."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    student, reference = (
        -3 * torch.rand(count, generator=generator, dtype=torch.float64) - 0.01 for _ in range(2)
    )
    return student, reference, torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


@pytest.mark.parametrize("name", PAIR_LOSSES)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    seed=st.integers(0, 10_000),
    beta=st.floats(0.05, 3.0),
    margin=st.floats(0.0, 2.0),
)
def test_the_coefficients_are_the_gradient_of_the_written_loss(
    name: str, lengths: list[int], seed: int, beta: float, margin: float
) -> None:
    student, reference, rows = draw(lengths, seed)
    loss = PAIR_LOSSES[name]
    given_beta = None if loss.beta is None else beta
    given_margin = None if loss.margin is None else margin
    pairs = [pair for pair in itertools.permutations(range(len(lengths)), 2) if sum(pair) % 2]
    leaf = student.clone().requires_grad_()
    of_row = [[leaf[rows == row], reference[rows == row]] for row in range(len(lengths))]
    total = sum(
        written(name, of_row[chosen], of_row[rejected], beta, margin) for chosen, rejected in pairs
    ) / len(pairs)
    assert isinstance(total, Tensor)
    answers = Answers(student, rows, len(lengths), reference)
    table = torch.tensor(pairs)
    numbers, _ = measure_answers(name, answers)
    values = pair_loss(name, numbers[table[:, 0]], numbers[table[:, 1]], given_beta, given_margin)
    torch.testing.assert_close(values.mean(), total.detach(), rtol=1e-9, atol=1e-11)
    found = pair_coefficients(name, answers, table, given_beta, given_margin)
    expected = torch.autograd.grad(total, leaf)[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_answers_in_no_pair_have_no_coefficient() -> None:
    student, reference, rows = draw([2, 3, 4], 0)
    answers = Answers(student, rows, 3, reference)
    for name in PAIR_LOSSES:
        found = pair_coefficients(name, answers, torch.tensor([[2, 0]]))
        assert not found[rows == 1].any()
        # The chosen answer's likelihood rises, and the rejected answer's falls.
        assert (found[rows == 2] < 0).all() and (found[rows == 0] > 0).all()
        nothing = pair_coefficients(name, answers, torch.zeros(0, 2, dtype=torch.long))
        assert not nothing.any()


@pytest.mark.parametrize("name", ["dpo", "spin"])
def test_at_the_reference_the_loss_is_the_logarithm_of_two(name: str) -> None:
    student, _, rows = draw([3, 5], 1)
    numbers, _ = measure_answers(name, Answers(student, rows, 2, student))
    value = pair_loss(name, numbers[:1], numbers[1:], beta=0.3)
    assert value.item() == pytest.approx(math.log(2), abs=1e-15)


def test_ipo_does_not_depend_on_how_often_an_answer_repeats_its_tokens() -> None:
    student, reference, rows = draw([2, 5], 4)
    once = Answers(student, rows, 2, reference)
    thrice = Answers(student.repeat(3), rows.repeat(3), 2, reference.repeat(3))
    numbers = {
        name: [measure_answers(name, answers)[0] for answers in (once, thrice)]
        for name in ("ipo", "ipo_sum")
    }
    torch.testing.assert_close(numbers["ipo"][1], numbers["ipo"][0])
    torch.testing.assert_close(numbers["ipo_sum"][1], 3 * numbers["ipo_sum"][0])


def test_a_parameter_that_a_loss_does_not_have_is_refused() -> None:
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="pair loss 'orpo' has no beta; leave it out"):
        pair_loss("orpo", one, one, beta=0.1)
    with pytest.raises(ValueError, match="pair loss 'dpo' has no margin"):
        pair_loss("dpo", one, one, margin=0.1)


def test_a_certain_answer_has_finite_odds() -> None:
    answers = Answers(torch.tensor([0.0, -1.0]), torch.tensor([0, 1]), 2)
    numbers, slopes = measure_answers("orpo", answers)
    assert numbers.isfinite().all() and slopes.isfinite().all() and numbers[0] > numbers[1]


SEQUENCES = list(itertools.product(range(3), repeat=2))
"""All answers of two tokens over a vocabulary of three."""


def _table(seed: int) -> Tensor:
    """Return the log-probability of every answer under a random autoregressive model with parameters [4, 3]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def _score(parameters: Tensor) -> Tensor:
    logprobs = torch.log_softmax(parameters, -1)
    return torch.stack([logprobs[0, a] + logprobs[1 + a, b] for a, b in SEQUENCES])


@pytest.mark.parametrize("beta", [0.3, 0.7])
def test_over_all_answers_the_optimum_of_dpo_is_the_tilted_reference(beta: float) -> None:
    """Check that with Bradley-Terry preferences of a known reward, DPO's optimum is ref * exp(reward / beta)."""
    generator = torch.Generator().manual_seed(3)
    reference = _score(_table(0))
    reward = 0.5 * torch.randn(len(SEQUENCES), generator=generator, dtype=torch.float64)
    wins = torch.sigmoid(reward[:, None] - reward[None, :])
    tilted = torch.log_softmax(reference + reward / beta, 0)

    def gradient(student: Tensor) -> Tensor:
        ratio = student - reference
        difference = ratio[:, None] - ratio[None, :]
        zero = torch.zeros_like(difference)
        losses = pair_loss("dpo", difference.flatten(), zero.flatten(), beta)
        total = (wins.flatten() * losses).sum()
        return torch.autograd.grad(total, student)[0]

    assert gradient(tilted.clone().requires_grad_()).abs().max() < 1e-12
    assert gradient(reference.clone().requires_grad_()).abs().max() > 1e-3


def test_spin_stands_still_where_the_opponent_is_the_data() -> None:
    """Check that over all pairs, SPIN's expected gradient at S = opponent only vanishes if the data are the opponent's."""

    def gradient(data: Tensor, opponent: Tensor, parameters: Tensor) -> Tensor:
        leaf = parameters.clone().requires_grad_()
        student = _score(leaf)
        ratio = student - opponent
        weights = data.exp()[:, None] * opponent.exp()[None, :]
        losses = pair_loss(
            "spin",
            ratio[:, None].expand(9, 9).flatten(),
            ratio[None, :].expand(9, 9).flatten(),
            beta=0.4,
        )
        return torch.autograd.grad((weights.flatten() * losses).sum(), leaf)[0]

    own, other = _table(1), _table(2)
    opponent, data = _score(own), _score(other)
    assert gradient(opponent, opponent, own).abs().max() < 1e-15
    assert gradient(data, opponent, own).abs().max() > 1e-3
    # The step raises the data's likelihood: at equality it is minus half of beta times the step of SFT
    # plus the opponent's own score, which has expectation 0.
    leaf = own.clone().requires_grad_()
    sft = torch.autograd.grad(-(data.exp() * _score(leaf)).sum(), leaf)[0]
    torch.testing.assert_close(gradient(data, opponent, own), 0.4 / 2 * sft)
