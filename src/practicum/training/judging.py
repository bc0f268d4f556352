"""Ask the scorers about a step's rollouts, train them, and compare them with the verifier."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from practicum.errors import TeacherError
from practicum.ports.gate import (
    accept_judgement,
    accept_metrics,
    call_foreign,
    collect_rejections,
    list_kinds,
    report_rejections,
)
from practicum.ports.scoring import Scorer, name_role
from practicum.statistics import auroc
from practicum.types import Judgement, Metrics, Rollout


def add_judgements(
    rollouts: Sequence[Rollout],
    scorers: Mapping[str, Scorer],
    cached: Mapping[str, Sequence[Judgement]],
) -> Sequence[Rollout]:
    """Return the rollouts with the judgement of each scorer; scorers in `cached` are not asked."""
    for name, scorer in scorers.items():
        column = cached[name] if name in cached else judge_with(name, scorer, rollouts)
        # Ask sequentially in the recipe's order: a critic may predict an earlier scorer's reward.
        rollouts = [
            replace(rollout, judgements={**rollout.judgements, name: judgement})
            for rollout, judgement in zip(rollouts, column, strict=True)
        ]
    return rollouts


def judge_with(name: str, scorer: Scorer, rollouts: Sequence[Rollout]) -> list[Judgement]:
    """Return a scorer's judgements, undecided if a value is not a finite number.

    Raises TeacherError if the judgements do not fit the rollouts.
    """
    with report_rejections():
        scores = _ask(name, scorer, rollouts)
        judgements = []
        for rollout, score in zip(rollouts, scores, strict=True):
            where = f"scorer {name!r}, completion {rollout.sample} of prompt {rollout.prompt.id!r}"
            judgement = accept_judgement(score, where)
            tokens = judgement.tokens
            if tokens is not None and len(tokens) != len(rollout.tokens):
                raise TeacherError(
                    f"{where}: numbers of {len(tokens)} tokens instead of {len(rollout.tokens)}; "
                    "give one for each of the rollout's tokens"
                )
            judgements.append(judgement)
    return judgements


def _ask(name: str, scorer: Scorer, rollouts: Sequence[Rollout]) -> Sequence[Any]:
    """Return a scorer's judgements; if it fails, ask about each rollout separately."""
    with collect_rejections() as rejections:
        scores = call_foreign(f"scorer {name!r}", partial(scorer.score, rollouts))
    if scores is None and rejections:
        # One odd rollout must not leave all rollouts without a judgement.
        if len(rollouts) > 1:
            return [score for rollout in rollouts for score in _ask(name, scorer, [rollout])]
        return [Judgement(None, rejected=list_kinds(rejections)) for _ in rollouts]
    if not isinstance(scores, Sequence) or len(scores) != len(rollouts):
        count = len(scores) if isinstance(scores, Sequence) else f"a {type(scores).__name__}"
        raise TeacherError(
            f"scorer {name!r} judged {count} of {len(rollouts)} rollouts; every rollout needs a "
            "judgement, Judgement(None) where it cannot decide"
        )
    return scores


def fit_scorers(scorers: Mapping[str, Scorer], rollouts: Sequence[Rollout]) -> Metrics:
    """Train the scorers on a step's rollouts; return metrics of the scorers and their judgements."""
    metrics: Metrics = {}
    for name, scorer in scorers.items():
        fitted = call_foreign(f"fit() of scorer {name!r}", partial(scorer.fit, rollouts))
        numbers = measure_judgements(name, rollouts) | accept_metrics(
            fitted, f"fit() of scorer {name!r}"
        )
        metrics |= {f"{name_role(name)}/{key}": number for key, number in numbers.items()}
    return metrics


def measure_judgements(name: str, rollouts: Sequence[Rollout]) -> Metrics:
    """Compare a scorer's judgements of the student's answers with the verifier's rewards.

    `score` is the mean value, and `undecided` the share of answers without a value. `gap` is the
    mean value minus the mean reward of the same answers: it grows if the student learns to please
    only the scorer. `agreement` is the probability that the scorer ranks a correct answer above an
    incorrect answer.
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
        # Use a ranking, because the level of a discriminator's logit is arbitrary.
        area = auroc([score for score, _ in pairs], [reward >= 1.0 for _, reward in pairs])
        metrics |= {} if area is None else {"agreement": area.mean}
    return metrics
