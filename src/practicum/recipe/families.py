"""The families of on-policy distillation: the values of a recipe's `family`, in the order of a
list."""

from typing import Literal, get_args

Family = Literal[
    "start",
    "white-box",
    "black-box",
    "self-distillation",
    "self-play",
    "rl-hybrids",
    "agents",
]
"""The six families of the field's surveys, and `start` for recipes to begin with."""

FAMILIES: dict[Family, str] = {
    "start": "begin with one of these",
    "white-box": "a teacher's probabilities score each token",
    "black-box": "a teacher gives text or a score of a whole answer",
    "self-distillation": "the student's own model teaches, with more in its context",
    "self-play": "the student learns to beat its own earlier answers",
    "rl-hybrids": "a reward with or without a teacher",
    "agents": "agents, drafters and other settings",
}
"""The families with the source of their signal, in a few words."""

assert tuple(FAMILIES) == get_args(Family), "every family has its words"
