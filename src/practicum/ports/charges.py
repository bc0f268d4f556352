"""The settings of what costs money."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class ChargedConfig(Protocol):
    """The settings of a teacher whose answers cost money."""

    @property
    def budget(self) -> float | None:
        """The most money that its answers may cost, or None."""
        ...

    def estimate_money(self, input_tokens: float, output_tokens: float) -> float | None:
        """Return the price of an answer of so many tokens, or None without prices."""
        ...
