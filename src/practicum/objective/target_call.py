"""The base of all targets of a term: the distribution that the student is compared with.

A target is one file of `practicum.objective.targets`, or a module of another package, with a class
`Config` below `TargetCall`.
"""

from functools import partial
from typing import Annotated

from jaxtyping import Float
from pydantic import BeforeValidator, SerializeAsAny, WithJsonSchema
from torch import Tensor

from practicum.core.calls import Call
from practicum.core.plugins import PLUGIN_KEY, read_part
from practicum.objective.distribution import EXAMPLE, check_shape

TARGETS = "practicum.objective.targets"
"""The package with the targets, one file each."""


class TargetCall(Call):
    """The distribution that the student is compared with, built from the models' distributions.

    - is_plain: it is the unmodified teacher
    - is_label: it is one token
    - is_product: it is a product of powers, which needs no normaliser at a sampled token
    - needs_reference: it also depends on the reference's distribution
    """

    @property
    def is_plain(self) -> bool:
        """Return True if the target is the unmodified teacher."""
        return False

    @property
    def is_label(self) -> bool:
        """Return True if the target is the teacher's most likely token."""
        return False

    @property
    def is_product(self) -> bool:
        """Return True if the target is a product of powers of the models' probabilities."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Return True if the reference has a part in the target."""
        return False

    def try_out(self) -> None:
        """Build the target at two tokens of three."""
        built = self.build(EXAMPLE, EXAMPLE.flip(0), EXAMPLE.roll(1, dims=-1))
        if not isinstance(built, tuple) or len(built) != 2:
            raise ValueError("build returns no pair of log-probabilities and a divisor or None")
        check_shape("build", built[0], (2, 3))

    def build(
        self,
        teacher: Float[Tensor, "T V"],
        student: Float[Tensor, "T V"],
        reference: Float[Tensor, "T V"] | None,
    ) -> tuple[Float[Tensor, "T V"], Float[Tensor, " T"] | None]:
        """Return the target's log-probabilities, and the divisor of the divergence or None.

        The student's own part in it is held constant.
        """
        raise NotImplementedError

    def combine(
        self,
        teacher: Float[Tensor, " T"],
        student: Float[Tensor, " T"],
        reference: Float[Tensor, " T"] | None,
    ) -> Float[Tensor, " T"]:
        """Return the target's log-probability of sampled tokens, up to a constant that depends on the state.

        It is called only for products.
        """
        raise NotImplementedError


Target = Annotated[
    SerializeAsAny[TargetCall],
    BeforeValidator(partial(read_part, TARGETS, TargetCall)),
    WithJsonSchema({PLUGIN_KEY: TARGETS}),
]
"""A target in a recipe."""
