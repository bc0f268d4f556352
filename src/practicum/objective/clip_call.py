"""The base of all clips of a term: a bound on a part of its loss.

A clip is one file of `practicum.objective.clips`, or a module of another package, with a class
`Config` below `ClipCall`.
"""

from functools import partial
from typing import Annotated, ClassVar, Literal

from jaxtyping import Bool, Float
from pydantic import BeforeValidator, SerializeAsAny, WithJsonSchema
from torch import Tensor

from practicum.core.calls import Call
from practicum.core.plugins import PLUGIN_KEY, read_part
from practicum.objective.distribution import EXAMPLE, check_shape

CLIPS = "practicum.objective.clips"
"""The package with the clips, one file each."""


ClippedPart = Literal["nothing", "divergence", "advantage"]


class ClipCall(Call):
    """A bound on a part of a term's loss.

    - part: the part that is bounded
    - clips_losses: it removes the gradient of whole tokens, see `find_clipped`
    - clips_entries: it removes the gradient of single candidates, see `clip_entries`
    """

    part: ClassVar[ClippedPart] = "nothing"
    clips_losses: ClassVar[bool] = False
    clips_entries: ClassVar[bool] = False

    def try_out(self) -> None:
        """Clip the advantages, the losses and the entries of two tokens."""
        check_shape("bound", self.bound(EXAMPLE[:, 0]), (2,))
        check_shape("clip_entries", self.clip_entries(EXAMPLE), (2, 3))
        if self.clips_losses:
            check_shape("find_clipped", self.find_clipped(EXAMPLE[:, 0]), (2,))

    def bound(self, advantage: Tensor) -> Tensor:
        """Return a teacher's advantages within the bounds, if the clip bounds advantages."""
        return advantage

    def find_clipped(self, divergence: Float[Tensor, " T"]) -> Bool[Tensor, " T"]:
        """Return True at the tokens without a gradient. It is called if `clips_losses` is True."""
        raise NotImplementedError

    def clip_entries(self, contributions: Float[Tensor, "T K"]) -> Float[Tensor, "T K"]:
        """Return the contributions of candidates, with clipped contributions held constant."""
        return contributions


Clip = Annotated[
    SerializeAsAny[ClipCall],
    BeforeValidator(partial(read_part, CLIPS, ClipCall)),
    WithJsonSchema({PLUGIN_KEY: CLIPS}),
]
"""A clip in a recipe."""
