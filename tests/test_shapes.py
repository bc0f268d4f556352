"""Tests check shapes, and only them."""

import pytest
import torch
from jaxtyping import TypeCheckError, config

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


def test_what_names_no_shape_is_as_it_was_written():
    assert not hasattr(SamplingParams.should_stop, "__wrapped__")
    assert hasattr(functional.reverse_kl, "__wrapped__")
