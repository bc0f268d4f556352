"""The gradient that is written down is the one that autograd finds, for every objective."""

import pytest
import torch

from practicum.objective import LogitSide, Objective, TeacherTokens, logit_side, token_batch, token_side
from practicum.objective.closed_form import has_closed_form

from .test_sides import ALL, batch, logits

MORE = [
    {"signal": "text", "divergence": "ce"},
    {"signal": "score"},
    {"divergence": "mixed_kl(0.3)", "clip": "loss(0.6)"},
    {"divergence": "tvd"},
    {"divergence": "jsd_normalized(0.2)", "weights": "accepted(3)"},
    {"signal": "sampled", "reward": "add_advantage(0.5)"},
    {"against": "reference"},
    {"target": "log_linear(1.2, 0, -0.2)"},
    {"losses": [{"divergence": "jsd(0.2)"}, {"signal": "text", "divergence": "ce"}, {"signal": "score"}, {}]},
]


@pytest.mark.parametrize("choice", [*ALL, *MORE], ids=str)
def test_both_ways_to_the_gradient_agree(choice):
    objective = Objective.model_validate(choice)
    teacher, reference = (TeacherTokens(full=torch.log_softmax(logits(seed), dim=-1)) for seed in (2, 3))
    tokens = token_batch(batch(), objective)
    leaf = (logits(1) + 5.0).requires_grad_()
    side = LogitSide(1.0 * leaf, teacher, tokens, objective, reference)
    shares = [token_side(term, value, tokens) for term, value in zip(objective.losses, side.values, strict=True)]
    side.backward(shares)

    twin = logits(1).requires_grad_()
    values = logit_side(torch.log_softmax(twin, dim=-1), teacher, tokens, objective, reference)
    for ours, theirs in zip(side.values, values, strict=True):
        for name in ("value", "logprobs", "teacher_logprobs", "divergence", "student_entropy", "reverse_kl"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs.detached(), name))
    loss = sum((share * value.value).sum() for share, value in zip(shares, values, strict=True))
    torch.testing.assert_close(leaf.grad, torch.autograd.grad(loss, twin)[0], rtol=1e-9, atol=1e-12)


def test_the_usual_objectives_have_a_closed_form():
    for choice in ({}, {"divergence": "jsd(0.3)"}, {"signal": "sampled"}, {"signal": "score"}, {"signal": "sampled"}):
        assert all(has_closed_form(term) for term in Objective.model_validate(choice).losses)
    for choice in (
        {"signal": "topk(4)"},
        {"target": "mixture(0.5)"},
        {"divergence": "adaptive_kl"},
        {"signal": "mc(2)"},
    ):
        assert not any(has_closed_form(term) for term in Objective.model_validate(choice).losses)


def test_impossible_tokens_and_great_logits_stay_finite():
    teacher = torch.log_softmax(40 * logits(2), dim=-1).masked_fill(torch.arange(11) % 3 == 1, -torch.inf)
    for choice in ({}, {"divergence": "forward_kl"}, {"divergence": "jsd(0.3)"}, {"divergence": "skew_forward_kl"}):
        objective = Objective.model_validate(choice)
        tokens = token_batch(batch(), objective)
        leaf = (60 * logits(1)).float().requires_grad_()
        side = LogitSide(1.0 * leaf, TeacherTokens(full=teacher.float()), tokens, objective)
        side.backward(
            [token_side(term, value, tokens) for term, value in zip(objective.losses, side.values, strict=True)]
        )
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
