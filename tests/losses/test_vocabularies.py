"""A loss against a teacher with other tokens equals the loss of the common tokens and one bucket for the rest."""

import pytest
import torch

from practicum import functional as F
from practicum.functional.chunked import BufferPool
from practicum.functional.distributions import SMALLEST_TAIL
from practicum.functional.divergences import DIVERGENCES
from practicum.functional.head import Head
from practicum.functional.support import fold_outside
from practicum.losses import (
    build_chunk,
    build_token_batch,
    compile_objective,
    compute_coefficients,
    compute_term_values,
)
from practicum.losses.closed_form import Autograd, Fused
from practicum.objective import Objective, TeacherDistribution
from practicum.teaching.vocabulary import FoldedHead
from practicum.types import PooledSignal, TeacherSignal

from .slow_twin import slow_loss
from .test_sides import CORRECTIONS, PATHWISE, REST, SCORE, TARGETS, TOPK, WEIGHTS
from .vocabularies import (
    COMMON,
    OUTSIDE,
    OWN,
    STUDENT_SIZE,
    TEACHER_SIZE,
    compact,
    data,
    fold_slowly,
    logits,
    signal_of,
)

MC = [{"signal": "mc(5)"}, {"signal": "mc(5)", "divergence": "forward_kl"}]
EVERY_DIVERGENCE = [{"divergence": name} for name in DIVERGENCES]
POINTWISE = [
    {"signal": "sampled", "divergence": name}
    for name, entry in DIVERGENCES.items()
    if entry.pointwise and name != "ce"
]
EVERY_TAIL = [
    {"signal": f"topk(3, {support})", "divergence": name}
    for name in DIVERGENCES
    for support in ("student", "teacher")
]


def loss_and_gradient(student, objective, datums, signal_from, transform=lambda logprobs: logprobs):
    """Return the loss of the library and its gradient in the student's logits."""
    student = student.clone().requires_grad_()
    tokens = build_token_batch(datums, objective)
    logprobs = transform(torch.log_softmax(student, dim=-1))
    values = compute_term_values(logprobs, signal_from(tokens.tokens), tokens, objective)
    shares = [
        compute_coefficients(term, value.detach(), tokens)
        for term, value in zip(objective.losses, values, strict=True)
    ]
    loss = torch.stack(
        [(share * value.loss_value).sum() for share, value in zip(shares, values, strict=True)]
    ).sum()
    return loss.detach(), torch.autograd.grad(loss, student)[0]


@pytest.mark.parametrize(
    "choice",
    [
        *(EVERY_DIVERGENCE + EVERY_TAIL + POINTWISE + MC),
        *(PATHWISE + TARGETS + TOPK + SCORE + CORRECTIONS + WEIGHTS + REST),
        {"signal": "topk(9)"},
    ],
    ids=str,
)
def test_without_mass_outside_it_is_the_loss_on_the_common_tokens(choice):
    objective = Objective.model_validate(choice)
    datums = data(silent=False)
    student, teacher = logits(1, STUDENT_SIZE, -torch.inf), logits(2, TEACHER_SIZE, -torch.inf)
    loss, gradient = loss_and_gradient(
        student, objective, datums, lambda tokens: signal_of(teacher, tokens)
    )
    expected, expected_gradient = loss_and_gradient(
        student[:, COMMON],
        objective,
        compact(datums),
        lambda tokens: TeacherDistribution(full=torch.log_softmax(teacher[:, COMMON], dim=-1)),
    )
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient[:, COMMON], expected_gradient, rtol=1e-11, atol=1e-13)
    assert not gradient[:, OUTSIDE].any()


