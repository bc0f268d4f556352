"""The closed-form gradient equals the gradient of autograd, for every objective."""

import pytest
import torch

from practicum.backends.local.prepared import prepack_head
from practicum.functional.chunked import BufferPool
from practicum.functional.head import Head
from practicum.losses import build_chunk, build_token_batch, compile_objective, compute_coefficients
from practicum.losses.closed_form import Autograd, Fused
from practicum.losses.compile import compile_closed_form
from practicum.objective import Objective
from practicum.types import PooledSignal, TeacherSignal

from .test_sides import ALL, VOCABULARY, batch, logits

MORE = [
    {"signal": "text", "divergence": "ce"},
    {"signal": "score"},
    {"divergence": "mixed_kl(0.3)", "clip": "loss(0.6)"},
    {"divergence": "tvd"},
    {"divergence": "jsd_normalized(0.2)", "weights": "accepted(3)"},
    {"divergence": "forward_kl", "weights": "accepted(2, of=greedy, rejected=0.3)"},
    {"divergence": "forward_kl", "weights": "accepted(2, of=drafted, rejected=0.3)"},
    {"signal": "sampled", "reward": "add_advantage(0.5)"},
    {"against": "reference"},
    {"signal": "entropy", "coefficient": -0.7},
    {"losses": [{"signal": "score"}, {"signal": "entropy", "weights": "prefix(2)"}]},
    {"losses": [{"divergence": "jsd(0.2)"}, {"signal": "entropy", "coefficient": 0.3}]},
    {"target": "log_linear(1.2, 0, -0.2)"},
    {
        "losses": [
            {"divergence": "jsd(0.2)"},
            {"signal": "text", "divergence": "ce"},
            {"signal": "score"},
            {},
        ]
    },
]
WIDTH = 5


def heads(scale=1.0, seed=4):
    """Return a head that is trained, a teacher's head, and hidden states for both."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(2, VOCABULARY + 2, WIDTH, generator=generator, dtype=torch.float64)
    hidden = torch.randn(2, len(logits(1)), WIDTH, generator=generator, dtype=torch.float64)
    student = Head(torch.nn.Parameter(weights[0]), VOCABULARY, scale=scale)
    return student, TeacherSignal(hidden=hidden[1], head=Head(weights[1], VOCABULARY)), hidden[0]


def spoken(signal, tokens):
    """Return the same teacher, which only gives the sampled tokens' log-probabilities."""
    full = signal.head.logprobs(signal.hidden)
    return TeacherSignal(logprobs=full.gather(-1, tokens.tokens[:, None])[:, 0])


@pytest.mark.parametrize("teacher", ["whole", "sampled", "is_empty"])
@pytest.mark.parametrize("choice", [*ALL, *MORE], ids=str)
def test_both_ways_to_the_gradient_agree(choice, teacher):
    objective = Objective.model_validate(choice)
    tokens = build_token_batch(batch(), objective)
    head, signal, hidden = heads(scale=0.7)
    twin, _, _ = heads(scale=0.7)
    said = {"whole": signal, "sampled": spoken(signal, tokens), "is_empty": TeacherSignal()}[
        teacher
    ]
    if teacher == "sampled" and (
        objective.signal is not None and objective.signal.name != "sampled"
    ):
        return
    reference = heads(seed=5)[1]
    ours = build_chunk(
        head, hidden, (said, reference), tokens, compile_objective(objective), BufferPool()
    )
    theirs = Autograd(twin, hidden, (said, reference), tokens, compile_objective(objective))
    for mine, other in zip(ours.values, theirs.values, strict=True):
        for name in (
            "loss_value",
            "is_scored",
            "logprobs",
            "teacher_logprobs",
            "divergence",
            "student_entropy",
            "reverse_kl",
        ):
            if mine.is_scored.all() or name in ("is_scored", "logprobs"):
                torch.testing.assert_close(vars_of(mine)[name], vars_of(other)[name])
    shares = [
        compute_coefficients(term, value, tokens)
        for term, value in zip(objective.losses, theirs.values, strict=True)
    ]
    torch.testing.assert_close(
        ours.backward(shares), theirs.backward(shares), rtol=1e-9, atol=1e-12
    )
    torch.testing.assert_close(head.weight.grad, twin.weight.grad, rtol=1e-9, atol=1e-12)


