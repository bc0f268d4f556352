"""Laws of token ranges: cutting and joining gives the original."""

from dataclasses import asdict, replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from practicum.rollouts.answer_tokens import Tokens
from practicum.types import AUTHORS, Message, Prompt, Rollout, Sample


@st.composite
def stretches(draw: st.DrawFn, longest: int = 8) -> Tokens:
    count = draw(st.integers(0, longest))

    def column(values: st.SearchStrategy[Any], **settings: Any) -> Tensor:
        return torch.tensor(draw(st.lists(values, min_size=count, max_size=count)), **settings)

    logprobs = st.floats(-9, 0, width=32)
    return Tokens(
        column(st.integers(0, 99), dtype=torch.long),
        column(logprobs, dtype=torch.float32),
        column(st.one_of(logprobs, st.just(float("nan"))), dtype=torch.float32),
        column(st.integers(0, len(AUTHORS) - 1), dtype=torch.uint8),
        column(st.integers(0, 3), dtype=torch.long),
        column(st.booleans(), dtype=torch.bool),
    )


def assert_same(one: Tokens, other: Tokens) -> None:
    for left, right in zip(asdict(one).values(), asdict(other).values(), strict=True):
        assert left.dtype == right.dtype
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


def build_rollout(tokens: Tokens) -> Rollout:
    prompt = Prompt("1", (Message("user", "a"),))
    none = torch.zeros(0)
    empty = Rollout(prompt, (1,), none.long(), none.bool(), none, none, 0, "stop", "")
    return tokens.put_into(empty, "student")


@given(stretches(), st.data())
def test_two_parts_make_the_whole_again(tokens: Tokens, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(tokens)))
    assert_same(tokens.cut(0, place) + tokens.cut(place), tokens)
    assert len(tokens.cut(0, place)) == place


@given(stretches(), stretches(), stretches())
def test_putting_together_is_associative_and_nothing_changes_with_no_tokens(
    one: Tokens, two: Tokens, three: Tokens
) -> None:
    assert_same((one + two) + three, one + (two + three))
    assert_same(one + Tokens.empty(), one)
    assert_same(Tokens.empty() + one, one)


@given(stretches())
def test_a_rollout_gives_back_the_tokens_that_were_put_into_it(tokens: Tokens) -> None:
    rollout = build_rollout(tokens)
    assert_same(Tokens.from_rollout(rollout), tokens)
    alone = bool((tokens.authors == AUTHORS.index("student")).all())
    assert (rollout.authors is None) == alone
    assert (rollout.versions is None) == (len(tokens.versions.unique()) <= 1)
    assert rollout.policy_version == (min(tokens.versions.tolist()) if len(tokens) else 0)


@given(stretches(), st.data())
def test_a_loss_is_taken_away_and_never_given(tokens: Tokens, data: st.DataObject) -> None:
    mask = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens))),
        dtype=torch.bool,
    )
    assert torch.equal(tokens.where(mask).in_loss, tokens.in_loss & mask)
    assert not tokens.where(False).in_loss.any()
    assert_same(replace(tokens.where(mask), in_loss=tokens.in_loss), tokens)


def test_the_policy_knows_nothing_of_what_others_wrote() -> None:
    values = torch.tensor([-1.0, -2.0])
    sample = Sample(torch.tensor([4, 5]), values, values - 1, "stop")
    assert torch.equal(Tokens.from_sample(sample, "student", 3).policy_logprobs, values - 1)
    taught = Tokens.from_sample(sample, "teacher", 3)
    assert taught.policy_logprobs.isnan().all() and torch.equal(taught.sampling_logprobs, values)
    text = Tokens.from_text([4, 5], "environment", 3, in_loss=False)
    assert text.policy_logprobs.isnan().all() and not text.sampling_logprobs.any()
    assert text.is_by("environment").all() and not text.in_loss.any()