@pytest.mark.parametrize("choice", EVERY_DIVERGENCE + EVERY_TAIL, ids=str)
def test_with_mass_outside_it_is_the_divergence_of_the_bucketed_distributions(choice):
    objective = Objective.model_validate(choice)
    student, teacher = logits(3, STUDENT_SIZE, -1.0), logits(4, TEACHER_SIZE, -2.0)
    tokens = build_token_batch(data(silent=False), objective)
    leaf, twin = student.clone().requires_grad_(), student.clone().requires_grad_()
    (value,) = compute_term_values(
        torch.log_softmax(leaf, dim=-1), signal_of(teacher, tokens.tokens), tokens, objective
    )
    s, t = fold_slowly(twin), fold_slowly(teacher)
    term = objective.losses[0]
    if term.signal.candidates:
        side = s if term.signal.chooser == "student" else t
        ids = side[:, :-1].topk(3).indices
        s, t = (
            torch.cat(
                [part.gather(1, ids), (1 - part.gather(1, ids).exp().sum(1)).log()[:, None]], 1
            )
            for part in (s, t)
        )
    expected = DIVERGENCES[term.divergence.name].value(s, t, term.parameter)
    torch.testing.assert_close(value.loss_value, expected, rtol=1e-10, atol=1e-12)
    (gradient,) = torch.autograd.grad(value.loss_value.sum(), leaf)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), twin)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-8, atol=1e-11)


# These choices do not use the student's entropy, which covers all its tokens, and take no candidates: the twin would
# take the bucket for a candidate.
TWINS = [
    choice
    for choice in PATHWISE + TARGETS + SCORE + CORRECTIONS + WEIGHTS + REST
    if choice.get("weights") not in ("soft_or(0.4)", "entropy_top(0.3)")
    and "topk" not in choice.get("signal", "")
    and choice.get("signal") != "entropy"
]