def vars_of(values):
    return {name: getattr(values, name) for name in type(values).__dataclass_fields__}


def test_the_usual_objectives_have_a_closed_form():
    for choice in (
        {},
        {"divergence": "jsd(0.3)"},
        {"signal": "sampled"},
        {"signal": "score"},
        {"signal": "entropy"},
    ):
        assert all(compile_closed_form(term) for term in Objective.model_validate(choice).losses)
    for choice in (
        {"signal": "topk(4)"},
        {"target": "mixture(0.5)"},
        {"divergence": "adaptive_kl"},
        {"signal": "mc(2)"},
    ):
        assert not any(
            compile_closed_form(term) for term in Objective.model_validate(choice).losses
        )


def test_impossible_tokens_and_great_logits_stay_finite():
    head, signal, hidden = heads()
    bias = torch.where(torch.arange(VOCABULARY + 2) % 3 == 1, -torch.inf, 0.0).double()
    signal = TeacherSignal(
        hidden=40 * signal.hidden, head=Head(signal.head.weight, VOCABULARY, bias=bias)
    )
    for choice in (
        {},
        {"divergence": "forward_kl"},
        {"divergence": "jsd(0.3)"},
        {"divergence": "skew_forward_kl"},
    ):
        objective = Objective.model_validate(choice)
        tokens = build_token_batch(batch(), objective)
        chunk = build_chunk(
            head,
            60 * hidden,
            (signal, TeacherSignal()),
            tokens,
            compile_objective(objective),
            BufferPool(),
        )
        assert isinstance(chunk, Fused)
        shares = [
            compute_coefficients(term, value, tokens)
            for term, value in zip(objective.losses, chunk.values, strict=True)
        ]
        assert chunk.backward(shares).isfinite().all()
        assert head.weight.grad is not None
        assert head.weight.grad.isfinite().all()


def test_a_head_that_is_more_than_a_matrix_goes_through_autograd():
    head, signal, hidden = heads()
    capped = Head(head.weight, VOCABULARY, softcap=5.0)
    objective = Objective()
    tokens = build_token_batch(batch(), objective)
    assert isinstance(
        build_chunk(
            capped,
            hidden,
            (signal, TeacherSignal()),
            tokens,
            compile_objective(objective),
            BufferPool(),
        ),
        Autograd,
    )


