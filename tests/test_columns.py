"""Laws of tables of tokens, over random tables: the joined parts of a table equal the table."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from practicum.columns import TokenColumns


@dataclass(frozen=True, slots=True)
class Part(TokenColumns):
    numbers: Tensor


@dataclass(frozen=True, slots=True)
class Table(TokenColumns):
    ids: Tensor
    logprobs: Tensor | None = None
    rows: Tensor | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    part: Part | None = None
    parts: tuple[Part, ...] = ()
    sizes: tuple[float, ...] = ()
    name: str = ""
    vocabulary: Tensor | None = None
    shared: ClassVar[frozenset[str]] = frozenset({"vocabulary"})


def draw_table(count: int, rng: random.Random) -> Table:
    draw = torch.Generator().manual_seed(rng.randrange(2**31))

    def numbers(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=draw)

    return Table(
        torch.arange(count),
        numbers(),
        numbers(3),
        {"first": numbers(), "second": numbers(2)},
        Part(numbers()),
        (Part(numbers()), Part(numbers(4))),
        (0.5, 0.5),
        "teacher",
        torch.arange(7),
    )


def list_columns(table: Table) -> list[Tensor]:
    assert table.logprobs is not None and table.rows is not None and table.part is not None
    nested = [table.part.numbers, *(part.numbers for part in table.parts)]
    return [table.ids, table.logprobs, table.rows, *table.extras.values(), *nested]


@pytest.mark.parametrize("seed", range(20))
def test_a_table_is_its_parts_joined(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randrange(1, 12)
    table = draw_table(count, rng)
    ends = sorted({0, count, *(rng.randrange(count + 1) for _ in range(3))})
    parts = [table[start:end] for start, end in pairwise(ends)]
    joined = Table.join(parts)
    torch.testing.assert_close(list_columns(joined), list_columns(table), rtol=0, atol=0)
    assert joined.name == "teacher" and joined.sizes == (0.5, 0.5)
    assert joined.vocabulary is table.vocabulary, "what all tokens share is not cut"
    order = torch.randperm(count)
    expected = [column[order] for column in list_columns(table)]
    torch.testing.assert_close(list_columns(table[order]), expected, rtol=0, atol=0)


def test_a_column_that_a_part_lacks_is_unknown_at_its_tokens() -> None:
    joined = Table.join([Table(torch.arange(2), torch.ones(2)), Table(torch.arange(3))])
    assert joined.logprobs is not None and joined.rows is None
    assert joined.logprobs[:2].tolist() == [1.0, 1.0] and joined.logprobs[2:].isnan().all()
    assert joined.ids.tolist() == [0, 1, 0, 1, 2]


def test_everything_moves_to_a_device_and_leaves_the_graph() -> None:
    table = draw_table(3, random.Random(0))
    moved = table.to(torch.device("meta"))
    assert moved.vocabulary is not None and moved.vocabulary.is_meta
    assert all(column.is_meta for column in list_columns(moved))
    leaf = torch.ones(2, requires_grad=True)
    table = Table(torch.arange(2), leaf * 2, extras={"a": leaf * 3}).detach()
    assert table.logprobs is not None
    assert not (table.logprobs.requires_grad or table.extras["a"].requires_grad)
