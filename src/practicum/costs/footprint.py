"""What a pass through a model takes in memory beside its weights, as lines over the tokens that go through together."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes that grow with the tokens: `fixed + each * tokens`."""

    fixed: int
    each: int

    def at(self, tokens: int) -> int:
        """The bytes for so many tokens."""
        return self.fixed + self.each * tokens


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a pass through the body takes beside its weights and their gradients.

    `forward` is the peak without a gradient, `kept` what the graph holds after a forward pass, `update` the peak of forward and
    backward pass, all as lines over the tokens that go through together.
    """

    forward: Line
    kept: Line
    update: Line


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """How many tokens go through the body together, and whether its layers are computed again in the backward pass."""

    tokens: int
    recompute: bool
