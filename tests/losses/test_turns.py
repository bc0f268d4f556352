"""Credit by turn: unbiased by enumeration, with less variance than credit by conversation, and equal for one turn."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from practicum import functional as F
from practicum.losses.token_axis import compute_coefficients
from practicum.losses.tokens import TermValues, TokenBatch, build_token_batch, number_turns
from practicum.objective import Objective
from practicum.types import Datum, Prompt, Rollout, TeacherSignal, Turn

TURNS = 3
PROMPT = Prompt("p", ())
REPLY = 1
"""Tokens of the environment after each of the model's turns except the last."""


def reward(actions: tuple[int, ...]) -> float:
    """Return the reward of the last of these turns: it also depends on the turns before it."""
    weights = (0.7, -0.4, 1.1)
    turn = len(actions) - 1
    return weights[turn] * actions[turn] + 0.3 * sum(actions[:turn]) * (1 - actions[turn])


def talk(actions: tuple[int, ...], sample: int = 0, last: float | None = None) -> Rollout:
    """Return a conversation of one token per turn, with a reply of one token between turns."""
    turns: list[Turn] = []
    tokens: list[int] = []
    for number, action in enumerate(actions, start=1):
        turns.append(Turn("assistant", 1, str(action), reward=reward(actions[:number])))
        tokens.append(action)
        if number < len(actions):
            turns.append(Turn("user", REPLY, "?"))
            tokens += [0] * REPLY
    mask = torch.tensor([turn.role == "assistant" for turn in turns for _ in range(turn.tokens)])
    zeros = torch.zeros(len(tokens))
    return Rollout(
        PROMPT, (), torch.tensor(tokens), mask, zeros, zeros, 0, "stop", "", sample,
        reward=last, turns=tuple(turns),
    )  # fmt: skip


def probability(logits: Tensor, actions: tuple[int, ...]) -> Tensor:
    """Return the log-probability of each turn: the policy has a logit for each history."""
    rows = [
        2**turn - 1 + int("".join(map(str, ("0", *actions[:turn]))), 2) for turn in range(TURNS)
    ]
    logprobs = torch.stack([logits[rows], torch.zeros(TURNS, dtype=logits.dtype)], -1).log_softmax(
        -1
    )
    return logprobs[range(TURNS), list(actions)]


def find_advantages(objective: Objective, rollouts: list[Rollout]) -> Tensor:
    """Return the advantage of each turn of each conversation, as the objective computes it."""
    data = [Datum(rollout, TeacherSignal()) for rollout in rollouts]
    batch = build_token_batch(data, objective)
    (term,) = objective.losses
    return -compute_coefficients(term, values_of(batch), batch) / batch.aggregate


def values_of(batch: TokenBatch, teacher: Tensor | None = None) -> TermValues:
    zeros = torch.zeros(len(batch.tokens))
    return TermValues(
        loss_value=zeros,
        is_scored=torch.ones(len(batch.tokens), dtype=torch.bool),
        logprobs=zeros,
        teacher_logprobs=teacher,
        divergence=None,
        student_entropy=zeros,
        teacher_entropy=None,
        reverse_kl=None,
    )


ALL = list(product((0, 1), repeat=TURNS))


def estimate(objective: Objective, logits: Tensor) -> tuple[Tensor, float]:
    """Return the mean and the total variance of the gradient's estimate from two conversations, over all pairs."""
    rows = []
    for one, other in product(ALL, repeat=2):
        advantages = find_advantages(objective, [talk(one, 0), talk(other, 1)]).double()
        logprobs = torch.cat([probability(logits, one), probability(logits, other)])
        (gradient,) = torch.autograd.grad(
            (advantages * logprobs).sum() / 2, logits, retain_graph=True
        )
        rows.append((logprobs.sum().exp().item(), gradient))
    mean = sum((weight * gradient for weight, gradient in rows), torch.zeros_like(logits))
    variance = sum(weight * ((gradient - mean) ** 2).sum().item() for weight, gradient in rows)
    return mean.detach(), variance


