"""Signals of two models about the same tokens, compared: read in pieces, in the format sent, or not at all."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from practicum.functional.comparison import MEASURES, compare
from practicum.functional.head import Head
from practicum.losses import compare_signals
from practicum.types import PooledSignal, TeacherSignal

TOKENS, WIDTH, VOCABULARY = 7, 5, 11


def whole(seed):
    """Return a signal of hidden states with their head."""
    states = torch.Generator().manual_seed(seed)
    head = Head(torch.randn(VOCABULARY, WIDTH, generator=states, dtype=torch.float64), VOCABULARY)
    return TeacherSignal(
        hidden=torch.randn(TOKENS, WIDTH, generator=states, dtype=torch.float64), head=head
    )


@pytest.mark.parametrize("size", [1, 3, TOKENS, 100])
def test_it_compares_what_the_heads_read_whatever_the_pieces(size):
    student, teacher = whole(1), whole(2)
    tokens = torch.arange(TOKENS)
    distributions = [signal.head.logprobs(signal.hidden) for signal in (student, teacher)]
    expected = compare([(*distributions, tokens)], MEASURES, 3).known()
    found = compare_signals((student, teacher), tokens, size, MEASURES, 3).known()
    assert set(found) == set(MEASURES)
    for name, values in found.items():
        torch.testing.assert_close(values, expected[name], rtol=1e-12, atol=1e-12, msg=name)


def test_without_a_distribution_there_are_the_log_probabilities_that_were_sent():
    sent = TeacherSignal(logprobs=-torch.rand(TOKENS))
    measures = (
        "student_logprobs",
        "teacher_logprobs",
        "reverse_kl",
        "student_entropy",
        "teacher_entropy",
    )
    found = compare_signals((whole(1), sent), torch.arange(TOKENS), 3, measures).known()
    assert set(found) == {"student_logprobs", "student_entropy", "teacher_logprobs"}
    assert torch.equal(found["teacher_logprobs"], sent.logprobs)


@dataclass
class Elsewhere:
    """Hidden states in another process; see `practicum.types.StatesLike`."""

    tensor: Tensor
    fetched: int = 0
    finite: bool = True

    def __len__(self):
        return len(self.tensor)

    def fetch(self):
        self.fetched += 1
        return self.tensor


def test_hidden_states_of_another_process_are_fetched_once_whatever_the_pieces():
    here = [whole(seed) for seed in (1, 2, 3)]
    there = [replace(signal, hidden=Elsewhere(signal.hidden)) for signal in here]
    expected, found = (
        compare_signals((own, pooled(members)), torch.arange(TOKENS), 2, MEASURES, 3).known()
        for own, *members in (here, there)
    )
    assert all(found[name].equal(values) for name, values in expected.items())
    assert [signal.hidden.fetched for signal in there] == [1, 1, 1]


def pooled(members):
    return TeacherSignal(pool=PooledSignal("geometric", (0.5, 0.5), tuple(members)))


def test_of_silence_and_of_no_tokens_there_is_nothing():
    is_empty = compare_signals(
        (TeacherSignal(), TeacherSignal()), torch.arange(TOKENS), 3, MEASURES
    )
    assert is_empty.known() == {}
    none = compare_signals((whole(1)[:0], whole(2)[:0]), torch.arange(0), 3, MEASURES)
    assert set(none.known()) == set(MEASURES) and all(
        len(values) == 0 for values in none.known().values()
    )
