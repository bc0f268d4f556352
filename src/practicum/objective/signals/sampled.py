"""The teacher's log-probability of each token that the student sampled."""

from practicum.objective.signal_call import Sampled

Config = Sampled
