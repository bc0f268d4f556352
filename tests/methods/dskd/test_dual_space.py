"""Divergences in two spaces: by loops over two vocabularies, where maps are inverse, and the gradient of each part."""

from dataclasses import replace

import pytest
import torch

from practicum.backends.local.projections import TO_STUDENT, prepare_projections
from practicum.backends.local.ranks import OneRank
from practicum.errors import RecipeError, TeacherError
from practicum.functional.divergences import DIVERGENCES
from practicum.functional.dual_space import BothSpaces, Projections, fit_map
from practicum.functional.head import Head
from practicum.losses.both_spaces import read_both_spaces, read_common_rows
from practicum.objective import Objective, TeacherDistribution
from practicum.recipe import parse_recipe
from practicum.teaching.vocabulary import FoldedHead, ReorderedHead
from practicum.types import TeacherSignal
from tests.losses.test_sides import batch
from tests.losses.vocabularies import COMMON, OUTSIDE, OWN, STUDENT_SIZE, TEACHER_SIZE, compare

TERM = Objective.model_validate({"signal": "dual_space", "divergence": "jsd(0.3)"}).losses[0]
OWN_TOKENS = [token for token in range(TEACHER_SIZE) if token not in COMMON]
TOKENS, NARROW, WIDE = 24, 3, 4


