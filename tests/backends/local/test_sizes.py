"""The cost of a model is read from its modules."""

from pathlib import Path

import pytest

from backends.mixtures import family_folder
from practicum.backends.local.loading import load_student
from practicum.backends.local.paper import measure_footprint
from practicum.backends.local.sizes import measure_dims, measure_trainable
from practicum.models.config import Lora, StudentConfig


def test_of_a_mixture_of_experts_those_count_that_a_token_goes_to(tmp_path: Path) -> None:
    """Count one dense layer, and one layer that uses two of its four experts plus a shared expert."""
    folder = family_folder(tmp_path / "model", "glm4_moe")
    loaded = load_student(StudentConfig(model=str(folder), lora=Lora(rank=3)), 0)
    shape, learning = measure_dims(loaded.language_model), measure_trainable(loaded.language_model)
    attention = 32 * 32 * 2 + 32 * 16 * 2
    dense, expert, router = 3 * 32 * 48, 3 * 32 * 16, 4 * 32
    assert shape.body == 2 * attention + dense + router + (1 + 2) * expert
    around_attention = 3 * (2 * (32 + 32) + 2 * (32 + 16))
    around_dense, around_shared = 3 * 3 * (32 + 48), 3 * 3 * (32 + 16)
    around_expert = 3 * ((32 + 2 * 16) + (16 + 32))  # gate and up are one weight
    assert shape.adapters == 2 * around_attention + around_dense + around_shared + 2 * around_expert
    assert (learning.body, learning.adapters, learning.layers) == (0, shape.adapters, 2)
    assert learning.parameters == shape.adapters + 2 * around_expert  # all four learn


@pytest.mark.long
@pytest.mark.parametrize("lora", [None, Lora(rank=3)], ids=["all", "adapters"])
def test_experts_are_gone_through_on_paper(tmp_path: Path, lora: Lora | None) -> None:
    folder = family_folder(tmp_path / "model", "mixtral")
    found = measure_footprint(StudentConfig(model=str(folder), lora=lora), str(folder), layers=2)
    assert 0 < found.forward.each <= found.graph.each
    changed = (
        2 * 4 * 3 * 32 * 48 * 4 if lora else 0
    )  # the graph holds the changed weights of the experts of both layers
    assert found.graph.fixed >= changed
