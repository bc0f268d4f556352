"""BOND by enumeration: the anchor's draws are listed in proportion to their probabilities, so that its quantiles are exact."""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from practicum import functional as F
from practicum.errors import RecipeError
from practicum.recipe import load_recipe, parse_recipe
from practicum.types import Rollout

from .worlds import RolloutBatch, answer, close, coefficients, loss

FIRST = [Fraction(1, 4), Fraction(2, 4), Fraction(1, 4)]
SECOND = [
    [Fraction(1, 4), Fraction(1, 4), Fraction(2, 4)],
    [Fraction(2, 4), Fraction(1, 4), Fraction(1, 4)],
    [Fraction(0, 4), Fraction(3, 4), Fraction(1, 4)],
]
"""The anchor: every answer of two symbols has some sixteenths of the probability, and one answer has none."""

REWARDS = [0.2, 0.7, 0.2, 1.0, 0.5, 0.7, 0.9, 0.1, 0.2]
"""The reward of each answer, with ties."""

ANSWERS = list(itertools.product(range(3), repeat=2))
STATES = {(): 0, (0,): 1, (1,): 2, (2,): 3}


@dataclass
class World:
    """The student's table of logits [4, 3], and the anchor's log-probabilities in the same states."""

    student: Tensor
    anchor: Tensor

    @property
    def mass(self) -> list[Fraction]:
        """The anchor's probability of each answer."""
        return [FIRST[first] * SECOND[first][second] for first, second in ANSWERS]

    def probability(self, table: Tensor, number: int) -> Tensor:
        """Return the logarithm of the student's probability of an answer."""
        return table.log_softmax(-1)[self.path(number), torch.tensor(ANSWERS[number])].sum()

    def path(self, number: int) -> list[int]:
        """Return the states that an answer goes through."""
        return [0, STATES[ANSWERS[number][:1]]]


def world() -> World:
    generator = torch.Generator().manual_seed(5)
    student = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    rows = [[float(p) for p in row] for row in (FIRST, *SECOND)]
    # The anchor never writes one of the answers that the student may write.
    anchor = torch.tensor(rows, dtype=torch.float64).clamp(min=1e-9).log()
    return World(student, anchor)


def best_of(count: int, mass: Iterable[Fraction]) -> list[float]:
    """Return the probability of each answer under best-of-N, ties drawn evenly: p (F^N - G^N) / (F - G)."""
    found = []
    masses = list(mass)
    for number, p in enumerate(masses):
        pairs = list(zip(masses, REWARDS, strict=True))
        no_better = sum(other for other, reward in pairs if reward <= REWARDS[number])
        worse = sum(other for other, reward in pairs if reward < REWARDS[number])
        ties = no_better - worse
        found.append(float(p * (no_better**count - worse**count) / ties) if ties else 0.0)
    return found


def batch(here: World, table: Tensor, drawn: list[int], anchors: list[int]) -> RolloutBatch:
    """Return a group of some of the student's answers and some of the anchor's."""
    rows: list[Rollout] = []
    places: list[int] = []
    for numbers, source in ((drawn, "student"), (anchors, "reference")):
        for number in numbers:
            ids = torch.tensor(ANSWERS[number])
            sampler = table.detach().log_softmax(-1)[here.path(number), ids]
            rows.append(
                answer(ids, sampler, REWARDS[number], source=source, sample=len(rows))  # type: ignore[arg-type]
            )
            places += here.path(number)
    return RolloutBatch(rows, table[places], here.anchor[places], here.anchor[places])


def gradient(function: Callable[[Tensor], Tensor], here: World) -> Tensor:
    table = here.student.clone().requires_grad_()
    return torch.autograd.grad(function(table), table)[0]


def expected(choice: dict[str, object], here: World, groups: list[tuple[float, list[int]]]):
    """Return the library's gradient over every pair of the student's answers and every weighted group of the anchor's."""

    def total(table: Tensor) -> Tensor:
        parts = []
        # A group's order does not matter: an unordered pair represents both orders.
        for pair in itertools.combinations_with_replacement(range(len(ANSWERS)), 2):
            own = sum(here.probability(table.detach(), number) for number in pair)
            own = own + math.log(len(set(pair)))
            for weight, anchors in groups:
                value = loss(choice, batch(here, table, list(pair), anchors))
                parts.append(torch.as_tensor(own).exp() * weight * value)
        return torch.stack(parts).sum()

    return gradient(total, here)


