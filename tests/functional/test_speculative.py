"""Speculative sampling by enumeration: for any draft model, the written text follows the target's distribution."""

import itertools
import math

import pytest
import torch

from practicum.functional import tvd
from practicum.functional.speculative import (
    acceptance,
    count_rejected,
    expected_acceptance,
    residual,
    speculative_logprobs,
    verify,
)

VOCABULARY = 3


def distributions(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(
        2 * torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1
    )


def with_impossible(logprobs, token):
    """Return the same distributions with one token that is never drawn."""
    return torch.log_softmax(logprobs.index_fill(-1, torch.tensor([token]), -math.inf), dim=-1)


def pairs():
    draft, target = distributions(0, 20, 5), distributions(1, 20, 5)
    yield "both anything", draft, target
    yield "a token that the target never writes", draft, with_impossible(target, 0)
    yield "a token that is never drafted", with_impossible(draft, 0), target
    yield "a certain target", draft, torch.log_softmax(target * 1e4, dim=-1)
    yield (
        "nothing in common",
        torch.tensor([[0.0, -math.inf]]).double(),
        torch.tensor([[-math.inf, 0.0]]).double(),
    )
    yield "the same", draft, draft


PAIRS = [pytest.param(draft, target, id=name) for name, draft, target in pairs()]


def test_numbers_by_hand():
    draft, target = torch.tensor([0.5, 0.5, 0.0]).log(), torch.tensor([0.25, 0.5, 0.25]).log()
    assert acceptance(draft, target)[:2].tolist() == pytest.approx([0.5, 1.0])
    assert residual(draft, target).exp().tolist() == pytest.approx([0.0, 0.0, 1.0])
    assert expected_acceptance(draft, target).item() == pytest.approx(0.75)


@pytest.mark.parametrize(("draft", "target"), PAIRS)
def test_a_token_is_the_targets(draft, target):
    kept = draft.exp() * acceptance(draft, target)
    written = kept + (1.0 - kept.sum(dim=-1, keepdim=True)) * residual(draft, target).exp()
    assert written.allclose(target.exp(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.1])
@pytest.mark.parametrize(("draft", "target"), PAIRS)
def test_lenience_accepts_more_and_bounds_each_probability(draft, target, lenience):
    law = speculative_logprobs(draft, target, lenience).exp()
    assert law.sum(dim=-1).allclose(torch.ones(()).double(), rtol=0, atol=1e-12)
    assert (law <= target.exp() / lenience + 1e-12).all()
    kept, strict = (
        (draft.exp() * acceptance(draft, target, value)).sum(dim=-1) for value in (lenience, 1.0)
    )
    expected = torch.minimum(draft.exp(), target.exp() / lenience).sum(dim=-1)
    assert kept.allclose(expected, rtol=0, atol=1e-12) and (kept >= strict - 1e-12).all()
    # In total variation the law is between the target's and the draft's.
    assert (tvd(law.log(), target) <= tvd(draft, target) + 1e-12).all()


@pytest.mark.parametrize(("draft", "target"), PAIRS)
def test_the_share_that_is_kept_is_one_less_the_total_variation(draft, target):
    kept = (draft.exp() * acceptance(draft, target)).sum(dim=-1)
    assert kept.allclose(expected_acceptance(draft, target), rtol=0, atol=1e-12)
    assert kept.allclose(1.0 - tvd(draft, target), rtol=0, atol=1e-12)
    assert kept.allclose(torch.minimum(draft.exp(), target.exp()).sum(dim=-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(("draft", "target"), PAIRS)
def test_one_of_k_drafts_is_accepted_as_often_as_by_enumeration(draft, target, k):
    """Every outcome of k drafts, each by its probability; the share of the random numbers with fewer than k rejected ones."""
    chances = acceptance(draft, target).tolist()
    for place, probabilities in enumerate(draft.exp().tolist()):
        share = sum(
            math.prod(probabilities[v] for v in outcome)
            * (1 - math.prod(1 - chances[place][v] for v in outcome))
            for outcome in itertools.product(range(len(probabilities)), repeat=k)
        )
        if k == 1:
            assert share == pytest.approx(float(torch.minimum(draft, target)[place].exp().sum()))
        edges = torch.tensor([share - 1e-9, share + 1e-9], dtype=torch.float64)
        uniforms = edges[(edges >= 0) & (edges < 1)]
        rows = [place] * len(uniforms)
        counts = count_rejected(draft[rows], target[rows], uniforms)
        assert (counts < k).equal(uniforms < share)


def test_a_drafter_that_is_the_target_is_never_rejected():
    same = distributions(2, 4, 5)
    kept, after = verify(
        same[:3], same, torch.tensor([0, 4, 2]), torch.full((3,), 1.0 - 1e-9, dtype=torch.float64)
    )
    assert kept == 3
    assert after.equal(same[3]), "the token after all of them is the target's next"


class Table:
    """A language model as a table: a distribution for every beginning of at most `depth` tokens."""

    def __init__(self, seed, depth):
        beginnings = [
            text
            for n in range(depth + 1)
            for text in itertools.product(range(VOCABULARY), repeat=n)
        ]
        self.logprobs = dict(
            zip(beginnings, distributions(seed, len(beginnings), VOCABULARY), strict=True)
        )

    def before_each(self, text, extra=0):
        """Return the distribution before each token of a text, and after the last with `extra` 1."""
        return torch.stack([self.logprobs[text[:place]] for place in range(len(text) + extra)])

    def probability(self, text):
        return math.exp(
            sum(self.logprobs[text[:place]][token].item() for place, token in enumerate(text))
        )


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_what_a_round_writes_is_distributed_as_the_targets_text(gamma):
    draft, target = Table(3, gamma + 1), Table(4, gamma + 1)
    written = dict.fromkeys(itertools.product(range(VOCABULARY), repeat=gamma + 1), 0.0)
    for drafted in itertools.product(range(VOCABULARY), repeat=gamma):
        mine, theirs = draft.before_each(drafted), target.before_each(drafted, extra=1)
        chances = [
            acceptance(mine[place, token], theirs[place, token]).item()
            for place, token in enumerate(drafted)
        ]
        for keeps in itertools.product([True, False], repeat=gamma):
            chance = math.prod(c if keep else 1 - c for c, keep in zip(chances, keeps, strict=True))
            if chance <= 0:
                continue
            uniforms = torch.tensor(
                [c / 2 if keep else (1 + c) / 2 for c, keep in zip(chances, keeps, strict=True)]
            )
            kept, after = verify(mine, theirs, torch.tensor(drafted), uniforms.double())
            assert kept == [*keeps, False].index(False)
            for token in range(VOCABULARY):
                begun = (*drafted[:kept], token)
                here = draft.probability(drafted) * chance * after[token].exp().item()
                for text in written:  # the target continues by itself
                    if text[: len(begun)] == begun:
                        written[text] += here * target.probability(text) / target.probability(begun)
    for text, probability in written.items():
        assert probability == pytest.approx(target.probability(text), abs=1e-12)