def test_tiles_are_used_again_and_cut_to_size():
    tiles, like = BufferPool(), torch.zeros(1)
    first = tiles.take("a", (4, 6), like)
    again = tiles.take("a", (3, 6), like)
    assert again.data_ptr() == first.data_ptr()
    assert again.shape == (3, 6)
    assert tiles.take("b", (4, 6), like).data_ptr() != first.data_ptr()
    assert tiles.take("a", (2, 3), torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
    tiles.release()


@pytest.mark.parametrize("kind", ["geometric", "arithmetic"])
@pytest.mark.parametrize("gate", [None, 1.0])
@pytest.mark.parametrize(
    "choice",
    [{}, {"divergence": "forward_kl"}, {"divergence": "jsd(0.3)", "weights": "soft_or(0.4)"}],
)
def test_a_pool_of_whole_teachers_has_a_closed_form_too(kind, gate, choice):
    objective = Objective.model_validate(choice)
    tokens = build_token_batch(batch(), objective)
    (head, first, hidden), (twin, second, _) = heads(seed=4), heads(seed=4)
    second = heads(seed=6)[1]
    said = (
        TeacherSignal(pool=PooledSignal(kind, (0.3, 0.7), (first, second), gate)),
        TeacherSignal(),
    )
    ours = build_chunk(head, hidden, said, tokens, compile_objective(objective), BufferPool())
    theirs = Autograd(twin, hidden, said, tokens, compile_objective(objective))
    assert isinstance(ours, Fused)
    some = torch.tensor([0, 2])
    for mine, other in zip(
        ours.get_distributions(some), theirs.get_distributions(some), strict=True
    ):
        torch.testing.assert_close(mine, other)
    shares = [
        compute_coefficients(term, value, tokens)
        for term, value in zip(objective.losses, theirs.values, strict=True)
    ]
    torch.testing.assert_close(
        ours.backward(shares), theirs.backward(shares), rtol=1e-9, atol=1e-12
    )
    torch.testing.assert_close(head.weight.grad, twin.weight.grad, rtol=1e-9, atol=1e-12)


def test_a_pool_with_a_member_that_names_tokens_only_goes_through_autograd():
    objective = Objective.model_validate({"signal": "sampled"})
    tokens = build_token_batch(batch(), objective)
    head, signal, hidden = heads()
    members = (spoken(signal, tokens), spoken(heads(seed=6)[1], tokens))
    said = TeacherSignal(pool=PooledSignal("geometric", (0.5, 0.5), members)), TeacherSignal()
    chunk = build_chunk(head, hidden, said, tokens, compile_objective(objective), BufferPool())
    assert isinstance(chunk, Autograd)
    assert chunk.get_distributions(torch.tensor([0])) is None


def test_a_frozen_head_of_bfloat16_has_a_closed_form_and_one_that_learns_does_not():
    """Check adapters around a model in bfloat16: products round, sums do not."""
    objective = Objective()
    tokens = build_token_batch(batch(), objective)
    head, signal, hidden = heads()
    low = Head(head.weight.detach().bfloat16(), VOCABULARY)
    said = TeacherSignal(
        hidden=signal.hidden.float(), head=Head(signal.head.weight.bfloat16(), VOCABULARY)
    )
    exact = Head(low.weight.double(), VOCABULARY)
    ours = build_chunk(
        low,
        hidden.float(),
        (said, TeacherSignal()),
        tokens,
        compile_objective(objective),
        BufferPool(),
    )
    expected = TeacherSignal(
        hidden=said.hidden.double(), head=Head(said.head.weight.double(), VOCABULARY)
    )
    theirs = Autograd(
        exact, hidden, (expected, TeacherSignal()), tokens, compile_objective(objective)
    )
    assert isinstance(ours, Fused)
    shares = [
        compute_coefficients(term, value, tokens)
        for term, value in zip(objective.losses, theirs.values, strict=True)
    ]
    found, wanted = ours.backward(shares), theirs.backward(shares)
    assert found.dtype == torch.float32
    assert (found - wanted).norm() < 0.03 * wanted.norm()
    learning = Head(torch.nn.Parameter(low.weight.clone()), VOCABULARY)
    assert isinstance(
        build_chunk(
            learning,
            hidden.float(),
            (said, TeacherSignal()),
            tokens,
            compile_objective(objective),
            BufferPool(),
        ),
        Autograd,
    )


def test_heads_made_ready_give_the_same_gradient():
    objective = Objective.model_validate(
        {"losses": [{"divergence": "jsd(0.3)"}, {"signal": "text", "divergence": "ce"}]}
    )
    tokens = build_token_batch(batch(), objective)
    head, signal, hidden = heads(scale=0.7)
    weights = [torch.nn.Parameter(head.weight.detach().float()) for _ in range(2)]
    plain, ready = (
        Head(weights[0], VOCABULARY, scale=0.7),
        prepack_head(Head(weights[1], VOCABULARY, scale=0.7)),
    )
    theirs = Head(signal.head.weight.float(), VOCABULARY)
    found = []
    for mine, teacher in ((plain, theirs), (ready, prepack_head(theirs))):
        said = TeacherSignal(hidden=signal.hidden.float(), head=teacher)
        chunk = build_chunk(
            mine,
            hidden.float(),
            (said, TeacherSignal()),
            tokens,
            compile_objective(objective),
            BufferPool(),
        )
        shares = [
            compute_coefficients(term, value, tokens)
            for term, value in zip(objective.losses, chunk.values, strict=True)
        ]
        found.append(chunk.backward(shares))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weights[0].grad, weights[1].grad, rtol=1e-4, atol=1e-6)
    with torch.enable_grad():
        states = hidden.float().requires_grad_()
        assert ready.logprobs(states).requires_grad, (
            "where a gradient is asked for, the weights themselves multiply"
        )
