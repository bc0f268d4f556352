"""The gradient that is written down is the one that autograd finds, for every objective."""

import pytest
import torch

from practicum.functional.chunked import Tiles
from practicum.objective import Objective, open_chunk, token_batch, token_side
from practicum.objective.closed_form import Differentiated, WrittenDown, has_closed_form
from practicum.types import Head, TeacherSignal

from .test_sides import ALL, VOCABULARY, batch, logits

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
WIDTH = 5


def heads(scale=1.0, seed=4):
    """A head that learns, one of a teacher, and hidden states for both."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(2, VOCABULARY + 2, WIDTH, generator=generator, dtype=torch.float64)
    hidden = torch.randn(2, len(logits(1)), WIDTH, generator=generator, dtype=torch.float64)
    student = Head(torch.nn.Parameter(weights[0]), VOCABULARY, scale=scale)
    return student, TeacherSignal(hidden=hidden[1], head=Head(weights[1], VOCABULARY)), hidden[0]


def spoken(signal, tokens):
    """The same teacher, telling the sampled tokens' log-probabilities only."""
    full = signal.head.logprobs(signal.hidden)
    return TeacherSignal(logprobs=full.gather(-1, tokens.tokens[:, None])[:, 0])


@pytest.mark.parametrize("teacher", ["whole", "sampled", "silent"])
@pytest.mark.parametrize("choice", [*ALL, *MORE], ids=str)
def test_both_ways_to_the_gradient_agree(choice, teacher):
    objective = Objective.model_validate(choice)
    tokens = token_batch(batch(), objective)
    head, signal, hidden = heads(scale=0.7)
    twin, _, _ = heads(scale=0.7)
    said = {"whole": signal, "sampled": spoken(signal, tokens), "silent": TeacherSignal()}[teacher]
    if teacher == "sampled" and (objective.signal is not None and objective.signal.type != "sampled"):
        return
    reference = heads(seed=5)[1]
    ours = open_chunk(head, hidden, (said, reference), tokens, objective, Tiles())
    theirs = Differentiated(twin, hidden, (said, reference), tokens, objective)
    for mine, other in zip(ours.values, theirs.values, strict=True):
        for name in (
            "value",
            "answered",
            "logprobs",
            "teacher_logprobs",
            "divergence",
            "student_entropy",
            "reverse_kl",
        ):
            if mine.answered.all() or name in ("answered", "logprobs"):
                torch.testing.assert_close(vars_of(mine)[name], vars_of(other)[name])
    shares = [token_side(term, value, tokens) for term, value in zip(objective.losses, theirs.values, strict=True)]
    torch.testing.assert_close(ours.backward(shares), theirs.backward(shares), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(head.weight.grad, twin.weight.grad, rtol=1e-9, atol=1e-12)


def vars_of(values):
    return {name: getattr(values, name) for name in type(values).__dataclass_fields__}


def test_the_usual_objectives_have_a_closed_form():
    for choice in ({}, {"divergence": "jsd(0.3)"}, {"signal": "sampled"}, {"signal": "score"}):
        assert all(has_closed_form(term) for term in Objective.model_validate(choice).losses)
    for choice in (
        {"signal": "topk(4)"},
        {"target": "mixture(0.5)"},
        {"divergence": "adaptive_kl"},
        {"signal": "mc(2)"},
    ):
        assert not any(has_closed_form(term) for term in Objective.model_validate(choice).losses)


def test_impossible_tokens_and_great_logits_stay_finite():
    head, signal, hidden = heads()
    bias = torch.where(torch.arange(VOCABULARY + 2) % 3 == 1, -torch.inf, 0.0).double()
    signal = TeacherSignal(hidden=40 * signal.hidden, head=Head(signal.head.weight, VOCABULARY, bias=bias))
    for choice in ({}, {"divergence": "forward_kl"}, {"divergence": "jsd(0.3)"}, {"divergence": "skew_forward_kl"}):
        objective = Objective.model_validate(choice)
        tokens = token_batch(batch(), objective)
        chunk = open_chunk(head, 60 * hidden, (signal, TeacherSignal()), tokens, objective, Tiles())
        assert isinstance(chunk, WrittenDown)
        shares = [token_side(term, value, tokens) for term, value in zip(objective.losses, chunk.values, strict=True)]
        assert chunk.backward(shares).isfinite().all()
        assert head.weight.grad is not None
        assert head.weight.grad.isfinite().all()


def test_a_head_that_is_more_than_a_matrix_goes_through_autograd():
    head, signal, hidden = heads()
    capped = Head(head.weight, VOCABULARY, softcap=5.0)
    objective = Objective()
    tokens = token_batch(batch(), objective)
    assert isinstance(open_chunk(capped, hidden, (signal, TeacherSignal()), tokens, objective, Tiles()), Differentiated)


def test_tiles_are_used_again_and_cut_to_size():
    tiles, like = Tiles(), torch.zeros(1)
    first = tiles.take("a", (4, 6), like)
    again = tiles.take("a", (3, 6), like)
    assert again.data_ptr() == first.data_ptr()
    assert again.shape == (3, 6)
    assert tiles.take("b", (4, 6), like).data_ptr() != first.data_ptr()
    assert tiles.take("a", (2, 3), torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
    tiles.release()
