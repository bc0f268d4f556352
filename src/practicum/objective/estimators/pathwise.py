"""The gradient of the divergence itself."""

from practicum.objective.estimator_call import Pathwise

Config = Pathwise