@pytest.mark.parametrize("choice", TWINS, ids=str)
def test_with_mass_outside_it_is_the_slow_twins_loss_of_the_bucketed_distributions(choice):
    objective = Objective.model_validate(choice)
    student, teacher = logits(5, STUDENT_SIZE, -3.0), logits(6, TEACHER_SIZE, -3.0)
    datums = data(silent=False)
    loss, gradient = loss_and_gradient(
        student, objective, datums, lambda tokens: signal_of(teacher, tokens)
    )
    twin = student.clone().requires_grad_()
    expected = slow_loss(fold_slowly(twin), fold_slowly(teacher), compact(datums), objective)
    # A token's share of the loss is a float32 number.
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(
        gradient, torch.autograd.grad(expected, twin)[0], rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize(
    "choice",
    [
        *(PATHWISE + TOPK + MC),
        *({"signal": signal} for signal in ("sampled", "full", "topk(3)", "topk(3, teacher)")),
        {"signal": "sampled", "correction": "ratio_clip(0.3, 0.1)"},
        {"signal": "full", "estimator": "k2_surrogate"},
        {"weights": "trust"},
        {"weights": "divergence_top(0.4)"},
        {"signal": "sampled", "estimator": "score_function(1)"},
        {"signal": "sampled", "correction": "prefix_ratio"},
        {"signal": "sampled", "reward": "modulate(0.5, 0.2)"},
    ],
    ids=str,
)
def test_a_token_that_the_teacher_lacks_is_silent(choice):
    """The loss is zero at that token for any teacher numbers; all other tokens learn."""
    objective = Objective.model_validate(choice)
    student, teacher = logits(5, STUDENT_SIZE, -1.0), logits(6, TEACHER_SIZE, -1.0)
    datums = data(silent=True)
    tokens = build_token_batch(datums, objective)
    is_silent = torch.isin(tokens.tokens, OUTSIDE)
    assert is_silent.any()
    values = compute_term_values(
        torch.log_softmax(student, dim=-1), signal_of(teacher, tokens.tokens), tokens, objective
    )
    for term, value in zip(objective.losses, values, strict=True):
        assert value.loss_value.isfinite().all()
        assert (value.is_scored == ~is_silent).all()
        assert value.teacher_logprobs is None or value.teacher_logprobs[is_silent].isnan().all()
        shares = compute_coefficients(term, value.detach(), tokens)
        assert not shares[is_silent].any()
        assert shares.isfinite().all()
        assert shares[~is_silent].any()
    _, gradient = loss_and_gradient(student, objective, datums, lambda ids: signal_of(teacher, ids))
    assert gradient.isfinite().all()
    assert not gradient[is_silent].any()


@pytest.mark.parametrize("has_reference", [False, True])
@pytest.mark.parametrize(
    "choice",
    [
        {"signal": "sampled", "reward": "modulate(0.5, 0.2)"},
        {"signal": "sampled", "reward": "add_advantage(1.0)", "correction": "ratio_clip(0.2, 0.2)"},
        {
            "signal": "sampled",
            "target": "log_linear(teacher=1, student=1, reference=-1)",
            "reward": "modulate(0.5, 0.2)",
            "correction": "ratio_clip(0.2, 0.2)",
        },
    ],
    ids=str,
)  # fmt: skip
def test_a_batch_without_any_signal_teaches_nothing(choice, has_reference):
    objective = Objective.model_validate(choice)
    tokens = build_token_batch(data(silent=True), objective)
    student = torch.log_softmax(logits(5, STUDENT_SIZE, -1.0), dim=-1)
    (value,) = compute_term_values(
        student,
        TeacherDistribution(None),
        tokens,
        objective,
        TeacherDistribution(student) if has_reference else TeacherDistribution(None),
    )
    assert not value.is_scored.any()
    assert not compute_coefficients(objective.losses[0], value.detach(), tokens).any()
    (side,) = compile_objective(objective).tokens
    assert not any(places.any() for places in side.find_dropped(value.detach(), tokens))


def test_a_term_without_a_teacher_learns_at_every_token():
    objective = Objective.model_validate({"losses": [{}, {"signal": "text", "divergence": "ce"}]})
    tokens = build_token_batch(data(silent=True), objective)
    student = torch.log_softmax(logits(5, STUDENT_SIZE, 0.0), dim=-1)
    signal = signal_of(logits(6, TEACHER_SIZE, 0.0), tokens.tokens)
    distilled, imitated = compute_term_values(student, signal, tokens, objective)
    assert not distilled.is_scored.all()
    assert imitated.is_scored.all()
    assert torch.equal(imitated.loss_value, -F.gather_logprobs(student, tokens.tokens))


def test_a_bucket_that_one_model_cannot_fill_has_the_floor_of_a_tail():
    """Qwen2.5 under Qwen3: the student has no additional token, so its bucket is empty."""
    objective = Objective.model_validate({"divergence": "forward_kl"})
    student = logits(1, 8, 0.0)
    teacher = logits(2, 10, 0.0)
    nothing, own = torch.zeros(0, dtype=torch.long), torch.tensor([8, 9])
    datums = compact(data(silent=False))
    tokens = build_token_batch(datums, objective)
    signal = TeacherDistribution(
        full=fold_outside(torch.log_softmax(teacher, -1), 8, nothing, own), outside=nothing
    )
    leaf = student.clone().requires_grad_()
    (value,) = compute_term_values(torch.log_softmax(leaf, -1), signal, tokens, objective)
    probs = torch.softmax(teacher, -1)
    rest = probs[:, 8:].sum(-1)
    expected = (probs[:, :8] * (probs[:, :8].log() - torch.log_softmax(student, -1))).sum(-1)
    expected += rest * (rest.log() - torch.tensor(SMALLEST_TAIL).double().log())
    torch.testing.assert_close(value.loss_value.detach(), expected, rtol=1e-9, atol=1e-12)
    (gradient,) = torch.autograd.grad(value.loss_value.sum(), leaf)
    torch.testing.assert_close(
        gradient, torch.softmax(student, -1) * (1 - rest)[:, None] - probs[:, :8]
    )


WIDTHS = {"student": 4, "teacher": 6}
REFERENCED = [
    {"target": "log_linear(1.2, 0, -0.2)"},
    {"losses": [{}, {"against": "reference", "coefficient": 0.3}]},
    {"target": "contrast"},
]
NEVER_FUSED = [{"signal": "topk(3)"}, {"divergence": "adaptive_kl"}, *MC, *TARGETS, *REFERENCED]


def open_heads(seed=4):
    """Return heads of two models of different widths and sizes, and hidden states for both."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    count = len(logits(1, 3, 0.0))
    student = Head(torch.nn.Parameter(draw(STUDENT_SIZE + 3, 4)), STUDENT_SIZE, scale=0.8)
    teacher = Head(draw(TEACHER_SIZE + 2, 6), TEACHER_SIZE)
    return student, teacher, draw(count, 4), draw(count, 6)


def signal_with_head(teacher, states, tokens, outside=OUTSIDE, own=OWN):
    head = FoldedHead(teacher, STUDENT_SIZE, outside, own)
    return TeacherSignal(
        hidden=states, head=head, outside=outside, unknown=torch.isin(tokens, outside)
    )


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize(
    "choice",
    [
        *EVERY_DIVERGENCE,
        *(NEVER_FUSED + REST),
        {"signal": "full", "estimator": "score_function"},
        {"divergence": "mixed_kl(0.3)", "clip": "loss(0.6)"},
        {"weights": "accepted(3)"},
        {"weights": "accepted(3, of=greedy, rejected=0.2)"},
        {"losses": [{"divergence": "jsd(0.2)"}, {"signal": "text", "divergence": "ce"}, {}]},
    ],
    ids=str,
)
def test_both_ways_to_the_gradient_agree(choice, silent):
    objective = Objective.model_validate(choice)
    tokens = build_token_batch(data(silent=silent), objective)
    head, teacher, hidden, states = open_heads()
    twin = open_heads()[0]
    _, other, _, other_states = open_heads(seed=9)
    signals = (
        signal_with_head(teacher, states, tokens.tokens),
        signal_with_head(other, other_states, tokens.tokens),
    )
    chunk = build_chunk(head, hidden, signals, tokens, compile_objective(objective), BufferPool())
    slow = Autograd(twin, hidden, signals, tokens, compile_objective(objective))
    assert isinstance(chunk, Autograd if choice in NEVER_FUSED else Fused) or choice in (
        *EVERY_DIVERGENCE,
    )
    for fast_values, slow_values in zip(chunk.values, slow.values, strict=True):
        for name in (
            "loss_value",
            "is_scored",
            "teacher_logprobs",
            "reverse_kl",
            "student_entropy",
        ):
            torch.testing.assert_close(
                getattr(fast_values, name), getattr(slow_values, name), equal_nan=True
            )
    positions = torch.arange(len(hidden))
    for fast_part, slow_part in zip(
        chunk.get_distributions(positions), slow.get_distributions(positions), strict=True
    ):
        torch.testing.assert_close(fast_part.exp(), slow_part.exp())
    shares = [
        compute_coefficients(term, value, tokens)
        for term, value in zip(objective.losses, slow.values, strict=True)
    ]
    torch.testing.assert_close(chunk.backward(shares), slow.backward(shares), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(head.weight.grad, twin.weight.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["geometric", "arithmetic"])
@pytest.mark.parametrize("choice", [{}, {"signal": "topk(3)"}, {"signal": "sampled"}], ids=str)
def test_teachers_of_several_vocabularies_meet_at_the_tokens_of_all(choice, kind):
    """One member has the student's vocabulary, the second lacks some of it: brute force over the common ids."""
    objective = Objective.model_validate(choice)
    tokens = build_token_batch(data(silent=False), objective)
    head, teacher, hidden, states = open_heads()
    like, _, like_states, _ = open_heads(seed=9)
    like = like.detached()
    members = (
        TeacherSignal(hidden=like_states, head=like, name="like"),
        signal_with_head(teacher, states, tokens.tokens),
    )
    pool = TeacherSignal(pool=PooledSignal(kind, (0.4, 0.6), members))
    chunk = build_chunk(
        head, hidden, (pool, TeacherSignal()), tokens, compile_objective(objective), BufferPool()
    )
    first = fold_slowly(like.logits(like_states))
    second = fold_slowly(teacher.logits(states))
    if kind == "geometric":
        expected = torch.log_softmax(0.4 * first + 0.6 * second, dim=-1)
    else:
        expected = (0.4 * first.exp() + 0.6 * second.exp()).log()
    student = fold_slowly(head.logits(hidden).detach())
    got_student, got = chunk.get_distributions(torch.arange(len(hidden)))
    order = [*COMMON, STUDENT_SIZE]
    torch.testing.assert_close(got[:, order].exp(), expected.exp())
    torch.testing.assert_close(got_student[:, order].exp(), student.exp())
    if not choice:
        torch.testing.assert_close(
            chunk.values[0].loss_value, F.reverse_kl(student, expected), rtol=1e-8, atol=1e-10
        )
