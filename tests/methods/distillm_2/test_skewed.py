"""DistiLLM-2's alpha of each answer: its laws, a twin in loops, and gradients that no cut of the batch changes."""

import math

import pytest
import torch
from backends.tiny import all_logits, data_for, tiny
from hypothesis import given
from hypothesis import strategies as st

from practicum.backends.local.trainer import LocalTrainer, TrainerLimits
from practicum.errors import RecipeError
from practicum.functional.divergences import DIVERGENCES
from practicum.losses import build_token_batch, compute_coefficients, compute_term_values
from practicum.losses.passes import average_answers
from practicum.methods.distillm_2.skewed import SMALLEST, Config, compute_alpha
from practicum.objective import Objective, TeacherDistribution
from practicum.objective.distribution import SignalComparison
from practicum.objective.signal_call import ANSWERS
from practicum.recipe import parse_recipe
from practicum.types import TokenRecord

NUMBERS = st.floats(-2.0, 2.0)


def draw(seed: int, rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return logits.log_softmax(-1)


def compare(
    student: torch.Tensor, teacher: torch.Tensor, divergence: str, answers: torch.Tensor | None
) -> torch.Tensor:
    extras = {} if answers is None else {ANSWERS: answers}
    distribution = TeacherDistribution(full=teacher, extras=extras)
    tokens = torch.zeros(len(student), dtype=torch.long)
    entry = DIVERGENCES[divergence]
    return Config(alpha=0.3, anchor=0.2).compare(
        SignalComparison(student, distribution, tokens, entry)
    )


@given(NUMBERS, NUMBERS, st.floats(0.02, 0.98))
def test_alpha_stays_between_its_bounds_and_keeps_the_anchor(
    gap: float, anchor: float, largest: float
) -> None:
    alpha = float(compute_alpha(torch.tensor([gap], dtype=torch.float64), anchor, largest)[0])
    assert SMALLEST <= alpha <= largest < 1
    if SMALLEST < alpha < largest:
        # Equation 7: (1 - alpha) times the gap is constant.
        assert (1 - alpha) * (gap + 1e-5) == pytest.approx((1 - largest) * anchor)
    if gap >= anchor >= 0 or gap <= -1e-4 <= 0 <= anchor or anchor == 0:
        assert alpha == largest


def test_alpha_grows_with_the_gap() -> None:
    gaps = torch.linspace(0.0, 0.5, 200, dtype=torch.float64)
    alphas = compute_alpha(gaps, 0.2, 0.3)
    assert (alphas.diff() >= 0).all()
    assert (float(alphas[0]), float(alphas[-1])) == (SMALLEST, pytest.approx(0.3))
    assert len(alphas.unique()) > 10
    assert float(compute_alpha(torch.tensor([math.nan]), 0.2, 0.3)[0]) == pytest.approx(0.3)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_each_token_has_the_skew_kl_with_the_alpha_of_its_answer(divergence: str) -> None:
    student, teacher = draw(0, 5, 7).requires_grad_(), draw(1, 5, 7)
    answers = torch.tensor([[0.1, 0.31], [0.1, 0.35], [0.31, 0.1], [0.33, 0.1], [0.5, 0.5]])
    values = compare(student, teacher, divergence, answers)
    (slopes,) = torch.autograd.grad(values.sum(), student, retain_graph=True)
    for row in range(5):
        mine, theirs = (float(number) for number in answers[row])
        gap = theirs - mine if divergence == "forward_kl" else mine - theirs
        alpha = min(max(1 - 0.7 * 0.2 / (gap + 1e-5), 0.01), 0.3)
        S, T = student[row].exp(), teacher[row].exp()
        if divergence == "forward_kl":
            slow = sum(T[v] * (T[v] / (alpha * T[v] + (1 - alpha) * S[v])).log() for v in range(7))
        else:
            mixture = ((1 - alpha) * T + alpha * S).detach()
            slow = sum(S[v] * (S[v] / mixture[v]).log() for v in range(7))
        torch.testing.assert_close(values[row], slow, rtol=1e-5, atol=1e-9)
        (slope,) = torch.autograd.grad(slow, student, retain_graph=True)
        torch.testing.assert_close(slopes[row], slope[row], rtol=1e-5, atol=1e-9)


def test_without_a_gap_it_is_the_skew_kl_with_one_alpha() -> None:
    student, teacher = draw(2, 4, 6), draw(3, 4, 6)
    plain = DIVERGENCES["skew_forward_kl"].value(student, teacher, 0.3)
    torch.testing.assert_close(compare(student, teacher, "forward_kl", None), plain)
    mixed = torch.logaddexp(math.log(0.7) + teacher, math.log(0.3) + student)
    plain = DIVERGENCES["reverse_kl"].value(student, mixed)
    torch.testing.assert_close(compare(student, teacher, "reverse_kl", None), plain)


def test_an_answer_has_the_geometric_mean_of_its_known_tokens() -> None:
    rows = torch.tensor([3, 3, 1, 1, 1, 5])
    student = torch.tensor([0.5, 0.25, 0.1, 0.9, 0.3, 0.2], dtype=torch.float64)
    teacher = torch.tensor([0.8, 0.2, 0.4, math.nan, 0.1, math.nan], dtype=torch.float64)
    means = average_answers(student.log(), teacher.log(), rows)
    answers = {1: ((0.1 * 0.3) ** 0.5, (0.4 * 0.1) ** 0.5), 3: (0.125**0.5, 0.16**0.5), 5: (1, 1)}
    expected = [answers[int(row)] for row in rows]
    torch.testing.assert_close(means, torch.tensor(expected, dtype=torch.float64))


OBJECTIVE = Objective.model_validate(
    {
        "losses": [
            {"signal": "skewed(0.3, -0.0017)", "divergence": "forward_kl", "source": "student"},
            {"signal": "skewed(0.2, 0.0055)", "coefficient": 0.4, "weights": "entropy_top(0.5)"},
        ]
    }
)
"""The second term's weights need a first pass without gradient."""


@pytest.mark.parametrize("losses", [slice(0, 1), slice(0, 2)], ids=["one pass", "two passes"])
@pytest.mark.parametrize("limits", [(10**6, 10**6), (10**6, 1), (20, 3)])
def test_gradients_equal_a_twin_that_reads_whole_answers(
    limits: tuple[int, int], losses: slice
) -> None:
    objective = OBJECTIVE.model_copy(update={"losses": OBJECTIVE.losses[losses]})
    student, teacher = tiny(seed=0), tiny(seed=1)
    student.model.requires_grad_(True)
    data = [datum for datum in data_for(teacher) if datum.rollout.loss_mask.any()]
    LocalTrainer(student, TrainerLimits(*limits)).forward_backward(data, objective, 0)
    fast = {name: weight.grad.clone() for name, weight in student.trainable_parameters().items()}
    student.model.zero_grad(set_to_none=True)
    student.model.eval()
    logprobs = torch.cat([all_logits(student, datum.rollout) for datum in data]).log_softmax(-1)
    with torch.no_grad():
        theirs = torch.cat([all_logits(teacher, datum.rollout) for datum in data]).log_softmax(-1)
    batch = build_token_batch(data, objective)
    columns = []
    for row in range(len(data)):
        here = batch.rows == row
        means = [
            float(model.detach()[here].gather(-1, batch.tokens[here, None]).mean().exp())
            for model in (logprobs, theirs)
        ]
        columns += [means] * int(here.sum())
    distribution = TeacherDistribution(full=theirs, extras={ANSWERS: torch.tensor(columns)})
    values = compute_term_values(logprobs, distribution, batch, objective)
    loss = sum(
        (compute_coefficients(term, value.detach(), batch) * value.loss_value).sum()
        for term, value in zip(objective.losses, values, strict=True)
    )
    slow = torch.autograd.grad(loss, list(student.trainable_parameters().values()))
    norm = torch.nn.utils.get_total_norm(slow)
    for (name, value), expected in zip(fast.items(), slow, strict=True):
        assert (value - expected).norm() <= 1e-5 * norm, name
    gaps = distribution.extras[ANSWERS][:, 1] - distribution.extras[ANSWERS][:, 0]
    alphas = compute_alpha(-gaps, 0.0055, 0.2)
    assert len(alphas.unique()) == 3, "the answers differ in their alphas"


def test_the_gaps_of_a_step_are_means_over_answers_by_writer() -> None:
    teacher = tiny(seed=1)
    rollouts = [datum.rollout for datum in data_for(teacher) if datum.rollout.loss_mask.any()]
    count = sum(len(rollout.tokens) for rollout in rollouts)
    columns = {name: torch.zeros(count) for name in TokenRecord.__dataclass_fields__}
    generator = torch.Generator().manual_seed(0)
    columns["logprobs"], columns["teacher_logprobs"] = -torch.rand(2, count, generator=generator)
    mask = torch.cat([rollout.loss_mask for rollout in rollouts])
    columns["logprobs"][~mask] = columns["teacher_logprobs"][~mask] = torch.nan
    measured = Config().measure(rollouts, TokenRecord(**columns))
    expected: dict[str, list[float]] = {}
    start = 0
    for rollout in rollouts:
        places = [start + place for place, used in enumerate(rollout.loss_mask.tolist()) if used]
        start += len(rollout.tokens)
        student, teacher_mean = (
            math.exp(sum(float(columns[name][place]) for place in places) / len(places))
            for name in ("logprobs", "teacher_logprobs")
        )
        if rollout.source in ("student", "teacher"):
            gap = teacher_mean - student
            gap = gap if rollout.source == "teacher" else -gap
            expected.setdefault(f"gap_of_{rollout.source}", []).append(gap)
    assert measured == pytest.approx({k: sum(v) / len(v) for k, v in expected.items()}, rel=1e-5)
    assert measured


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ({"signal": "skewed", "divergence": "jsd(0.5)"}, "mixes one KL; set divergence"),
        ({"signal": "skewed", "estimator": "score_function"}, "differentiates its own divergence"),
        ({"signal": "skewed(1.0)"}, "less than 1"),
        ({"signal": "skewed(0.01)"}, "greater than 0.01"),
    ],
)
def test_what_cannot_be_skewed_is_refused(term: dict[str, str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe(
            {
                "student": {"model": "a"},
                "teacher": {"type": "model", "model": "b"},
                "task": {"type": "reverse"},
                "objective": term,
            },
            "refused",
        )
