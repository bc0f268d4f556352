"""Memory of a pass through a model beside its weights, as lines over the tokens that go through together."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes that grow with the tokens: `fixed + each * tokens`."""

    fixed: int
    each: int

    def at(self, tokens: int) -> int:
        """Return the bytes for so many tokens."""
        return self.fixed + self.each * tokens


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of a pass through the body beside its weights and their gradients.

    `forward` is the peak without a gradient, `kept` what the graph holds after a forward pass, `update` the peak of forward and
    backward pass, all as lines over the tokens that go through together.
    """

    forward: Line
    kept: Line
    update: Line


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """A cut of an update into passes: the tokens of one, and whether layers are computed again in the backward pass."""

    tokens: int
    recompute: bool
