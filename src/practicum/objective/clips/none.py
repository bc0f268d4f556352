"""Nothing is clipped."""

from typing import Literal

from practicum.objective.clip_call import ClipCall


class Config(ClipCall):
    """Nothing is clipped."""

    type: Literal["none"] = "none"
