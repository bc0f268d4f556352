"""Tables of tokens: slice, join and move all columns of a dataclass at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor


class TokenColumns:
    """The base of a frozen dataclass with columns: tensors with one entry for each of the same tokens.

    A column is a tensor, a mapping of tensors, a table of the same tokens, or a tuple of such
    tables. Other fields, and the fields named in `shared`, belong to all tokens and are not cut.
    """

    __slots__ = ()
    # Type checkers recognize a dataclass by this attribute.
    __dataclass_fields__: ClassVar[dict[str, Any]]
    shared: ClassVar[frozenset[str]] = frozenset()

    def map_columns(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the table with a function applied to each column."""
        return self._map(function, with_shared=False)

    def map_all(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the table with a function applied to each tensor, including shared tensors."""
        return self._map(function, with_shared=True)

    def __getitem__(self, part: slice | Tensor) -> Self:
        """Return the table at some of its tokens. Positions may be on another device."""
        return self.map_columns(lambda column: select_tokens(column, part))

    def to(self, device: torch.device) -> Self:
        """Return the table with all tensors on a device, including shared tensors."""
        return self.map_all(lambda tensor: tensor.to(device))

    def detach(self) -> Self:
        """Return the table without autograd's graph."""
        return self.map_all(Tensor.detach)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Concatenate one or more tables. The first table gives the fields that all tokens share.

        A column that only some parts have is NaN at the tokens of the parts without it.
        """
        first = parts[0]
        columns = {
            name: _join([getattr(part, name) for part in parts], parts)
            for name in _list_names(first, first.shared)
        }
        return replace(first, **columns)

    def _map(self, function: Callable[[Tensor], Tensor], *, with_shared: bool) -> Self:
        def change(column: Any) -> Any:
            if isinstance(column, Tensor):
                return function(column)
            if isinstance(column, TokenColumns):
                return column._map(function, with_shared=with_shared)
            if _holds(column, TokenColumns):
                return tuple(map(change, column))
            if _holds(column, Tensor):
                return {name: change(entry) for name, entry in column.items()}
            return column

        names = _list_names(self, frozenset() if with_shared else self.shared)
        return replace(self, **{name: change(getattr(self, name)) for name in names})

    def _count_tokens(self) -> int:
        """Return the number of tokens, from the first column that is present."""
        columns = (getattr(self, name) for name in _list_names(self, self.shared))
        return next(len(column) for column in columns if isinstance(column, Tensor))


def select_tokens(column: Tensor, part: slice | Tensor) -> Tensor:
    """Return some entries of a column. Positions may be on another device."""
    return column[part.to(column.device) if isinstance(part, Tensor) else part]


def _list_names(table: TokenColumns, skipped: frozenset[str]) -> list[str]:
    return [field.name for field in fields(table) if field.name not in skipped]


def _holds(column: Any, kind: type) -> bool:
    """Return True for a tuple of tables, or a mapping of tensors."""
    if not isinstance(column, tuple if kind is TokenColumns else Mapping):
        return False
    # All entries are of one kind. Checking each entry would be quadratic in the rows of a batch,
    # which is sliced once per chunk.
    entries = column.values() if isinstance(column, Mapping) else column
    return isinstance(next(iter(entries), None), kind)


def _join(columns: Sequence[Any], parts: Sequence[TokenColumns]) -> Any:
    """Concatenate a column of all parts. A field that is no column has the value of the first part."""
    kind: Any = next((column for column in columns if column is not None), None)
    if isinstance(kind, Tensor):
        return torch.cat([_fill(*pair, like=kind) for pair in zip(columns, parts, strict=True)])
    if isinstance(kind, TokenColumns):
        return kind.join(columns)
    if _holds(kind, TokenColumns):
        return tuple(entry[0].join(entry) for entry in zip(*columns, strict=True))
    if _holds(kind, Tensor):
        return {name: _join([column[name] for column in columns], parts) for name in kind}
    return columns[0]


def _fill(column: Tensor | None, part: TokenColumns, *, like: Tensor) -> Tensor:
    if column is not None:
        return column
    shape = (part._count_tokens(), *like.shape[1:])
    return torch.full(shape, torch.nan, dtype=torch.float32, device=like.device)
