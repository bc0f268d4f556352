"""Divergences in two spaces: by loops over two vocabularies, where maps are inverse, and the gradient of each part."""

import pytest
import torch

from practicum.errors import RecipeError, TeacherError
from practicum.functional.divergences import DIVERGENCES
from practicum.functional.dual_space import Projections
from practicum.functional.head import Head
from practicum.losses.both_spaces import (
    read_both_spaces,
    start_projections,
)
from practicum.objective import Objective, TeacherDistribution
from practicum.recipe import parse_recipe
from practicum.teaching.vocabulary import FoldedHead, ReorderedHead
from practicum.types import TeacherSignal
from tests.losses.vocabularies import COMMON, OUTSIDE, OWN, STUDENT_SIZE, TEACHER_SIZE, compare

TERM = Objective.model_validate({"signal": "dual_space", "divergence": "jsd(0.3)"}).losses[0]
OWN_TOKENS = [token for token in range(TEACHER_SIZE) if token not in COMMON]
TOKENS, NARROW, WIDE = 5, 3, 4


def draw(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def two_vocabularies() -> tuple[Head, torch.Tensor, TeacherSignal, torch.Tensor]:
    """Return a student's head and states, a teacher's signal, and the weights of its head."""
    head = Head(draw(0, STUDENT_SIZE, NARROW).requires_grad_(), STUDENT_SIZE)
    weight = draw(1, TEACHER_SIZE, WIDE)
    bare = Head(weight, TEACHER_SIZE, scale=0.5)
    signal = TeacherSignal(
        hidden=draw(2, TOKENS, WIDE),
        head=FoldedHead(bare, STUDENT_SIZE, OUTSIDE, OWN),
        own=ReorderedHead(bare, torch.tensor(OWN_TOKENS)),
        outside=OUTSIDE,
    )
    return head, draw(3, TOKENS, NARROW).requires_grad_(), signal, weight


def test_it_is_the_sum_of_the_divergences_in_both_vocabularies() -> None:
    head, hidden, signal, weight = two_vocabularies()
    maps = Projections(draw(4, WIDE, NARROW), draw(5, NARROW, WIDE))
    spaces = read_both_spaces(head, hidden, signal, maps)
    values = compare(TERM, head.logprobs(hidden), TeacherDistribution(spaces=spaces))
    entry, rows = DIVERGENCES["jsd"], head.weight.detach()
    for row in range(TOKENS):
        mine, theirs = hidden[row].detach(), signal.states[row]  # type: ignore[index]
        student = [float(mine @ rows[token]) for token in range(STUDENT_SIZE)]
        carried = [float(theirs @ maps.to_student @ rows[token]) for token in range(STUDENT_SIZE)]
        teacher = [0.5 * float(theirs @ weight[token]) for token in range(TEACHER_SIZE)]
        back = [
            0.5 * float(mine @ maps.to_teacher @ weight[token]) for token in range(TEACHER_SIZE)
        ]
        pairs = ((student, carried), (back, teacher))
        slow = sum(
            entry.value(
                torch.tensor(one, dtype=torch.float64).log_softmax(0),
                torch.tensor(other, dtype=torch.float64).log_softmax(0),
                0.3,
            )
            for one, other in pairs
        )
        torch.testing.assert_close(values[row], slow)
        assert spaces.labels[row] == max(COMMON, key=lambda token: teacher[token])


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd(0.3)"])
def test_with_inverse_maps_both_spaces_agree_everywhere(divergence: str) -> None:
    term = Objective.model_validate({"signal": "dual_space", "divergence": divergence}).losses[0]
    between = draw(6, WIDE, WIDE)
    weight = draw(7, STUDENT_SIZE, WIDE)
    head = Head(weight @ between.T, STUDENT_SIZE)
    signal = TeacherSignal(hidden=draw(8, TOKENS, WIDE), head=Head(weight, STUDENT_SIZE))
    maps = start_projections(head, signal)
    assert maps is not None
    hidden = draw(9, TOKENS, WIDE).requires_grad_()
    spaces = read_both_spaces(head, hidden, signal, maps)
    values = compare(term, head.logprobs(hidden), TeacherDistribution(spaces=spaces))
    (found,) = torch.autograd.grad(values.sum(), hidden)
    plain = DIVERGENCES[term.divergence.name].value(
        head.logprobs(hidden), signal.head.logprobs(signal.states), term.parameter
    )
    torch.testing.assert_close(values, 2 * plain)
    torch.testing.assert_close(found, torch.autograd.grad(2 * plain.sum(), hidden)[0])


def test_each_map_learns_from_its_own_part() -> None:
    head, hidden, signal, _ = two_vocabularies()
    maps = Projections(
        draw(4, WIDE, NARROW).requires_grad_(), draw(5, NARROW, WIDE).requires_grad_()
    )
    spaces = read_both_spaces(head, hidden, signal, maps)
    values = compare(TERM, head.logprobs(hidden), TeacherDistribution(spaces=spaces))
    read = (hidden, maps.to_student, maps.to_teacher, head.weight)
    found = torch.autograd.grad(values.sum(), read, retain_graph=True)
    error = -spaces.through_student.gather(-1, spaces.labels[:, None]).sum()
    torch.testing.assert_close(found[1], torch.autograd.grad(error, maps.to_student)[0])
    entry = DIVERGENCES["jsd"]
    back = entry.value(spaces.through_teacher, spaces.teacher, 0.3).sum()
    torch.testing.assert_close(
        found[2], torch.autograd.grad(back, maps.to_teacher, retain_graph=True)[0]
    )
    here = entry.value(head.logprobs(hidden), spaces.through_student.detach(), 0.3).sum()
    torch.testing.assert_close(found[3], torch.autograd.grad(here, head.weight)[0])


def test_it_starts_where_common_tokens_keep_their_logits() -> None:
    head, _, signal, weight = two_vocabularies()
    maps = start_projections(head, signal)
    assert maps is not None
    slow = torch.linalg.lstsq(0.5 * weight[COMMON], head.weight.detach()[COMMON]).solution.T
    torch.testing.assert_close(maps.to_teacher, slow)
    assert start_projections(head, TeacherSignal()) is None


def test_a_teacher_without_states_is_refused() -> None:
    head = Head(draw(0, STUDENT_SIZE, NARROW), STUDENT_SIZE)
    with pytest.raises(TeacherError, match="reads the hidden states of one teacher"):
        start_projections(head, TeacherSignal(logprobs=torch.zeros(2)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": {"type": "expert"}, "task": {"type": "walker"}}, "gives no hidden states"),
        (
            {"objective": {"signal": "dual_space", "estimator": "score_function"}},
            "its own divergence; leave out",
        ),
    ],
)
def test_what_it_cannot_be_with_is_said_when_the_recipe_is_read(changes, message) -> None:
    plain = {
        "name": "two",
        "student": {"model": {}},
        "teacher": {"type": "model", "model": {}},
        "objective": {"signal": "dual_space"},
        "task": {"type": "reverse"},
        "train": {"steps": 1},
    }
    with pytest.raises(RecipeError, match=message):
        parse_recipe({**plain, **changes}, "two")
