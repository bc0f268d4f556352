"""A teacher that reads answers: its mean log-probability, its rejections, and teachers that cannot score."""

import math
from dataclasses import dataclass

import pytest
import torch
from toy import toy_recipe

from practicum.errors import CapabilityError
from practicum.methods.score.likelihood import Config, Likelihood
from practicum.ports import Teacher
from practicum.recipe import parse_recipe
from practicum.runs.assembly import assemble_run
from practicum.types import Prompt, Rollout, TeacherSignal, Turn


@dataclass(frozen=True, slots=True)
class Reader(Teacher):
    """Finds token 9 unlikely, and is silent about prompts without an answer."""

    def score(self, rollouts, signal):
        return [
            TeacherSignal(logprobs=torch.where(rollout.tokens == 9, 0.01, 0.5).log())
            if rollout.prompt.answer
            else TeacherSignal()
            for rollout in rollouts
        ]


def answer(*tokens: int, turns: tuple[Turn, ...] = (), known: bool = True) -> Rollout:
    """Return an answer with reward 1; in a conversation, only the student's turns have a loss."""
    own = [turn.role == "assistant" for turn in turns for _ in range(turn.tokens)]
    mask = torch.tensor(own or [True] * len(tokens))
    zeros = torch.zeros(len(tokens))
    prompt = Prompt("p", (), answer="a" if known else None)
    return Rollout(
        prompt, (), torch.tensor(tokens), mask, zeros, zeros, 0, "stop", "", 0, 1.0, turns=turns
    )  # fmt: skip


TALK = (Turn("assistant", 2, "a"), Turn("user", 1, "x"), Turn("assistant", 3, "b"))


def build(below: float | None) -> Likelihood:
    return Likelihood(Config(teacher={"type": "expert"}, below=below), Reader())


def test_a_value_is_the_mean_over_the_students_tokens() -> None:
    found = build(None).score([answer(1, 9), answer(1, 1, 9, 1, 1, 1, turns=TALK)])
    assert found[0].value == pytest.approx((math.log(0.5) + math.log(0.01)) / 2)
    assert found[1].value == pytest.approx(math.log(0.5)), "the world's own token does not count"


def test_it_rejects_from_a_token_or_from_its_turn() -> None:
    rollouts = [
        answer(1, 2, 9, 9),
        answer(1, 2),
        answer(1, 1, 9, 1, 1, 9, turns=TALK),
        answer(1, 9, 1, 1, 1, 9, turns=TALK),
        answer(9, known=False),
    ]
    scorer = build(0.05)
    assert scorer.count_accepted(rollouts) == [2, None, 3, 0, None]
    assert [judgement.value for judgement in scorer.score(rollouts)] == [
        None,
        1.0,
        None,
        None,
        None,
    ]
    assert scorer.score([]) == []


def test_a_teacher_without_log_probabilities_is_refused(models, tmp_path) -> None:
    recipe = toy_recipe(
        models, {"scorers": {"reader": {"type": "likelihood", "teacher": {"type": "none"}}}}
    )
    with pytest.raises(CapabilityError, match=r"scorers.reader.teacher: 'none' gives no log-prob"):
        assemble_run(recipe, tmp_path)


def test_a_guide_has_to_reject() -> None:
    data = {
        "student": {"model": {"hidden_size": 16, "layers": 1, "heads": 2}},
        "teacher": {"type": "expert"},
        "task": {"type": "walker"},
        "scorers": {"reader": {"type": "likelihood", "teacher": {"type": "expert"}}},
        "rollout": {"source": "correct(scorer=reader)"},
        "objective": {"signal": "text", "divergence": "ce"},
        "train": {"steps": 1},
    }
    with pytest.raises(Exception, match="scorer 'reader' rejects no answers"):
        parse_recipe(data, "reader")
    data["scorers"]["reader"]["below"] = 0.05
    assert parse_recipe(data, "reader")
