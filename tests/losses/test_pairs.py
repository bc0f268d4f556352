"""Pairs of an objective: the paired answers, the metrics, and refused settings."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from practicum import functional as F
from practicum.errors import RecipeError
from practicum.losses import build_token_batch, compute_coefficients, compute_term_values
from practicum.losses.pairs import compile_pairs
from practicum.objective import Objective, TeacherDistribution
from practicum.recipe import parse_recipe
from practicum.types import Datum, TeacherSignal

from .test_sides import VOCABULARY, rollout

ROWS = [
    ("a", "dataset", None, 3),
    ("a", "student", 0.0, 2),
    ("a", "reference", 0.5, 4),
    ("b", "teacher", 1.0, 2),
    ("b", "dataset", 1.0, 1),
    ("c", "student", 0.2, 3),
    ("c", "student", 0.7, 1),
    ("c", "student", 0.2, 5),
]
"""Prompt, writer, reward and length: a complete group, one without a rejected and one without a chosen answer."""

STARTS = [sum(length for *_, length in ROWS[:row]) for row in range(len(ROWS) + 1)]


def data() -> list[Datum]:
    return [
        Datum(
            replace(rollout(group, [True] * length, reward, seed), source=source),  # type: ignore[arg-type]
            TeacherSignal(),
        )
        for seed, (group, source, reward, length) in enumerate(ROWS)
    ]


def logits(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(STARTS[-1], VOCABULARY, generator=generator, dtype=torch.float64)


def computed(settings: dict[str, Any]) -> tuple[Any, Any, Any, Tensor]:
    objective = Objective.model_validate(settings)
    batch = build_token_batch(data(), objective)
    leaf = logits(1).requires_grad_()
    teacher, reference = (
        TeacherDistribution(full=torch.log_softmax(logits(seed), -1)) for seed in (2, 3)
    )
    (values,) = compute_term_values(
        torch.log_softmax(leaf, -1), teacher, batch, objective, reference
    )
    share = compute_coefficients(objective.losses[0], values.detach(), batch)
    return (
        objective.losses[0],
        values.detach(),
        batch,
        torch.autograd.grad((share * values.loss_value).sum(), leaf)[0],
    )


PAIRED = {
    "source": {(0, 1), (0, 2)},
    "reward": {(2, 1), (6, 5), (6, 7)},
    "low_reward": {(1, 2), (5, 6), (7, 6)},
}


@pytest.mark.parametrize("choose", PAIRED)
def test_every_chosen_answer_is_paired_with_every_rejected_one(choose: str) -> None:
    term, values, batch, gradient = computed({"signal": f"pair(orpo, choose={choose})"})
    pairs = compile_pairs(term).find_pairs(values, batch)
    assert set(map(tuple, pairs.rows.tolist())) == PAIRED[choose]
    paired = {row for pair in PAIRED[choose] for row in pair}
    assert pairs.unpaired.tolist() == [row not in paired for row in range(len(ROWS))]
    touched = {row for row in range(len(ROWS)) if gradient[STARTS[row] : STARTS[row + 1]].any()}
    assert touched == paired


@pytest.mark.parametrize("against", ["teacher", "reference"])
def test_a_score_chooses_by_the_mean_log_probability(against: str) -> None:
    term, values, batch, _ = computed({"signal": "pair(simpo, choose=score)", "against": against})
    scores = torch.log_softmax(logits(2 if against == "teacher" else 3), -1)
    means = [
        float(F.gather_logprobs(scores, batch.tokens)[STARTS[row] : STARTS[row + 1]].mean())
        for row in range(len(ROWS))
    ]
    expected = {
        (one, other)
        for one, (group, *_) in enumerate(ROWS)
        for other, (second, *_) in enumerate(ROWS)
        if group == second and means[one] > means[other]
    }
    found = set(map(tuple, compile_pairs(term).find_pairs(values, batch).rows.tolist()))
    assert found == expected and len(found) == 3 + 1 + 3


def test_what_is_measured_is_the_loss_of_the_pairs() -> None:
    settings = {"signal": "pair(dpo, beta=0.7, choose=reward)", "against": "reference"}
    term, values, batch, _ = computed({**settings, "coefficient": 3.0})
    losses, ahead, unpaired = compile_pairs(term).compare_pairs(values, batch)
    ratio = values.logprobs - values.teacher_logprobs
    sums = torch.stack([ratio[STARTS[row] : STARTS[row + 1]].sum() for row in range(len(ROWS))])
    margins = torch.stack(
        [
            sums[one] - sums[other]
            for one, other in compile_pairs(term).find_pairs(values, batch).rows
        ]
    )
    torch.testing.assert_close(losses, -torch.log(torch.sigmoid(0.7 * margins)))
    assert ahead.tolist() == [float(margin > 0) for margin in margins]
    assert unpaired.sum() == len(ROWS) - 5


def test_an_answer_that_the_reference_does_not_score_is_in_no_pair() -> None:
    objective = Objective.model_validate({"signal": "pair(dpo)", "against": "reference"})
    batch = build_token_batch(data(), objective)
    student = torch.log_softmax(logits(1), -1)
    (values,) = compute_term_values(student, TeacherDistribution(), batch, objective)
    assert not compute_coefficients(objective.losses[0], values, batch).any()
    losses, _, unpaired = compile_pairs(objective.losses[0]).compare_pairs(values, batch)
    assert not len(losses) and unpaired.all()


REFUSED = {
    "pair(dpi)": r"signal\.loss: .*'dpo', 'ipo', 'ipo_sum', 'simpo', 'orpo' or 'spin'",
    "pair(orpo, beta=0.1)": r"pair loss 'orpo' has no beta; leave it out",
    "pair(dpo, margin=0.5)": r"pair loss 'dpo' has no margin; leave it out",
    "pair(dpo, choose=best)": r"signal\.choose: .*'source', 'reward', 'low_reward' or 'score'",
    "pair(simpo, beta=0)": r"signal\.beta: .*greater than 0",
}


def recipe(objective: dict[str, Any], **changes: Any) -> Any:
    return parse_recipe(
        {
            "student": {"model": "x"},
            "task": {"type": "reverse"},
            "train": {"steps": 1},
            "objective": objective,
            **changes,
        },
        "r",
    )


@pytest.mark.parametrize("signal", REFUSED)
def test_a_pair_that_cannot_be_is_refused(signal: str) -> None:
    with pytest.raises(RecipeError, match=REFUSED[signal]):
        recipe({"signal": signal})


def test_a_sum_of_teachers_is_refused_where_pairs_ask_it() -> None:
    """Its data are split by member, and a pair would only see the first member."""
    members = {name: {"type": "self", "weights": "frozen"} for name in "ab"}
    pool = {"type": "pool", "teachers": members, "kind": "sum"}
    for role in ("teacher", "reference"):
        term = {"signal": "pair(dpo)", "against": role}
        with pytest.raises(RecipeError, match="is no sum over teachers; set kind: geometric"):
            recipe(term, **{role: pool})
        recipe(term, **{role: {**pool, "kind": "geometric"}})
    # Terms that ask no teacher never use the members' answers.
    recipe({"losses": [{"signal": "pair(orpo)"}, {"signal": "full"}]}, teacher=pool)


CONFLICTS = {
    "divergence": ("forward_kl", "defines its own loss; leave out target, divergence"),
    "estimator": ("pathwise", "defines its own loss"),
    "weights": (
        "entropy_top(0.5)",
        "takes whole answers of a prompt unchanged; leave out weights",
    ),
    "filter": ("correct", "leave out filter"),
    "source": ("student", "leave out source"),
    "correction": ("ratio", "leave out correction"),
    "reward": ("add_advantage(1.0)", "has no advantage; leave out reward, or write choose=reward"),
}


@pytest.mark.parametrize("key", CONFLICTS)
def test_what_concerns_one_answer_at_a_time_is_refused(key: str) -> None:
    value, text = CONFLICTS[key]
    with pytest.raises(RecipeError, match=text):
        recipe({"signal": "pair(simpo, choose=reward)", key: value})


def test_a_ratio_needs_somebody() -> None:
    with pytest.raises(RecipeError, match="needs a teacher and the recipe has none"):
        recipe({"signal": "pair(dpo)"})
    with pytest.raises(RecipeError, match="a term needs the reference and the recipe has none"):
        recipe({"signal": "pair(dpo)", "against": "reference"})
    recipe({"signal": "pair(simpo, choose=reward)"})
    with pytest.raises(
        RecipeError, match="needs a reference, and the recipe has none; set reference: "
    ):
        recipe({"signal": "pair(orpo)"}, rollout={"source": "join(dataset+reference)"})
