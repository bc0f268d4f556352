"""The teacher's log-probabilities of K candidates."""

from practicum.objective.signal_call import TopK

Config = TopK
