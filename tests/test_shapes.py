"""Tests check shapes, and only shapes."""

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError, config
from jaxtyping._decorator import jaxtyped
from shapes import check_each_once, looks_inside
from torch import Tensor

from practicum import functional
from practicum.types import SamplingParams, TeacherSignal

pytestmark = pytest.mark.skipif(
    config.jaxtyping_disable, reason="JAXTYPING_DISABLE is set, as `make check` does"
)


def test_a_function_that_is_given_another_shape_is_refused():
    with pytest.raises(TypeCheckError):
        functional.reverse_kl(torch.zeros(3, 4), torch.zeros(3, 5))


def test_a_dataclass_that_is_given_another_shape_is_refused():
    with pytest.raises(TypeCheckError):
        TeacherSignal(logprobs=torch.zeros(2, 3))


def test_what_was_right_once_is_checked_again_where_a_shape_or_the_result_is_another():
    sides = torch.zeros(3, 4), torch.zeros(3, 4)
    assert functional.reverse_kl(*sides).shape == functional.reverse_kl(*sides).shape
    for wrong in (torch.zeros(3, 5), torch.zeros(3, 4, dtype=torch.int64), None):
        with pytest.raises(TypeCheckError):
            functional.reverse_kl(sides[0], wrong)

    def give(values: Float[Tensor, "T"], length: int) -> Float[Tensor, "T"]:
        return torch.zeros(length)

    checked = check_each_once(give, jaxtyped(typechecker=beartype))
    for _ in range(2):
        assert checked(torch.zeros(3), 3).shape == checked(torch.zeros(3), length=3).shape
        with pytest.raises(TypeCheckError):
            checked(torch.zeros(3), 4)


def test_elements_and_words_are_checked_again_where_one_is_another():
    def give(
        rows: Sequence[Float[Tensor, "T"]], side: Literal["left", "right"]
    ) -> Sequence[Float[Tensor, "T"]]:
        return [row + 1 for row in rows] if side == "left" else [rows[0][None]]

    checked = check_each_once(give, jaxtyped(typechecker=beartype))
    row, wide = torch.zeros(2), torch.zeros(2, 2)
    for _ in range(2):
        assert len(checked([row, row], "left")) == len(checked([row], side="left")) + 1
        for rows, side in (
            ([wide], "left"),
            ([row], "middle"),
            ([row], "right"),
            ([row.int()], "left"),
        ):
            with pytest.raises(TypeCheckError):
                checked(rows, side)


def test_a_check_that_reads_a_property_may_call_what_is_checked():
    @runtime_checkable
    class HasRows(Protocol):
        @property
        def rows(self) -> Tensor: ...

    class Lazy:
        @property
        def rows(self) -> Tensor:
            return checked(torch.zeros(2), None)

    def give(values: Float[Tensor, "T"], lazy: HasRows | None) -> Float[Tensor, "T"]:
        return values

    checked = check_each_once(give, jaxtyped(typechecker=beartype))
    assert len(checked(torch.zeros(3), Lazy())) == 3


@pytest.mark.parametrize(
    ("annotation", "whole"),
    [
        (Float[Tensor, "T"] | None, True),
        (tuple[Float[Tensor, "T"], Sequence[int]], True),
        (tuple[Float[Tensor, "T"], ...], False),
        (Sequence[Float[Tensor, "T"]] | None, False),
        (Literal["student", "teacher"], False),
    ],
)
def test_types_and_shapes_tell_all_unless_a_check_looks_inside(annotation, whole):
    assert looks_inside(annotation) != whole


def test_what_names_no_shape_is_as_it_was_written():
    assert not hasattr(SamplingParams.should_stop, "__wrapped__")
    assert hasattr(functional.reverse_kl, "__wrapped__")
