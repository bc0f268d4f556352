"""A span of tokens is one action: its gradient by enumeration, over random pairs of tokenizers."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.functional.divergences import DIVERGENCES
from practicum.functional.sequence import add_later, keep_span_starts, sum_spans
from practicum.losses import build_token_batch, compute_coefficients, compute_term_values
from practicum.objective import Objective, TeacherDistribution
from practicum.types import Datum, PooledSignal, Prompt, Rollout, TeacherSignal

V, LENGTH = 3, 4
SEQUENCES = list(itertools.product(range(V), repeat=LENGTH))


def rollout(tokens: tuple[int, ...], mask: tuple[bool, ...] | None = None) -> Rollout:
    zeros = torch.zeros(len(tokens), dtype=torch.float64)
    return Rollout(
        prompt=Prompt(id=str(tokens), messages=()),
        prompt_tokens=(0,),
        tokens=torch.tensor(tokens),
        loss_mask=torch.ones(len(tokens), dtype=torch.bool) if mask is None else torch.tensor(mask),
        sampling_logprobs=zeros,
        policy_logprobs=zeros,
        policy_version=0,
        stop_reason="stop",
        text="",
    )


class Pair:
    """A random student and teacher over four tokens, and a teacher's tokenizer that cuts after some of them.

    The cut after a token depends on the text before it, as for a tokenizer that splits words first. `student` has the
    logits of each state.
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = [
            torch.randn(V**n, V, generator=generator, dtype=torch.float64) for n in range(LENGTH)
        ]
        joint = torch.randn(V**LENGTH, generator=generator, dtype=torch.float64)
        self.teacher = (2 * joint).log_softmax(0)
        self.cuts = [torch.rand(V**n, generator=generator) < 0.5 for n in range(LENGTH + 1)]
        self.cuts[LENGTH][:] = True

    def student(self, logits: list[torch.Tensor], tokens: tuple[int, ...]) -> torch.Tensor:
        """Return the log-probabilities of the tokens of a sequence."""
        rows = [logits[n].log_softmax(-1)[place(tokens[:n])] for n in range(len(tokens))]
        return torch.stack([row[token] for row, token in zip(rows, tokens, strict=True)])

    def text(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """Return the teacher's log-probability of the beginning of a text."""
        whole = self.teacher.view([V] * LENGTH)[tokens]
        return whole.flatten().logsumexp(0)

    def spans(self, tokens: tuple[int, ...]) -> list[tuple[int, int]]:
        ends = [n for n in range(1, LENGTH + 1) if self.cuts[n][place(tokens[:n])]]
        return list(itertools.pairwise([0, *ends]))

    def signal(self, tokens: tuple[int, ...]) -> TeacherSignal:
        logprobs, starts = torch.zeros(LENGTH, dtype=torch.float64), torch.zeros(LENGTH).bool()
        for start, end in self.spans(tokens):
            logprob = self.text(tokens[:end]) - self.text(tokens[:start])
            logprobs[start:end] = logprob / (end - start)
            starts[start] = True
        return TeacherSignal(logprobs=logprobs, span_starts=starts)


def place(tokens: tuple[int, ...]) -> int:
    number = 0
    for token in tokens:
        number = V * number + token
    return number


def expected_gradient(pair: Pair, objective: Objective) -> list[torch.Tensor]:
    """Return the gradient of the loss over every sequence, weighted by the student's probability."""
    data = [Datum(rollout(tokens), pair.signal(tokens)) for tokens in SEQUENCES]
    batch = build_token_batch(data, objective)
    logits = [part.clone().requires_grad_() for part in pair.logits]
    rows = torch.cat(
        [
            torch.stack([logits[n].log_softmax(-1)[place(tokens[:n])] for n in range(LENGTH)])
            for tokens in SEQUENCES
        ]
    )
    teacher = TeacherDistribution(logprobs=torch.cat([datum.signal.logprobs for datum in data]))
    (values,) = compute_term_values(rows, teacher, batch, objective)
    coefficients = compute_coefficients(objective.losses[0], values.detach(), batch)
    with torch.no_grad():
        often = torch.stack([pair.student(pair.logits, tokens).sum().exp() for tokens in SEQUENCES])
    weights = often[batch.rows] / batch.aggregate
    return list(torch.autograd.grad((weights * coefficients * values.loss_value).sum(), logits))


def sampled(divergence: str, gamma: float, **choices: object) -> Objective:
    return Objective.model_validate(
        {
            "losses": [
                {
                    "signal": "sampled",
                    "divergence": divergence,
                    "estimator": f"score_function(gamma={gamma})",
                    **choices,
                }
            ],
            "aggregate": "seq_mean_token_sum",
        }
    )


def assert_equal(mine: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    for one, other in zip(mine, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("seed", range(6))
def test_whole_returns_are_the_gradient_of_the_reverse_kl_of_texts(seed: int) -> None:
    pair = Pair(seed)
    logits = [part.clone().requires_grad_() for part in pair.logits]
    logprobs = torch.stack([pair.student(logits, tokens).sum() for tokens in SEQUENCES])
    kl = (logprobs.exp() * (logprobs - pair.teacher)).sum()
    exact = list(torch.autograd.grad(kl, logits))
    assert_equal(expected_gradient(pair, sampled("reverse_kl", 1.0)), exact)


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd(0.3)", "tvd"])
@pytest.mark.parametrize("seed", range(3))
def test_each_span_is_one_action_of_its_own_divergence(seed: int, divergence: str) -> None:
    pair = Pair(seed)
    logits = [part.clone().requires_grad_() for part in pair.logits]
    objective = sampled(divergence, 0.0)
    term = objective.losses[0]
    entry = DIVERGENCES[term.divergence.name]
    total = torch.zeros((), dtype=torch.float64)
    begins = {tokens[:start] for tokens in SEQUENCES for start, _ in pair.spans(tokens)}
    for begin in begins:
        actions = sorted(
            {
                tokens[:end]
                for tokens in SEQUENCES
                for start, end in pair.spans(tokens)
                if tokens[:start] == begin and len(begin) == start
            }
        )
        student = torch.stack(
            [pair.student(logits, action)[len(begin) :].sum() for action in actions]
        )
        teacher = torch.stack([pair.text(action) - pair.text(begin) for action in actions])
        torch.testing.assert_close(student.logsumexp(0).exp().item(), 1.0)
        visits = pair.student(pair.logits, begin).sum().exp() if begin else 1.0
        value = entry.contributions(student, teacher, term.parameter).sum()
        total = total + visits * value
    exact = list(torch.autograd.grad(total, logits))
    assert_equal(expected_gradient(pair, objective), exact)


def test_an_even_share_of_a_spans_advantage_is_no_gradient() -> None:
    """Check why the whole log-ratio is needed: the published shares are wrong by half, or in direction."""
    pair = Pair(0)
    pair.cuts = [torch.zeros(V**n).bool() for n in range(LENGTH)] + [torch.ones(V**LENGTH).bool()]
    exact = expected_gradient(pair, sampled("reverse_kl", 0.0))
    shared = [gradient / LENGTH for gradient in exact]
    assert all(
        (one - other).norm() > 0.5 * one.norm() for one, other in zip(exact, shared, strict=True)
    )


@pytest.mark.parametrize("gamma", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("estimator", ["gamma={}", "gamma={}, start=1, length=mean"])
def test_spans_of_one_token_that_follow_none_change_no_bit(gamma: float, estimator: str) -> None:
    pair = Pair(1)
    pair.cuts = [torch.ones(V**n).bool() for n in range(LENGTH + 1)]
    objective = sampled("reverse_kl", 0.0)
    term = objective.losses[0].model_validate(
        {"signal": "sampled", "estimator": f"score_function({estimator.format(gamma)})"}
    )
    data = [Datum(rollout(tokens), pair.signal(tokens)) for tokens in SEQUENCES]
    plain = [Datum(d.rollout, TeacherSignal(logprobs=d.signal.logprobs)) for d in data]
    columns = []
    for datums in (data, plain):
        batch = build_token_batch(datums, objective)
        assert (batch.spans is None) == (datums is plain)
        # With a token between every two, no token comes right before another.
        batch = replace(batch, positions=2 * batch.positions)
        rows = torch.randn(
            len(batch.tokens), V, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        ).log_softmax(-1)
        teacher = TeacherDistribution(logprobs=torch.cat([d.signal.logprobs for d in datums]))
        (values,) = compute_term_values(rows, teacher, batch, objective)
        columns.append(compute_coefficients(term, values.detach(), batch))
    assert columns[0].equal(columns[1])


def test_spans_of_several_teachers_are_joined_and_rows_share_none() -> None:
    def signal(*starts: bool) -> TeacherSignal:
        return TeacherSignal(logprobs=torch.zeros(len(starts)), span_starts=torch.tensor(starts))

    plain = TeacherSignal(logprobs=torch.zeros(4))
    pool = TeacherSignal(
        pool=PooledSignal(
            "geometric",
            (0.5, 0.5),
            (signal(True, False, True, True), signal(True, True, True, False)),
        )
    )
    mask = (True, True, False, True)
    data = [
        Datum(rollout((0, 1, 2, 0)), pool),
        Datum(rollout((0, 1, 2, 1)), plain, signal(False, False, True, True)),
        Datum(rollout((0, 1, 2, 2), mask), plain),
        Datum(rollout((1, 1, 2, 2)), TeacherSignal()),
    ]
    objective = sampled("reverse_kl", 0.0)
    assert objective.needs_first_pass(data)
    assert not objective.needs_first_pass(data[2:])
    spans = build_token_batch(data, objective).spans
    assert spans is not None
    assert spans.tolist() == [1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13]
    assert build_token_batch(data[2:], objective).spans is None


def test_sums_over_spans_are_those_of_a_loop() -> None:
    values = torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spans = torch.tensor([4, 4, 9, 2, 2, 2, 3])
    sums = torch.stack([values[spans == number].sum() for number in spans])
    torch.testing.assert_close(sum_spans(values, spans), sums)
    kept = keep_span_starts(values, spans)
    assert kept.ne(0).tolist() == [True, False, True, True, False, False, True]
    assert kept[kept != 0].equal(values[kept != 0])


@pytest.mark.parametrize("share", ["even", "surprise"])
def test_shares_are_as_published_and_no_gradient(share: str) -> None:
    pair = Pair(3)
    pair.cuts = [torch.zeros(V**n).bool() for n in range(LENGTH)] + [torch.ones(V**LENGTH).bool()]
    objective = sampled("reverse_kl", 0.0)
    term = objective.losses[0]
    shared = Objective(
        losses=(term.model_validate({"signal": f"sampled({share})"}),),
        aggregate="seq_mean_token_sum",
    )
    logits = [part.clone().requires_grad_() for part in pair.logits]
    total = torch.zeros((), dtype=torch.float64)
    for tokens in SEQUENCES:
        student = pair.student(logits, tokens)
        own = student.detach()
        ratio = pair.text(tokens) - own.sum()
        # DPCA: (l_T / l_S - 1) log S(y_i), which adds up to l_T - l_S.
        advantage = ratio / LENGTH if share == "even" else (pair.text(tokens) / own.sum() - 1) * own
        total = total - own.sum().exp() * (advantage * student).sum()
    published = list(torch.autograd.grad(total, logits))
    assert_equal(expected_gradient(pair, shared), published)
    exact = torch.cat([part.flatten() for part in expected_gradient(pair, objective)])
    wrong = torch.cat([part.flatten() for part in published])
    assert (wrong - exact).norm() > 0.1 * exact.norm()


def test_a_divergence_that_shares_cannot_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="share 'even' divides the log-ratio"):
        Objective.model_validate({"signal": "sampled(even)", "divergence": "jsd"})


@given(st.lists(st.integers(1, 4), max_size=8), st.integers(0, 2), st.integers(0, 10**6))
def test_later_values_are_added_to_the_first_of_their_group(sizes, gap, seed):
    values = torch.randn(
        sum(sizes) + gap * len(sizes), 3, generator=torch.Generator().manual_seed(seed)
    )
    lengths, expected, place = torch.zeros(len(values), dtype=torch.long), values.clone(), 0
    for size in sizes:
        lengths[place] = size
        expected[place] = values[place : place + size].sum(dim=0)
        place += size + gap
    torch.testing.assert_close(add_later(values, lengths), expected)
