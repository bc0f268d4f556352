"""The doctor's report on a judge: calibration, and influences on its grades other than the answers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from toy import toy_recipe

from practicum.ports.scoring import Scorer, ScorerSettings
from practicum.runs.assembly import assemble_run
from practicum.runs.check_outcome import CheckOutcome
from practicum.studies.doctor import grades
from practicum.studies.doctor.evidence import Evidence
from practicum.studies.doctor.grades import check_scorers, compare_lengths
from practicum.types import Judgement, Message, Prompt, Rollout

Grading = Callable[[Rollout], float | None]


@dataclass
class Judge(Scorer):
    """It grades by a function, and differently if its question is rephrased."""

    grade: Grading
    variants: Mapping[str, Grading] = field(default_factory=dict)

    def score(self, rollouts: Sequence[Rollout]) -> list[Judgement]:
        return [Judgement(self.grade(rollout)) for rollout in rollouts]

    def build_variants(self) -> Mapping[str, Scorer]:
        return {
            name: Judge(grade) for name, grade in {"nothing": self.grade, **self.variants}.items()
        }


def write(number: int, reward: float | None, length: int) -> Rollout:
    zeros = torch.zeros(length)
    return Rollout(
        prompt=Prompt(f"p{number // 4}", (Message("user", "ab"),)),
        prompt_tokens=(1,),
        tokens=zeros.long(),
        loss_mask=zeros == 0,
        sampling_logprobs=zeros,
        policy_logprobs=zeros,
        policy_version=0,
        stop_reason="stop",
        text=f"{number}",
        sample=number % 4,
        reward=reward,
        source="student",
    )


ROLLOUTS = [write(number, float(number % 3 == 0), 1 + number % 5) for number in range(60)]


def check(judge: Scorer | None, rollouts: Sequence[Rollout] = ROLLOUTS) -> CheckOutcome:
    parts = SimpleNamespace(scorers={} if judge is None else {"grade": judge})
    evidence = SimpleNamespace(
        rollouts=list(rollouts),
        components=SimpleNamespace(parts=parts),
        recipe=SimpleNamespace(scorers={"grade": ScorerSettings()}),
        seed=0,
    )
    return check_scorers(cast(Evidence, evidence))


def agree(rollout: Rollout) -> float:
    return 0.25 + 0.5 * (rollout.reward or 0.0)


def prefer_length(rollout: Rollout) -> float:
    return len(rollout.tokens) / 10


def test_without_a_judge_there_is_nothing_to_check() -> None:
    assert check(None).status == "not applicable"


def test_a_judge_that_agrees_passes_with_its_area_and_gap() -> None:
    outcome = check(Judge(agree, {"position": agree, "suggestion": agree}))
    assert outcome.status == "pass" and outcome.value is not None and outcome.value.mean == 1.0
    share = sum(rollout.reward or 0.0 for rollout in ROLLOUTS) / len(ROLLOUTS)
    gap = outcome.details["mean grade minus mean reward"]
    assert gap == pytest.approx(0.25 + 0.5 * share - share)
    assert outcome.details["moved by position"] == outcome.details["moved by suggestion"] == 0.0
    assert outcome.details["kinder to longer answers"] == 0.0


def test_one_that_prefers_wrong_answers_fails() -> None:
    outcome = check(Judge(lambda rollout: 1.0 - agree(rollout)))
    assert outcome.status == "fail" and "prefers wrong answers" in outcome.sentence


def test_one_at_chance_is_inconclusive_and_says_how_many_it_takes() -> None:
    outcome = check(Judge(lambda _: 0.5))
    assert outcome.status == "inconclusive" and outcome.rollouts_needed == 240


def test_one_that_obeys_the_answer_is_named() -> None:
    outcome = check(Judge(agree, {"position": agree, "suggestion": lambda _: 1.0}))
    assert outcome.status == "warn" and "moved by suggestion" in outcome.sentence
    assert "position" not in outcome.sentence


def test_one_that_likes_length_is_named_among_answers_of_one_reward() -> None:
    outcome = check(Judge(lambda rollout: agree(rollout) + prefer_length(rollout)))
    assert "kinder to longer answers" in outcome.sentence
    assert outcome.details["kinder to longer answers"] == pytest.approx(0.5)


def test_answers_without_a_grade_are_counted() -> None:
    some = check(Judge(lambda rollout: None if rollout.sample == 0 else agree(rollout)))
    assert some.details["without a grade"] == 0.25 and "25% of the answers got no" in some.sentence
    none = check(Judge(lambda _: None))
    assert none.status == "fail" and "graded no answer of 60" in none.sentence


def test_without_a_verifier_there_is_nothing_to_hold_it_against() -> None:
    bare = [replace(rollout, reward=None) for rollout in ROLLOUTS]
    outcome = check(Judge(agree), bare)
    assert outcome.status == "inconclusive" and "compared with a verifier" in outcome.sentence


def test_lengths_are_compared_within_one_reward_alone() -> None:
    # Right answers are longer and graded higher: this is no bias towards length.
    rows = [write(n, 1.0, 5 + n % 2) for n in range(8)] + [
        write(n, 0.0, 1 + n % 2) for n in range(8)
    ]
    assert compare_lengths([(row.reward or 0.0, row) for row in rows]) == 0.5
    assert compare_lengths([(1.0, write(0, 1.0, 3))]) is None


@dataclass
class Learner(Scorer):
    """It gives no grades until its warm-up is over, then whether an answer is right if it learned that."""

    learns: bool
    warmup: int = 9
    fits: int = 0

    def score(self, rollouts: Sequence[Rollout]) -> list[Judgement]:
        if self.fits < self.warmup:
            return [Judgement(None) for _ in rollouts]
        return [Judgement(agree(rollout) if self.learns else 0.5) for rollout in rollouts]

    def fit(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        assert all(rollout.text == "own" for rollout in rollouts)
        self.fits += 1
        return {}


def test_a_scorer_that_learns_is_held_against_answers_that_it_did_not_learn_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = {1: [replace(rollout, text="own") for rollout in ROLLOUTS[:8]], 2: ROLLOUTS}
    monkeypatch.setattr(grades, "_write_step", lambda _, step: steps[step])
    outcome = check(Learner(learns=True))
    assert outcome.status == "pass" and outcome.value is not None and outcome.value.mean == 1.0
    # Its own step contributes the first two prompts.
    assert outcome.details == {"answers judged": 52.0, "before it learned": None}
    learner = Learner(learns=False)
    assert check(learner).status == "inconclusive" and learner.fits == 9
    silent = check(Learner(learns=True, warmup=1000))
    assert silent.status == "inconclusive" and silent.details["answers judged"] == 0.0


def test_scorers_of_a_recipe_learn_from_what_it_writes(models: Path, tmp_path: Path) -> None:
    """Trees for the process model, the teacher's answers for the discriminator, two shares for the outcome model."""
    changes = {
        "rollout": {"n": 4, "max_new_tokens": 5, "source": "search(step=word, breadth=2)"},
        "scorers": {"steps": {"type": "process"}, "orm": {"type": "outcome", "share": 0.5}},
        "train.prompts_per_step": 4,
    }
    recipe = toy_recipe(models, changes)
    with closing(assemble_run(recipe, tmp_path)) as components:
        evidence = SimpleNamespace(recipe=recipe, components=components, rollouts=[], seed=0)
        weights = {name: value.clone() for name, value in components.weights.items()}
        outcome = check_scorers(cast(Evidence, evidence))
        assert all(torch.equal(components.weights[name], old) for name, old in weights.items())
    assert "steps" in outcome.sentence and "orm" in outcome.sentence
    assert outcome.unit == "of the pairs ranked rightly"
