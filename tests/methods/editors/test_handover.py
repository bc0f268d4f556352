"""Texts that change hands: the ends, hysteresis, the moving threshold, and the relay's budget."""

import random
from itertools import pairwise

import pytest
import torch

from practicum.errors import RecipeError
from practicum.functional import forward_kl
from practicum.methods.editors.adaswitch import AdaptiveRule
from practicum.methods.editors.handover import GapRule
from practicum.methods.editors.relay import Config as Relay
from practicum.methods.editors.relay import RelayRule
from practicum.recipe import load_recipe

from .laws import SETTINGS, assert_same_text

ENDS = {
    "handover(1e9, 0)": "student",
    "handover(-1, -1)": "teacher",
    "adaswitch(1e9)": "student",
    "adaswitch(0)": "teacher",
    "relay(takeovers=0)": "student",
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("params", SETTINGS, ids=str)
@pytest.mark.parametrize("source", ENDS)
def test_at_its_ends_one_model_writes_alone(write, source, params):
    assert_same_text(write(source, **params), write(ENDS[source], **params))


def test_words_that_are_no_token_are_refused(write):
    with pytest.raises(RecipeError, match="none of the words Wait\\+But is one token"):
        write("relay(words=Wait+But)")


def test_each_token_is_by_the_writer_of_its_gap(write, both):
    changes = 0
    for rollout in write("handover(0.5, 0.2)") + write("handover(0.5, 0.2)", seed=1):
        student, teacher = both(rollout)
        gaps = forward_kl(student, teacher).tolist()
        teaches = False
        for place, gap in enumerate(gaps):
            if min(abs(gap - 0.5), abs(gap - 0.2)) < 1e-3:
                break  # rounding decides
            before, teaches = teaches, gap > 0.5 or (teaches and gap >= 0.2)
            changes += before != teaches
            assert bool(rollout.mark_tokens_by("teacher")[place]) == teaches
            writer = teacher if teaches else student
            expected = float(writer[place, rollout.tokens[place]])
            assert rollout.sampling_logprobs[place].item() == pytest.approx(expected, abs=1e-3)
    assert changes > 2


@pytest.mark.parametrize("seed", range(5))
def test_hysteresis_changes_the_writer_less_often_than_one_threshold(seed):
    draw = random.Random(seed)
    gaps = [draw.uniform(0, 2) for _ in range(200)]

    def count_changes(above, below):
        rule, writers = GapRule(above, below), []
        for gap in gaps:
            rule.decide(0, gap)
            writers.append(0 in rule.teaching)
        return sum(one != other for one, other in pairwise(writers))

    assert 0 < count_changes(1.5, 0.5) < count_changes(1.0, 1.0)


@pytest.mark.parametrize("seed", range(5))
def test_the_moving_threshold_hands_over_once(seed):
    draw, rule = random.Random(seed), AdaptiveRule(2.0, 3)
    gaps = [draw.expovariate(1.0) for _ in range(30)]
    means = [sum(gaps[max(n - 3, 0) : n]) / min(n, 3) for n in range(1, 30)]
    first = next(n for n, mean in enumerate(means, 1) if gaps[n] > 2 * mean)
    for number, gap in enumerate(gaps):
        rule.decide(7, gap)
        assert (7 in rule.teaching) == (number >= first)


def test_thresholds_in_the_wrong_order_are_refused():
    with pytest.raises(RecipeError, match="below may not exceed above"):
        load_recipe("papers/adaswitch", ["rollout.source=handover(1, 2)"])


class Fixed:
    """A reading with given most likely tokens and proposals."""

    def __init__(self, best, proposal):
        self.logits = torch.zeros(1, 9)
        for rank, token in enumerate(best):
            self.logits[0, token] = 9.0 - rank
        self.proposal = torch.tensor([proposal]), torch.tensor([-1.0])


def relay(rule, best, student_best, draft, teacher_token=8):
    joint = rule.write([0], Fixed(student_best, draft), Fixed(best, teacher_token))
    return int(joint.tokens), bool(joint.by_teacher), bool(joint.ended), float(joint.logprobs)


def test_a_relay_begins_at_a_reflection_and_ends_after_its_paragraphs():
    """Follow Relay-OPD's released sampler token by token: reflection 1, boundary 5."""
    settings = Relay(top=2, takeovers=2, paragraphs=2, most=4)
    rule = RelayRule(settings, reflections={1}, boundaries={5})
    assert relay(rule, [1], [1, 0], 3) == (3, False, False, -1.0)  # the student considers it
    assert relay(rule, [2], [0, 3], 3) == (3, False, False, -1.0)  # no reflection
    assert relay(rule, [1], [0, 3], 1) == (1, False, False, 0.0)  # the student wrote it itself
    assert relay(rule, [1], [0, 3], 3) == (1, True, False, 0.0)  # the trigger
    assert relay(rule, [1], [0, 3], 3, 5) == (5, True, False, -1.0)  # the first paragraph ends
    assert relay(rule, [0], [0, 3], 3, 5) == (5, True, False, -1.0)  # the second: handed back
    assert relay(rule, [0], [0, 3], 3, 5) == (3, False, False, -1.0)
    assert relay(rule, [1], [0, 3], 3) == (1, True, False, 0.0)
    writers = [relay(rule, [0], [0, 3], 3) for _ in range(4)]
    assert writers == [(8, True, n == 3, -1.0) for n in range(4)]  # the limit ends the last leg


def test_an_answer_ends_after_its_last_takeover(write, built):
    letters = "+".join("abcdefgh")
    rollouts = write(f"relay(top=1, takeovers=1, most=1, words={letters})", temperature=1.5)
    authors = [rollout.mark_tokens_by("teacher").tolist() for rollout in rollouts]
    taken = [(row, mask) for row, mask in zip(rollouts, authors, strict=True) if sum(mask) > 1]
    assert taken
    for rollout, mask in taken:
        assert mask == [False] * (len(mask) - 2) + [True, True]
        if int(rollout.tokens[-1]) not in built.parts.renderer.stop_ids:
            assert rollout.stop_reason == "length"
