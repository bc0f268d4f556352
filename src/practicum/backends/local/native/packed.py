"""Compute the attention of a row's segments and its gradient in compiled code; see packed.c."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.backends.local.native.library import NativeLibrary, point_to


class _StatesStruct(ctypes.Structure):
    """The struct `states` of packed.c: rows of heads, with the strides of tokens and heads."""

    _fields_ = (("at", ctypes.c_void_p), ("token", ctypes.c_long), ("head", ctypes.c_long))


class _AttentionStruct(ctypes.Structure):
    """The struct `attention` of packed.c."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("tokens", "segments", "heads", "groups")),
        *((name, ctypes.c_long) for name in ("width", "value_width", "longest")),
        *((name, ctypes.c_void_p) for name in ("spans", "first_span", "first_past")),
        *((name, _StatesStruct) for name in ("queries", "keys", "values", "gradient")),
        *((name, ctypes.c_void_p) for name in ("outputs", "levels")),
        *((name, ctypes.c_void_p) for name in ("query_gradient", "key_gradient")),
        *((name, ctypes.c_void_p) for name in ("value_gradient", "past_gradient", "room")),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class NativeSegments:
    """The segments of a row, in the form that the program reads.

    `spans` are the start and length of each part of the row that a segment sees, its own part last.
    `first_span` and `first_past` count the spans and the ancestors' keys of all earlier segments.
    """

    library: NativeLibrary
    spans: Int[Tensor, "P 2"]
    first_span: Int[Tensor, " S"]
    first_past: Int[Tensor, " S"]
    longest: int

    @classmethod
    def build(cls, library: NativeLibrary, paths: Sequence[Sequence[range]]) -> "NativeSegments":
        """Build from the row positions of each segment and its ancestors, the segment last."""
        paths = [path for path in paths if path[-1]]
        spans = [(span.start, len(span)) for path in paths for span in path]
        pasts = [sum(map(len, path[:-1])) for path in paths]
        return cls(
            library,
            torch.tensor(spans),
            torch.tensor(list(accumulate(map(len, paths), initial=0))),
            torch.tensor(list(accumulate(pasts, initial=0))),
            max((sum(map(len, path)) for path in paths), default=0),
        )

    def can_attend(
        self, queries: Float[Tensor, "T H d"], values: Float[Tensor, "T G e"], dropout: float
    ) -> bool:
        """Return True if the program supports this attention: float32, heads of full vectors."""
        widths = queries.shape[-1], values.shape[-1]
        is_whole = not any(width % self.library.lanes for width in widths)
        return is_whole and queries.dtype == values.dtype == torch.float32 and dropout == 0.0

    def attend(
        self,
        queries: Float[Tensor, "T H d"],
        keys: Float[Tensor, "T G d"],
        values: Float[Tensor, "T G e"],
        scale: float | None,
    ) -> Float[Tensor, "T H e"]:
        """Return the attention output of the row's tokens."""
        scale = queries.shape[-1] ** -0.5 if scale is None else scale
        return _SegmentAttention.apply(queries, keys, values, self, scale)

    def call(self, name: str, states: Sequence[Tensor], scale: float, **results: Tensor) -> None:
        """Call a function of the program on queries, keys, values and optionally a gradient."""
        queries, keys, values = states[:3]
        strided = [s if s.stride(-1) == 1 else s.contiguous() for s in states]
        job = _AttentionStruct(
            len(queries),
            len(self.first_span) - 1,
            queries.shape[1],
            keys.shape[1],
            queries.shape[2],
            values.shape[2],
            self.longest,
            *map(point_to, (self.spans, self.first_span, self.first_past)),
            *(_StatesStruct(s.data_ptr(), *s.stride()[:2]) for s in strided),
            scale=scale,
            **{key: point_to(tensor) for key, tensor in results.items()},
        )
        room = torch.empty(self.library.call("measure_attention_room", job))
        job.room = point_to(room)
        self.library.call(name, job)


class _SegmentAttention(torch.autograd.Function):
    """The attention of `NativeSegments`; its backward pass computes the attention weights again."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        segments: NativeSegments,
        scale: float,
    ) -> Tensor:
        outputs = queries.new_empty(*queries.shape[:2], values.shape[2])
        levels = queries.new_empty(queries.shape[:2])
        segments.call("attend_row", (queries, keys, values), scale, outputs=outputs, levels=levels)
        ctx.save_for_backward(queries, keys, values, outputs, levels)
        ctx.segments, ctx.scale = segments, scale
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        queries, keys, values, outputs, levels = ctx.saved_tensors
        gradients = [torch.empty(states.shape) for states in (queries, keys, values)]
        pasts = int(ctx.segments.first_past[-1])
        past = torch.empty(keys.shape[1], pasts, keys.shape[2] + values.shape[2])
        ctx.segments.call(
            "differentiate_row",
            (queries, keys, values, gradient),
            ctx.scale,
            outputs=outputs,
            levels=levels,
            query_gradient=gradients[0],
            key_gradient=gradients[1],
            value_gradient=gradients[2],
            past_gradient=past,
        )
        return *gradients, None, None
