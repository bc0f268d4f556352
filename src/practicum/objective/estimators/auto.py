"""The usual estimator of the signal."""

from practicum.objective.estimator_call import Auto

Config = Auto