def every_pair(here: World) -> list[tuple[float, list[int]]]:
    """Yield every unordered pair of the anchor's answers with the probability of both orders."""
    return [
        (weight * len(set(numbers)), numbers)
        for weight, numbers in every_group(here, 2)
        if numbers == sorted(numbers)
    ]


def every_group(here: World, count: int) -> list[tuple[float, list[int]]]:
    """Yield every draw of some answers of the anchor with its probability."""
    return [
        (math.prod(float(here.mass[number]) for number in numbers), list(numbers))
        for numbers in itertools.product(range(len(ANSWERS)), repeat=count)
        if all(here.mass[number] for number in numbers)
    ]


BACKWARD = {
    "aggregate": "seq_mean_token_sum",
    "losses": [
        {"signal": "score(best_of_n)", "source": "student"},
        {
            "signal": "sampled",
            "against": "reference",
            "estimator": "score_function(gamma=1)",
            "source": "student",
        },
    ],
}


def test_reward_and_anchor_are_the_gradient_of_the_kl_to_best_of_n() -> None:
    here = world()
    # Use sixteen answers of the anchor, each in proportion to its probability: N is 16, and no quantile is an estimate.
    anchors = [number for number, mass in enumerate(here.mass) for _ in range(int(mass * 16))]
    assert len(anchors) == 16
    target = best_of(16, here.mass)
    assert sum(target) == pytest.approx(1.0)

    def divergence(table: Tensor) -> Tensor:
        parts = []
        for number, probability in enumerate(target):
            own = here.probability(table, number)
            # The answer that the anchor never writes has the ratio of its quantile over the anchor's floor.
            other = math.log(probability) if probability else floored(number)
            parts.append(own.exp() * (own - other))
        return torch.stack(parts).sum()

    def floored(number: int) -> float:
        counts = [REWARDS[other] <= REWARDS[number] for other in anchors]
        worse = [REWARDS[other] < REWARDS[number] for other in anchors]
        no_better, below = sum(counts) / 16, sum(worse) / 16
        ratio = sum(no_better ** (15 - i) * below**i for i in range(16))
        place = here.path(number), torch.tensor(ANSWERS[number])
        return math.log(ratio) + float(here.anchor[place].sum())

    # Two answers of eighteen are the student's.
    close(expected(BACKWARD, here, [(1.0, anchors)]) * 18 / 2, gradient(divergence, here))


@pytest.mark.parametrize(
    "advantage", [pytest.param("best_of_n", marks=pytest.mark.slow), "below_anchor"]
)
def test_few_answers_of_the_anchor_leave_the_mean_reward_unbiased(advantage: str) -> None:
    here, choice = world(), {"signal": f"score({advantage})", "aggregate": "seq_mean_token_sum"}
    groups = every_pair(here)

    def reward(number: int, anchors: list[int]) -> float:
        own, others = REWARDS[number], [REWARDS[other] for other in anchors]
        if advantage == "below_anchor":
            return -math.log(16) if own < min(others) else 0.0
        no_better = max(sum(other <= own for other in others), 0.5) / 2
        return math.log(no_better + sum(other < own for other in others) / 2)

    means = [sum(w * reward(number, anchors) for w, anchors in groups) for number in range(9)]

    def objective(table: Tensor) -> Tensor:
        return -torch.stack([here.probability(table, n).exp() * means[n] for n in range(9)]).sum()

    close(expected(choice, here, groups) * 4 / 2, gradient(objective, here))


def test_the_best_of_the_anchors_answers_is_the_kl_from_best_of_n() -> None:
    here = world()
    choice = {
        "signal": "text",
        "divergence": "ce",
        "source": "reference",
        "samples": "best",
        "aggregate": "seq_mean_token_sum",
    }
    target = best_of(3, here.mass)

    def likelihood(table: Tensor) -> Tensor:
        return -torch.stack([target[n] * here.probability(table, n) for n in range(9)]).sum()

    found = gradient(
        lambda table: torch.stack(
            [
                weight * loss(choice, batch(here, table, [1, 6], anchors))
                for weight, anchors in every_group(here, 3)
            ]
        ).sum(),
        here,
    )
    # One answer of five is learned from; that the student wrote the best answer of all does not matter.
    close(found * 5, gradient(likelihood, here))


