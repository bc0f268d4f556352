"""The embedding's gradient in place against torch's dense one, bit by bit."""

import pytest
import torch

from backends.tiny import tiny
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.lookup import add_rows_in_place


@pytest.mark.parametrize("has_gradient", [True, False])
@pytest.mark.parametrize("padding", [None, 3])
def test_rows_are_added_as_torch_adds_them(has_gradient: bool, padding: int | None) -> None:
    model = tiny()
    embedding = model.model.get_input_embeddings()
    assert isinstance(embedding, torch.nn.Embedding)
    embedding.padding_idx = padding
    torch.manual_seed(0)
    start = torch.randn_like(embedding.weight) if has_gradient else None
    ids = torch.tensor([[3, 5, 3, 7, 5, 5, 0]])
    outer = torch.randn(*ids.shape, embedding.weight.shape[1])

    def differentiate(model: LanguageModel) -> torch.Tensor:
        embedding.weight.grad = None if start is None else start.clone()
        for _ in range(2):
            embedding(ids).backward(outer)
        assert embedding.weight.grad is not None
        return embedding.weight.grad

    dense = differentiate(model)
    with add_rows_in_place(model):
        assert "forward" in vars(embedding)
        assert torch.equal(differentiate(model), dense)
    assert "forward" not in vars(embedding)


def test_a_frozen_embedding_stays_as_it_is() -> None:
    model = tiny()
    embedding = model.model.get_input_embeddings()
    embedding.weight.requires_grad_(False)
    with add_rows_in_place(model):
        assert "forward" not in vars(embedding)
