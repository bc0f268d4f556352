"""Ask the scorers about a step's rollouts, let them learn, and hold them against the verifier."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from practicum.errors import TeacherError
from practicum.ports.scoring import Scorer, name_role
from practicum.statistics import auroc
from practicum.types import Judgement, Metrics, Rollout


def add_judgements(
    rollouts: Sequence[Rollout],
    scorers: Mapping[str, Scorer],
    cached: Mapping[str, Sequence[Judgement]],
) -> Sequence[Rollout]:
    """Return the rollouts with the judgement of each scorer; those in `cached` are not asked."""
    for name, scorer in scorers.items():
        column = cached[name] if name in cached else judge_with(name, scorer, rollouts)
        # One after the other, in the recipe's order: a critic may expect an earlier one's reward.
        rollouts = [
            replace(rollout, judgements={**rollout.judgements, name: judgement})
            for rollout, judgement in zip(rollouts, column, strict=True)
        ]
    return rollouts


def judge_with(name: str, scorer: Scorer, rollouts: Sequence[Rollout]) -> list[Judgement]:
    """Return a scorer's judgements; raises TeacherError if they cannot belong to the rollouts."""
    judgements = scorer.score(rollouts)
    # Scorers may be foreign code: what does not fit is an error here, not a wrong gradient later.
    if len(judgements) != len(rollouts):
        raise TeacherError(
            f"scorer {name!r} judged {len(judgements)} of {len(rollouts)} rollouts; every rollout "
            "needs a judgement, Judgement(None) where it cannot decide"
        )
    for rollout, judgement in zip(rollouts, judgements, strict=True):
        tokens, number = judgement.tokens, judgement.value
        where = f"scorer {name!r}, completion {rollout.sample} of prompt {rollout.prompt.id!r}"
        if tokens is not None and len(tokens) != len(rollout.tokens):
            raise TeacherError(
                f"{where}: numbers of {len(tokens)} tokens instead of {len(rollout.tokens)}; give "
                "one for each of the rollout's tokens"
            )
        is_finite = number is None or math.isfinite(number)
        if not is_finite or (tokens is not None and not torch.isfinite(tokens).all()):
            raise TeacherError(
                f"{where}: the judgement is not a finite number; give None where it cannot decide"
            )
    return judgements


def fit_scorers(scorers: Mapping[str, Scorer], rollouts: Sequence[Rollout]) -> Metrics:
    """Let the scorers learn from a step's rollouts; return what they and their judgements show."""
    metrics: Metrics = {}
    for name, scorer in scorers.items():
        numbers = measure_judgements(name, rollouts) | scorer.fit(rollouts)
        metrics |= {f"{name_role(name)}/{key}": number for key, number in numbers.items()}
    return metrics


def measure_judgements(name: str, rollouts: Sequence[Rollout]) -> Metrics:
    """Return a scorer's view of the student's answers beside the verifier's.

    `score` is the mean value and `undecided` the share without one. `gap` is the mean value minus
    the mean reward of the same answers: it grows while the student learns to please the scorer
    alone. `agreement` is the probability that the scorer ranks a right answer above a wrong one.
    """
    judged = [
        (rollout.judgements[name].value, rollout.reward)
        for rollout in rollouts
        if rollout.source == "student"
    ]
    scores = [score for score, _ in judged if score is not None]
    pairs = [
        (score, reward) for score, reward in judged if score is not None and reward is not None
    ]
    metrics = {"undecided": 1.0 - len(scores) / len(judged)} if judged else {}
    if scores:
        metrics["score"] = sum(scores) / len(scores)
    if pairs:
        metrics["gap"] = sum(score - reward for score, reward in pairs) / len(pairs)
        # A ranking, because the level of a discriminator's logit means nothing.
        area = auroc([score for score, _ in pairs], [reward >= 1.0 for _, reward in pairs])
        metrics |= {} if area is None else {"agreement": area.mean}
    return metrics
