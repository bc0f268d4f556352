"""The penalty for length: laws of one answer, and the share of the reward by hand."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.scorers.length import Config, LengthPenalty
from practicum.types import Message, Prompt, Rollout


def answer(student: int, environment: int, reward: float | None) -> Rollout:
    """Return an answer: tokens of the student after tokens of an environment."""
    rollout = Rollout.from_text(Prompt("p", (Message("user", "a"),)), "b")
    count = student + environment
    zeros = torch.zeros(count)
    return replace(
        rollout,
        tokens=torch.zeros(count, dtype=torch.long),
        loss_mask=torch.arange(count) >= environment,
        sampling_logprobs=zeros,
        policy_logprobs=zeros,
        reward=reward,
    )


def judge(
    student: int, environment: int, reward: float | None, limit: int, penalty: float
) -> float | None:
    scorer = LengthPenalty(Config(limit=limit, penalty=penalty))
    return scorer.score([answer(student, environment, reward)])[0].value


@given(
    st.integers(0, 20), st.integers(0, 9), st.floats(0, 1), st.integers(0, 9), st.floats(0.01, 2)
)
def test_a_longer_answer_never_earns_more_and_only_its_own_tokens_cost(
    student: int, environment: int, reward: float, limit: int, penalty: float
) -> None:
    value = judge(student, environment, reward, limit, penalty)
    longer = judge(student + 1, environment, reward, limit, penalty)
    assert value is not None and longer is not None
    assert 0.0 <= longer <= value <= reward
    assert value == judge(student, 0, reward, limit, penalty)
    assert student > limit or value == reward
    # A student whose answers are all wrong must not learn to be silent.
    assert judge(student, environment, 0.0, limit, penalty) == 0.0
    assert judge(student, environment, None, limit, penalty) is None


def test_each_token_beyond_the_limit_costs_a_share_of_the_reward() -> None:
    assert judge(9, 3, 0.8, limit=7, penalty=0.3) == pytest.approx(0.8 * (1 - 0.3 * 2))
    assert judge(12, 0, 1.0, limit=7, penalty=0.3) == 0.0
