"""KETCHUP's returns: by their definition, at both ends of K, in exact expectation, and for every way of reading them."""

from dataclasses import replace

import pytest
import torch
from backends.tiny import all_logits, hidden_signal, rollouts, tiny
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from practicum import functional as F
from practicum.backends.local.trainer import LocalTrainer, TrainerLimits
from practicum.errors import RecipeError, TeacherError
from practicum.losses import compute_coefficients, compute_term_values
from practicum.objective import Objective, TeacherDistribution
from practicum.recipe import parse_recipe
from practicum.types import Datum, PooledSignal, TeacherSignal
from tests.papers.worlds import (
    BEGINNINGS,
    LENGTH,
    SYMBOLS,
    Policies,
    answer,
    close,
    every_answer,
    policies,
)
from tests.papers.worlds import RolloutBatch as Batch

SUMMED = {"aggregate": "seq_mean_token_sum"}


def numbers(length: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pair = 9.0 + 4.0 * torch.randn(2, length, generator=generator, dtype=torch.float64)
    return pair[0], pair[1]


@given(st.integers(0, 10**6), st.integers(0, 11), st.integers(1, 14))
def test_returns_are_their_definition(seed: int, length: int, k: int) -> None:
    q, v = numbers(length, seed)
    twin = [
        sum(float(q[u]) - (float(v[u + k]) if u + k < length else 0.0) for u in range(t, length, k))
        for t in range(length)
    ]
    assert F.step_returns(q, v, k).tolist() == pytest.approx(twin)


@given(st.integers(0, 10**6), st.integers(1, 9))
def test_at_full_length_a_return_is_the_tokens_own_logit(seed: int, length: int) -> None:
    q, v = (row.float() for row in numbers(length, seed))
    assert torch.equal(F.step_returns(q, v, length), q)
    assert torch.equal(F.step_returns(q, v, length + 5), q)
    # Where every token is the best one, all steps telescope to the same value.
    for k in range(1, length + 1):
        torch.testing.assert_close(F.step_returns(q, q, k), q)


def test_a_step_has_a_token() -> None:
    with pytest.raises(ValueError, match="step_returns needs k of 1 or more, got 0"):
        F.step_returns(torch.zeros(2), torch.zeros(2), 0)


# In exact expectation, over every answer of three symbols.


def expected(signal: str, world: Policies, levels: Tensor) -> Tensor:
    """Return the library's gradient in the student's table; `levels` are the levels of the teacher's logits in each state."""
    objective = Objective.model_validate({**SUMMED, "signal": signal})
    table = world.student.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for ids, path in every_answer():
        drawn = table.detach().log_softmax(-1)[path, ids]
        batch = Batch([answer(ids, drawn)], table[path], world.teacher[path], world.reference[path])
        tokens = batch.tokens(objective)
        teacher = TeacherDistribution(world.teacher.log_softmax(-1)[path], level=levels[path])
        (values,) = compute_term_values(batch.S, teacher, tokens, objective)
        share = compute_coefficients(objective.losses[0], values.detach(), tokens)
        total = total + drawn.sum().exp() * (share * values.loss_value).sum()
    return torch.autograd.grad(total, table)[0]


def expected_return(world: Policies, k: int, value: str) -> Tensor:
    """Return minus the gradient of the expected return of every token, each with the previous tokens held fixed."""
    table = world.student.clone().requires_grad_()
    q = world.teacher
    v = q.amax(-1) if value == "max" else q.logsumexp(-1)
    total = torch.zeros((), dtype=torch.float64)
    for ids, path in every_answer():
        logs = table.log_softmax(-1)[path, ids]
        drawn = logs.detach().sum().exp()
        for t in range(LENGTH):
            steps = range(t, LENGTH, k)
            ends = [v[path[u + k]] if u + k < LENGTH else torch.zeros(()) for u in steps]
            gains = [q[path[u], ids[u]] - end for u, end in zip(steps, ends, strict=True)]
            total = total - drawn * logs[t] * sum(gains).detach()  # type: ignore[union-attr]
    return torch.autograd.grad(total, table)[0]


@pytest.mark.parametrize("value", ["max", "soft"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_gradient_is_that_of_the_expected_return(k: int, value: str) -> None:
    world = policies()
    found = expected(f"logits({k}, {value})", world, world.teacher.logsumexp(-1))
    close(found, expected_return(world, k, value))


@pytest.mark.parametrize("value", ["max", "soft"])
@pytest.mark.parametrize("k", [1, 2])
def test_the_level_of_the_logits_is_a_baseline_and_nothing_else(k: int, value: str) -> None:
    world, signal = policies(), f"logits({k}, {value})"
    generator = torch.Generator().manual_seed(2)
    others = 20.0 * torch.randn(len(BEGINNINGS), generator=generator, dtype=torch.float64)
    levels = world.teacher.logsumexp(-1)
    close(expected(signal, world, levels + others), expected(signal, world, levels))


def test_one_step_with_soft_values_is_the_sequence_reverse_kl_without_the_entropy() -> None:
    world = policies()
    found = expected("logits(1, soft)", world, world.teacher.logsumexp(-1))
    table = world.student.clone().requires_grad_()
    cross_entropy = torch.zeros((), dtype=torch.float64)
    for ids, path in every_answer():
        own = table.log_softmax(-1)[path, ids].sum()
        cross_entropy = cross_entropy - own.exp() * world.teacher.log_softmax(-1)[path, ids].sum()
    close(found, torch.autograd.grad(cross_entropy, table)[0])
    assert SYMBOLS == LENGTH == 3


# From hidden states, through the trainer.


def trained(data: list[Datum], choice: dict, limits: TrainerLimits | None = None) -> Tensor:
    student = tiny()
    student.model.requires_grad_(True)
    LocalTrainer(student, limits).forward_backward(data, Objective.model_validate(choice), 0)
    found = [
        torch.zeros_like(value) if value.grad is None else value.grad
        for _, value in sorted(student.trainable_parameters().items())
    ]
    return torch.cat([value.flatten() for value in found])


def near(found: Tensor, expected: Tensor, relative: float = 1e-5) -> None:
    assert expected.norm() > 0
    assert (found - expected).norm() <= relative * expected.norm()


SCALE = 3.0
"""The logits of the tiny teacher are small: multiplied by a factor, their level and their largest one are not small."""


def scored() -> list[Datum]:
    """Return ragged answers, some of more than one turn, with a teacher's hidden states."""
    teacher = tiny(seed=1)
    items = []
    for item in rollouts():
        signal = hidden_signal(teacher, item)
        assert isinstance(signal.hidden, Tensor)
        items.append(Datum(item, replace(signal, hidden=SCALE * signal.hidden)))
    return items


def by_hand(data: list[Datum], k: int, value: str) -> Tensor:
    """Return the gradient with coefficients computed here, row by row, from whole matrices of logits."""
    student = tiny()
    student.model.requires_grad_(True)
    total = torch.zeros(())
    for datum in data:
        item, signal = datum.rollout, datum.signal
        assert isinstance(signal.hidden, Tensor) and signal.head is not None
        kept = [int(place) for place in item.loss_mask.nonzero()[:, 0]]
        logits = signal.head.logits(signal.hidden).detach().double()
        q = [float(logits[place, item.tokens[place]]) for place in kept]
        best = logits.amax(-1) if value == "max" else logits.logsumexp(-1)
        v = [float(best[place]) for place in kept]
        own = torch.log_softmax(all_logits(student, item), -1)
        for t, place in enumerate(kept):
            gains = [
                q[u] - (v[u + k] if u + k < len(kept) else 0.0) for u in range(t, len(kept), k)
            ]
            total = total - sum(gains) * own[t, item.tokens[place]]
    (total / sum(bool(datum.rollout.loss_mask.any()) for datum in data)).backward()
    found = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for _, parameter in sorted(student.trainable_parameters().items())
    ]
    return torch.cat([gradient.flatten() for gradient in found])


@pytest.mark.parametrize(("k", "value"), [(1, "soft"), (2, "max"), (100, "max")])
@pytest.mark.parametrize("beside", ["", "pathwise"])
def test_hidden_states_are_read_in_chunks_to_the_same_gradient(
    k: int, value: str, beside: str
) -> None:
    data, term = scored(), {"signal": f"logits({k}, {value})"}
    # A term without a closed form takes the second code path through the logits.
    other = {"signal": "topk(3)", "coefficient": 0.0}
    choice = {**SUMMED, "losses": [term, other] if beside else [term]}
    limits = TrainerLimits(micro_batch_tokens=20, chunk_tokens=3)
    expected = by_hand(data, k, value)
    near(trained(data, choice), expected, 1e-4)
    near(trained(data, choice, limits), expected, 1e-4)


def test_a_baseline_of_the_group_and_a_reward_join_it() -> None:
    data = scored()
    plain = {"signal": "logits(2)", "estimator": "score_function(baseline=group_mean)"}
    rewarded = {**plain, "reward": "add_advantage(0.7, group_mean)"}
    alone = {"signal": "score(group_mean)", "coefficient": 0.7}
    near(trained(data, rewarded), trained(data, plain) + trained(data, alone))
    assert (trained(data, plain) - trained(data, {"signal": "logits(2)"})).norm() > 0


# Refused settings


def test_log_probabilities_alone_are_refused_in_one_line() -> None:
    data = [
        Datum(item, TeacherSignal(logprobs=-torch.ones(len(item.tokens)))) for item in rollouts()
    ]
    members = tuple(
        replace(hidden_signal(tiny(seed=1), data[0].rollout), name=name) for name in "ab"
    )
    pool = TeacherSignal(pool=PooledSignal("geometric", (0.5, 0.5), members))
    for items in (data, [Datum(data[0].rollout, pool)]):
        with pytest.raises(
            TeacherError, match="raw logits, and it gave log-probabilities only; set"
        ):
            trained(items, {"signal": "logits(2)"})


EXPERT = {"teacher": {"type": "expert"}, "task": {"type": "walker"}}
POOL = {"teacher": {"type": "pool", "teachers": {"a": {"type": "self"}, "b": {"type": "self"}}}}
REFUSED = [
    ({}, EXPERT, "'expert' gives log-probabilities and no raw logits; set signal: sampled"),
    ({}, POOL, "'pool' gives log-probabilities and no raw logits"),
    (
        {},
        {"teacher": {"type": "openai_api", "url": "http://127.0.0.1:9/v1", "model": "m"}},
        "cannot give signal",
    ),
    ({"estimator": "score_function(gamma=1)"}, {}, "signal 'logits' defines its own return"),
    ({"divergence": "forward_kl"}, {}, "signal 'logits' defines its own return"),
    ({"reward": "modulate"}, {}, "reward 'modulate' reads log T - log S"),
    ({"clip": "advantage(-5, 5)"}, {}, "clip 'advantage' is of log T - log S"),
    ({"signal": "logits(0)"}, {}, "greater than or equal to 1"),
    ({"signal": "logits(2, mean)"}, {}, "'max' or 'soft'"),
]


@pytest.mark.parametrize(("term", "changes", "answer"), REFUSED)
def test_what_cannot_be_is_refused_in_one_line(term: dict, changes: dict, answer: str) -> None:
    settings = {
        "student": {"model": "x"},
        "task": {"type": "reverse"},
        "train": {"steps": 1},
        "teacher": {"type": "self", "weights": "frozen"},
    }
    parse_recipe({**settings, "objective": {"signal": "logits(2)"}}, "r")
    with pytest.raises(RecipeError, match=answer):
        parse_recipe({**settings, **changes, "objective": {"signal": "logits(2)", **term}}, "r")