def test_credit_by_turn_is_unbiased_and_varies_less() -> None:
    logits = torch.linspace(-0.9, 1.3, 2**TURNS - 1, dtype=torch.float64).requires_grad_()
    value = sum(
        probability(logits, actions).sum().exp()
        * sum(reward(actions[: n + 1]) for n in range(TURNS))
        for actions in ALL
    )
    (exact,) = torch.autograd.grad(value, logits)
    by_turn = Objective.model_validate({"signal": "score(leave_one_out, unit=turn)"})
    by_episode = Objective.model_validate({"signal": "score(leave_one_out, unit=episode)"})
    means, variances = zip(*(estimate(one, logits) for one in (by_turn, by_episode)), strict=True)
    for mean in means:
        assert torch.allclose(mean, exact, atol=1e-6)
    assert variances[0] < 0.8 * variances[1], variances


@pytest.mark.parametrize("advantage", ["group_normalized", "group_mean", "leave_one_out", "none"])
@pytest.mark.parametrize("has_turns", [True, False])
def test_with_one_turn_it_is_the_credit_of_the_answer(advantage: str, has_turns: bool) -> None:
    rollouts = []
    for number, last in enumerate((0.1, 0.9, 1 / 3, None)):
        turns = (Turn("assistant", 3, "1"),) if has_turns else ()
        zeros = torch.zeros(3)
        rollouts.append(
            replace(
                talk((1,), number, last),
                tokens=torch.tensor([1, 2, 3]),
                loss_mask=torch.ones(3, dtype=torch.bool),
                sampling_logprobs=zeros,
                policy_logprobs=zeros,
                turns=turns,
            )
        )
    one, *others = (
        find_advantages(Objective.model_validate({"signal": f"score({advantage}{per})"}), rollouts)
        for per in ("", ", unit=turn", ", unit=step", ", unit=episode")
    )
    assert one.any() and all(one.equal(other) for other in others)


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=TURNS), min_size=2, max_size=5))
def test_a_step_has_its_own_reward_and_the_completions(talks: list[list[bool]]) -> None:
    objective = Objective.model_validate({"signal": "score(group_mean, unit=step)"})
    rollouts = [talk(tuple(map(int, actions)), n, n / 4) for n, actions in enumerate(talks)]
    scores = [
        [reward(tuple(map(int, actions[: k + 1]))) + n / 4 for k in range(len(actions))]
        for n, actions in enumerate(talks)
    ]
    expected = []
    for own in scores:
        for k, value in enumerate(own):
            same = [other[k] for other in scores if k < len(other)]
            expected.append(value - sum(same) / len(same))
    actual = find_advantages(objective, rollouts)
    assert actual.tolist() == pytest.approx(expected, abs=1e-6)


def test_turns_that_others_did_not_reach_are_compared_among_those_that_did() -> None:
    objective = Objective.model_validate({"signal": "score(group_mean, unit=turn)"})
    rollouts = [talk((1, 1, 1), 0, 1.0), talk((1, 0), 1, 0.0), talk((1,), 2, 0.5)]
    totals = [
        [
            sum(reward(actions[: n + 1]) for n in range(k, len(actions))) + last
            for k in range(len(actions))
        ]
        for actions, last in (((1, 1, 1), 1.0), ((1, 0), 0.0), ((1,), 0.5))
    ]
    means = [
        sum(t[k] for t in totals if k < len(t)) / sum(k < len(t) for t in totals) for k in range(3)
    ]
    expected = [total - means[k] for row in totals for k, total in enumerate(row)]
    assert find_advantages(objective, rollouts).tolist() == pytest.approx(expected, abs=1e-6)


def test_an_episode_is_compared_by_all_its_rewards() -> None:
    objective = Objective.model_validate({"signal": "score(group_mean, unit=episode)"})
    rollouts = [talk((1, 1, 1), 0, 1.0), talk((1, 0), 1, 0.0)]
    totals = [
        sum(reward(actions[: n + 1]) for n in range(len(actions))) + last
        for actions, last in (((1, 1, 1), 1.0), ((1, 0), 0.0))
    ]
    half = (totals[0] - totals[1]) / 2
    found = find_advantages(objective, rollouts).tolist()
    assert found == pytest.approx([half] * 3 + [-half] * 2, abs=1e-6)