def draw(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def two_vocabularies() -> tuple[Head, torch.Tensor, TeacherSignal, torch.Tensor]:
    """Return a student's head and states, a teacher's signal, and the weights of its head."""
    weight, rows = draw(1, TEACHER_SIZE, WIDE), draw(0, STUDENT_SIZE, NARROW)
    # Related heads: a map then leads to the teacher's most likely token at some positions.
    rows[COMMON] += 2 * weight[COMMON, :NARROW]
    head = Head(rows.requires_grad_(), STUDENT_SIZE)
    bare = Head(weight, TEACHER_SIZE, scale=0.5)
    signal = TeacherSignal(
        hidden=draw(2, TOKENS, WIDE),
        head=FoldedHead(bare, STUDENT_SIZE, OUTSIDE, OWN),
        own=ReorderedHead(bare, torch.tensor(OWN_TOKENS)),
        outside=OUTSIDE,
    )
    return head, draw(3, TOKENS, NARROW).requires_grad_(), signal, weight


def find_maps(head: Head, signal: TeacherSignal) -> Projections:
    """Return the maps that preserve the logits of common tokens, with a gradient in the first one."""
    rows = read_common_rows(head, signal)
    assert rows is not None
    return Projections(fit_map(*rows[::-1]).detach().requires_grad_(), fit_map(*rows).detach())


def test_it_is_the_sum_of_the_divergences_in_both_vocabularies() -> None:
    head, hidden, signal, weight = two_vocabularies()
    maps = find_maps(head, signal)
    spaces = read_both_spaces(head, hidden, signal, maps)
    values = compare(TERM, head.logprobs(hidden), TeacherDistribution(spaces=spaces))
    entry, rows, counted = DIVERGENCES["jsd"], head.weight.detach(), [0, 0]
    to_student = maps.to_student.detach()
    for row in range(TOKENS):
        mine, theirs = hidden[row].detach(), signal.states[row]  # type: ignore[index]
        student = [float(mine @ rows[token]) for token in range(STUDENT_SIZE)]
        carried = [float(theirs @ to_student @ rows[token]) for token in range(STUDENT_SIZE)]
        teacher = [0.5 * float(theirs @ weight[token]) for token in range(TEACHER_SIZE)]
        back = [
            0.5 * float(mine @ maps.to_teacher @ weight[token]) for token in range(TEACHER_SIZE)
        ]
        best = max(range(TEACHER_SIZE), key=lambda token: teacher[token])
        label = best if best in COMMON else -1
        assert spaces.labels[row] == label
        top = max(range(STUDENT_SIZE), key=lambda token: carried[token])
        slow = torch.zeros((), dtype=torch.float64)
        for number, (one, other, counts) in enumerate(
            ((student, carried, top == label), (back, teacher, label >= 0))
        ):
            pair = (torch.tensor(part, dtype=torch.float64).log_softmax(0) for part in (one, other))
            slow = slow + counts * entry.value(*pair, 0.3)
            counted[number] += counts
        torch.testing.assert_close(values[row], slow)
    assert 0 < counted[0] < counted[1] < TOKENS, "each mask acts at some positions"


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd(0.3)"])
def test_with_inverse_maps_both_spaces_agree_everywhere(divergence: str) -> None:
    term = Objective.model_validate({"signal": "dual_space", "divergence": divergence}).losses[0]
    between = draw(6, WIDE, WIDE)
    weight = draw(7, STUDENT_SIZE, WIDE)
    head = Head(weight @ between.T, STUDENT_SIZE)
    signal = TeacherSignal(hidden=draw(8, TOKENS, WIDE), head=Head(weight, STUDENT_SIZE))
    rows = read_common_rows(head, signal)
    assert rows is not None
    maps = Projections(fit_map(*rows[::-1]), fit_map(*rows))
    hidden = draw(9, TOKENS, WIDE).requires_grad_()
    spaces = read_both_spaces(head, hidden, signal, maps)
    values = compare(term, head.logprobs(hidden), TeacherDistribution(spaces=spaces))
    (found,) = torch.autograd.grad(values.sum(), hidden)
    plain = DIVERGENCES[term.divergence.name].value(
        head.logprobs(hidden), signal.head.logprobs(signal.states), term.parameter
    )
    torch.testing.assert_close(values, 2 * plain)
    torch.testing.assert_close(found, torch.autograd.grad(2 * plain.sum(), hidden)[0])


def test_only_the_map_to_the_student_learns_and_only_from_the_teachers_most_likely_token() -> None:
    head, hidden, signal, _ = two_vocabularies()
    maps = find_maps(head, signal)
    spaces = read_both_spaces(head, hidden, signal, maps)
    values = compare(TERM, head.logprobs(hidden), TeacherDistribution(spaces=spaces))
    found = torch.autograd.grad(values.sum(), (maps.to_student, head.weight), retain_graph=True)
    rows = (spaces.labels >= 0).nonzero()[:, 0]
    error = -spaces.through_student[rows, spaces.labels[rows]].sum()
    torch.testing.assert_close(found[0], torch.autograd.grad(error, maps.to_student)[0])
    # The student's head learns in its own space, where the map leads to the teacher's token.
    agrees = spaces.through_student.argmax(-1) == spaces.labels
    assert agrees.any()
    pair = head.logprobs(hidden), spaces.through_student.detach()
    here = DIVERGENCES["jsd"].value(*pair, 0.3)[agrees].sum()
    torch.testing.assert_close(found[1], torch.autograd.grad(here, head.weight)[0])


def test_a_wrong_map_teaches_nothing_in_the_students_space() -> None:
    generator = torch.Generator().manual_seed(0)
    student, through, teacher, back = (
        torch.randn(6, 9, generator=generator, dtype=torch.float64).log_softmax(-1)
        for _ in range(4)
    )
    leaf = student.requires_grad_()
    for labels, learns in (
        (through.argmax(-1), True),
        ((through.argmax(-1) + 1) % 9, False),
        (torch.full((6,), -1), False),
    ):
        spaces = BothSpaces(through, back, teacher, labels)
        values = compare(TERM, leaf, TeacherDistribution(spaces=spaces))
        (slope,) = torch.autograd.grad(values.sum(), leaf, allow_unused=True)
        assert bool(slope.any()) is learns
        assert bool((values != 0).all()) is bool((labels >= 0).all())


def test_the_map_to_the_teacher_preserves_the_logits_of_common_tokens() -> None:
    head, _, signal, weight = two_vocabularies()
    rows = read_common_rows(head, signal)
    assert rows is not None
    slow = torch.linalg.lstsq(0.5 * weight[COMMON], head.weight.detach()[COMMON]).solution.T
    torch.testing.assert_close(fit_map(*rows), slow)
    assert read_common_rows(head, TeacherSignal()) is None


def test_each_update_fits_the_map_to_the_teacher_again_and_keeps_the_learned_map() -> None:
    head, _, signal, _ = two_vocabularies()
    parameters = {"head": torch.nn.Parameter(head.weight.detach())}
    optimizer = torch.optim.AdamW(parameters.values())
    silent = replace(batch()[0], signal=TeacherSignal())
    datums = [silent, replace(silent, signal=signal)]
    maps, decide = [], OneRank().decide
    for changed in (parameters["head"].detach(), draw(7, STUDENT_SIZE, NARROW)):
        now = Head(changed, STUDENT_SIZE)
        pair = prepare_projections(parameters, optimizer, 0.5, datums, now, decide)
        assert pair is not None and optimizer.param_groups[-1]["pace"] == 0.5
        rows = read_common_rows(now, signal)
        assert rows is not None
        torch.testing.assert_close(pair.to_teacher, fit_map(*rows))
        assert not pair.to_teacher.requires_grad
        maps.append(pair)
    assert list(parameters) == ["head", TO_STUDENT]
    assert maps[0].to_student is maps[1].to_student is parameters[TO_STUDENT]
    assert not maps[0].to_teacher.equal(maps[1].to_teacher)
    assert prepare_projections(parameters, optimizer, 0.5, [silent], head, decide) is None
    assert prepare_projections(parameters, optimizer, None, datums, head, decide) is None


def test_a_teacher_without_states_is_refused() -> None:
    head = Head(draw(0, STUDENT_SIZE, NARROW), STUDENT_SIZE)
    with pytest.raises(TeacherError, match="reads the hidden states of one teacher"):
        read_common_rows(head, TeacherSignal(logprobs=torch.zeros(2)))


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