def test_j_bonds_penalty_is_the_logarithm_of_the_median() -> None:
    for count in (2, 3, 5):
        groups = list(itertools.product([0.0, 1.0], repeat=count))
        advantages = [F.ADVANTAGES["below_anchor"].function([0.5, 1.0], group) for group in groups]
        # One answer is worse than half of the anchor's; the second one is never the worst.
        mean = sum(first for first, _ in advantages) / len(groups)
        assert mean == pytest.approx(math.log(0.5))
    first, second = F.ADVANTAGES["below_anchor"].function([0.5, 1.0], [0.7, 0.9])
    assert first == -second == pytest.approx(-math.log(16))


def test_j_bond_steps_by_algorithm_2() -> None:
    """In expectation over two answers of the student and two of the anchor, with beta and gamma 1/2."""
    here, objective = world(), load_recipe("papers/j-bond").objective.model_dump()
    choice = {key: content for key, content in objective.items() if content is not None}

    def step(table: Tensor) -> Tensor:
        likelihoods = [here.probability(table, number) for number in range(9)]
        parts = []
        for number, likelihood in enumerate(likelihoods):
            own = likelihood.detach()
            place = here.path(number), torch.tensor(ANSWERS[number])
            distance = own - here.anchor[place].sum()
            mean = sum(
                weight * -math.log(16) * (REWARDS[number] < min(REWARDS[other] for other in pair))
                for weight, pair in every_pair(here)
            )
            # G_BW and G_Reg of the student's answer.
            parts.append(own.exp() * likelihood * (0.5 * (distance - mean) + 0.5 * distance))
        best = best_of(2, here.mass)
        return torch.stack(parts).sum() - 0.5 * sum(
            weight * likelihood for weight, likelihood in zip(best, likelihoods, strict=True)
        )

    close(expected(choice, here, every_pair(here)), gradient(step, here))


def test_best_of_n_by_hand() -> None:
    function = F.ADVANTAGES["best_of_n"].function
    # F and G of the three: 1/4 and 0, 3/4 and 1/4, 1 and 1.
    ratios = [0.25**3, 0.75**3 + 0.75**2 * 0.25 + 0.75 * 0.25**2 + 0.25**3, 4.0]
    logs = [math.log(ratio) for ratio in ratios]
    expected = [own - (sum(logs) - own) / 2 for own in logs]
    assert function([0.1, 0.5, 2.0], [0.5, 1.0, 0.1, 0.5]) == pytest.approx(expected)
    # Worse than all: half an answer of the anchor's is no better.
    low, high = function([0.0, 1.0], [0.5, 0.5])
    assert low == -high == pytest.approx(math.log(1 / 4) - math.log(2))
    assert function([0.5], [0.1]) == [0.0] and function([], [0.1]) == []


def test_a_group_without_the_anchors_answers_learns_nothing_and_those_answers_never() -> None:
    here, choice = world(), {"signal": "score(best_of_n)"}
    assert not coefficients(choice, batch(here, here.student, [3, 0], [])).any()
    found = coefficients(choice, batch(here, here.student, [3, 0], [2, 4]))
    assert found[:4].all() and not found[4:].any()


@pytest.mark.parametrize(
    "term",
    [
        {"signal": "score(below_anchor)"},
        {"signal": "sampled", "reward": "add_advantage(1.0, best_of_n)"},
    ],
)
def test_a_recipe_whose_reference_writes_nothing_is_refused(term: dict[str, str]) -> None:
    settings = {
        "student": {"model": "x"},
        "task": {"type": "reverse"},
        "train": {"steps": 1},
        "teacher": {"type": "self", "weights": "frozen"},
        "reference": {"type": "self", "weights": "ema"},
        "objective": term,
    }
    with pytest.raises(
        RecipeError, match=r"losses\[0\]: .* set rollout.source: join\(reference, 4\)"
    ):
        parse_recipe(settings, "r")
    parse_recipe({**settings, "rollout": {"source": "join(reference, 4)"}}, "r")