@pytest.mark.parametrize("per", ["turn", "episode"])
def test_rows_without_any_reward_have_none(per: str) -> None:
    objective = Objective.model_validate({"signal": f"score(none, unit={per})"})
    silent = talk((1, 1))
    silent = replace(silent, turns=tuple(replace(turn, reward=None) for turn in silent.turns))
    assert not find_advantages(objective, [silent]).any()


def test_a_reply_counts_to_the_turn_before_it() -> None:
    assert number_turns(talk((1, 0, 1))).tolist() == [0, 0, 1, 1, 2]
    assert number_turns(replace(talk((1,)), turns=())).tolist() == [0]


def test_returns_of_turns_by_hand() -> None:
    values, turns = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 0, 2, 3])
    half = F.turn_returns(values, turns, 0.5)
    assert half.tolist() == [3 + 0.5 * (4 + 0.5 * 8), 2 + 0.5 * 8, 4 + 0.5 * 8, 8]
    assert F.turn_returns(values, turns, 1.0).tolist() == F.reward_to_go(values, 1.0).tolist()
    assert F.turn_returns(values, turns, 0.0).tolist() == [3, 2, 4, 8]
    assert F.turn_returns(values[:0], turns[:0], 0.5).tolist() == []
    with pytest.raises(ValueError, match="gamma must be in"):
        F.turn_returns(values, turns, 1.5)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0])
def test_the_teachers_returns_by_turn_are_those_of_the_answer_with_one_turn(gamma: float) -> None:
    values = torch.randn(7, generator=torch.Generator().manual_seed(0))
    one = F.turn_returns(values, torch.zeros(7, dtype=torch.long), gamma)
    assert one.equal(F.reward_to_go(values, 1.0))


def test_a_term_adds_up_the_teachers_advantages_by_turn() -> None:
    objective = Objective.model_validate(
        {"signal": "sampled", "estimator": "score_function(gamma=0.5, unit=turn)"}
    )
    assert objective.needs_sequences
    rollouts = [talk((1, 1, 1), 0), talk((1, 0), 1)]
    batch = build_token_batch([Datum(rollout, TeacherSignal()) for rollout in rollouts], objective)
    teacher = torch.tensor([-0.1, -0.2, -0.4, -0.8, -1.6])
    (term,) = objective.losses
    found = -compute_coefficients(term, values_of(batch, teacher), batch) / batch.aggregate
    returns = [-0.1 + 0.5 * (-0.2 + 0.5 * -0.4), -0.2 + 0.5 * -0.4, -0.4, -0.8 + 0.5 * -1.6, -1.6]
    assert found.tolist() == pytest.approx(returns, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"signal": "score(best_of_n, unit=turn)"}, "leave out unit=turn"),
        ({"signal": "score(best_of_n, unit=step)"}, "leave out unit=step"),
        (
            {"signal": "sampled", "estimator": "score_function(unit=turn, start=1)"},
            "leave out start and length",
        ),
        (
            {"signal": "topk(4)", "estimator": "score_function(over=candidates, unit=turn)"},
            "leave out gamma and baseline",
        ),
    ],
)
def test_what_does_not_go_together_by_turn_is_refused(
    settings: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Objective.model_validate(settings)


def test_a_part_of_a_batch_has_the_credit_of_the_whole() -> None:
    objective = Objective.model_validate({"signal": "score(group_mean, unit=turn)"})
    rollouts = [talk((1, 1, 1), 0, 1.0), talk((0, 0, 1), 1, 0.0)]
    batch = build_token_batch([Datum(rollout, TeacherSignal()) for rollout in rollouts], objective)
    (term,) = objective.losses
    whole = compute_coefficients(term, values_of(batch), batch)
    part = batch[torch.tensor([5, 1])]
    assert compute_coefficients(term, values_of(part), part).equal(whole[[5, 1]])
    assert math.isfinite(whole.sum())
