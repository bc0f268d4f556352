"""Interleaved answers: their ends, who wrote what, and the probability of every token."""

from pathlib import Path

import pytest
import torch
from toy import toy_data

from practicum.errors import CapabilityError
from practicum.methods.editors.interleave import Config, InterleaveRule
from practicum.recipe import parse_recipe

from .laws import SETTINGS, assert_same_text


@pytest.mark.cpu_only
@pytest.mark.parametrize("params", SETTINGS, ids=str)
@pytest.mark.parametrize(("top", "writer"), [(0, "teacher"), (10_000, "student")])
def test_at_its_ends_one_model_writes_alone(write, top, writer, params):
    assert_same_text(write(f"interleave({top})", **params), write(writer, **params))


def test_every_token_has_its_author_and_its_probability(write, both):
    authors = set()
    for rollout in write("interleave(1)") + write("interleave(2)", seed=4):
        student, _ = both(rollout)
        assert rollout.loss_mask.all()
        own = student.gather(1, rollout.tokens[:, None])[:, 0]
        torch.testing.assert_close(rollout.policy_logprobs.double(), own, atol=1e-4, rtol=1e-4)
        authors |= set(rollout.mark_tokens_by("teacher").tolist())
    assert authors == {True, False}


@pytest.mark.parametrize("top", [1, 2])
def test_a_token_comes_from_an_accepted_or_after_a_rejected_draft(write, both, top):
    for rollout in write(f"interleave({top})", temperature=1.0):
        student, teacher = (side.exp() for side in both(rollout))
        for place, token in enumerate(rollout.tokens.tolist()):
            accepted = teacher[place].topk(top).indices.tolist()
            rejected = 1 - sum(float(student[place, v]) for v in accepted)
            expected = rejected * float(teacher[place, token])
            expected += float(student[place, token]) if token in accepted else 0.0
            assert rollout.sampling_logprobs[place].exp() == pytest.approx(expected, abs=2e-4)
            by_teacher = bool(rollout.mark_tokens_by("teacher")[place])
            assert by_teacher or token in accepted


class Table:
    """A reading of given distributions, with a given proposal."""

    def __init__(self, logprobs, token):
        self.logits = self.logprobs = logprobs
        count = len(logprobs)
        self.proposal = torch.full((count,), token), logprobs[:, token]


@pytest.mark.parametrize("top", [0, 1, 2, 3, 9])
def test_the_recorded_probabilities_sum_to_one(top):
    """Enumerate both proposals: each token has the recorded probability, for any pair of models."""
    generator = torch.Generator().manual_seed(top)
    student, teacher = (
        torch.randn(1, 5, generator=generator, dtype=torch.float64).log_softmax(-1)
        for _ in range(2)
    )
    law, recorded = torch.zeros(5).double(), torch.zeros(5).double()
    for draft in range(5):
        for replacement in range(5):
            joint = InterleaveRule(top).write(
                [0], Table(student, draft), Table(teacher, replacement)
            )
            token = int(joint.tokens)
            law[token] += (student[0, draft] + teacher[0, replacement]).exp()
            recorded[token] = joint.logprobs.exp()
    torch.testing.assert_close(law, recorded)
    assert law.sum().item() == pytest.approx(1.0)


def test_another_tokenizer_is_refused_in_one_line():
    teacher = {"type": "translated", "teacher": {"type": "model", "model": "models/teacher"}}
    data = toy_data(Path("models"), {"rollout.source": "interleave", "teacher": teacher})
    with pytest.raises(
        CapabilityError, match=r"interleave.*has another tokenizer; set source"
    ) as error:
        parse_recipe(data, "recipe.yaml")
    assert len(str(error.value).splitlines()) == 1


def test_the_share_of_the_teacher_is_measured(write):
    rollouts = write("interleave(1)")
    share = Config.measure(rollouts)["teacher_tokens"]
    tokens = sum(len(rollout.tokens) for rollout in rollouts)
    count = sum(int(rollout.mark_tokens_by("teacher").sum()) for rollout in rollouts)
    assert 0 < share == count / tokens < 1
