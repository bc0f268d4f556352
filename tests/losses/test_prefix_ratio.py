"""With `prefix_ratio` samples of a stale policy give exactly the gradient of fresh ones, by enumeration."""

import itertools

import pytest
import torch

from practicum import functional as F
from practicum.losses import TokenBatch, compute_coefficients, compute_term_values
from practicum.objective import VERIFIER, Objective, TeacherDistribution

V, T = 3, 3
SEQUENCES = list(itertools.product(range(V), repeat=T))


def states() -> dict[tuple[int, ...], int]:
    prefixes = [
        prefix for length in range(T) for prefix in itertools.product(range(V), repeat=length)
    ]
    return {prefix: place for place, prefix in enumerate(prefixes)}


def tables() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(
        torch.randn(len(states()), V, generator=generator, dtype=torch.float64) for _ in range(3)
    )


def path(sequence: tuple[int, ...]) -> list[int]:
    places = states()
    return [places[sequence[:length]] for length in range(T)]


def sequence_logprob(table: torch.Tensor, sequence: tuple[int, ...]) -> torch.Tensor:
    return table.log_softmax(-1)[path(sequence), list(sequence)].sum()


def expected_gradient(objective: Objective, answers: int = 1) -> torch.Tensor:
    """Return the library's gradient in expectation over prompts with `answers` sequences drawn from another policy.

    Every possible prompt is in one batch, with its probability in the aggregate. The reward of a sequence is 1 where
    it begins with the last symbol, else 0.
    """
    student, teacher, sampler = tables()
    student.requires_grad_()
    prompts = list(itertools.product(SEQUENCES, repeat=answers))
    sequences = [sequence for prompt in prompts for sequence in prompt]
    ids = torch.tensor(sequences).flatten()
    visited = [place for sequence in sequences for place in path(sequence)]
    drawn = sampler.log_softmax(-1)[visited, ids]
    chance = drawn.view(len(prompts), -1).sum(-1).exp()
    batch = TokenBatch(
        tokens=ids,
        rows=torch.arange(len(sequences)).repeat_interleave(T),
        positions=torch.arange(T).repeat(len(sequences)),
        sampling_logprobs=drawn,
        policy_logprobs=drawn,
        aggregate=chance.repeat_interleave(answers * T) / answers,
        authors=torch.zeros(len(ids), dtype=torch.uint8),
        draws=torch.zeros(len(ids), 0),
        rewards={VERIFIER: tuple(float(sequence[0] == V - 1) for sequence in sequences)},
        groups=tuple(str(number) for number in range(len(prompts)) for _ in range(answers)),
        texts=("",) * len(sequences),
        sources=("student",) * len(sequences),
        first=tuple(range(len(sequences))),
    )
    said = TeacherDistribution(full=teacher.log_softmax(-1)[visited])
    (values,) = compute_term_values(student.log_softmax(-1)[visited], said, batch, objective)
    share = compute_coefficients(objective.losses[0], values.detach(), batch)
    return torch.autograd.grad((share * values.loss_value).sum(), student)[0]


def on_policy_gradient(whole_sequence: bool) -> torch.Tensor:
    student, teacher, _ = tables()
    student.requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for sequence in SEQUENCES:
        weight = sequence_logprob(student, sequence).exp()
        rows = path(sequence)
        if whole_sequence:
            total = total + weight * (
                sequence_logprob(student, sequence) - sequence_logprob(teacher, sequence)
            )
        else:
            divergence = F.reverse_kl(student.log_softmax(-1)[rows], teacher.log_softmax(-1)[rows])
            total = total + weight.detach() * divergence.sum()
    return torch.autograd.grad(total, student)[0]


@pytest.mark.parametrize(
    ("estimator", "whole_sequence"),
    [
        ("pathwise", False),
        ("score_function(0)", False),
        ("score_function(1)", True),
        ("score_function(0, kl)", False),
        ("score_function(1, kl)", True),
    ],
)
def test_stale_samples_give_the_fresh_gradient(estimator: str, whole_sequence: bool) -> None:
    objective = Objective.model_validate(
        {"estimator": estimator, "correction": "prefix_ratio", "aggregate": "seq_mean_token_sum"}
    )
    torch.testing.assert_close(
        expected_gradient(objective), on_policy_gradient(whole_sequence), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("gamma", [0, 1])
def test_what_other_answers_return_is_no_bias_either(gamma: int) -> None:
    objective = Objective.model_validate(
        {
            "estimator": f"score_function({gamma}, group_mean)",
            "correction": "prefix_ratio",
            "aggregate": "seq_mean_token_sum",
        }
    )
    expected = on_policy_gradient(gamma == 1)
    torch.testing.assert_close(
        expected_gradient(objective, answers=2), expected, rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("advantage", ["none", "group_mean"])
def test_a_reward_beside_a_teacher_is_weighted_like_a_reward_alone(advantage: str) -> None:
    common = {"correction": "prefix_ratio", "aggregate": "seq_mean_token_sum"}
    choices = (
        {"signal": "sampled", "reward": f"add_advantage(0.3, {advantage})"},
        {"signal": "sampled"},
        {"signal": f"score({advantage})", "coefficient": 0.3},
        {"signal": "sampled", "reward": f"modulate(0, advantage={advantage})", "coefficient": 0.3},
    )
    both, teacher, reward, sign = (
        expected_gradient(Objective.model_validate({**choice, **common}), answers=2)
        for choice in choices
    )
    torch.testing.assert_close(both, teacher + reward, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(sign, reward, rtol=1e-10, atol=1e-12)


def test_without_it_they_do_not() -> None:
    objective = Objective.model_validate(
        {"estimator": "score_function(1)", "aggregate": "seq_mean_token_sum"}
    )
    assert (expected_gradient(objective) - on_policy_gradient(True)).abs().max() > 1e-3
