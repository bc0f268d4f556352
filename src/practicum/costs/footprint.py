"""Memory of a pass through a model, excluding weights, as linear functions of the pass's tokens."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """A number of bytes that grows with the tokens: `fixed + each * tokens`."""

    fixed: int
    each: int

    def compute_bytes(self, tokens: int) -> int:
        """Return the bytes for this many tokens."""
        return self.fixed + self.each * tokens


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of a pass through the body, excluding its weights and their gradients.

    `forward` is the peak without a gradient, `kept` the size of the graph after a forward pass,
    `update` the peak of forward and backward pass; all are linear in the tokens of one pass.
    """

    forward: Line
    graph: Line
    update: Line


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """The tokens of one pass of an update, and whether it uses activation checkpointing."""

    tokens: int
    recompute: bool
