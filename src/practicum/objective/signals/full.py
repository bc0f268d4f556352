"""Every log-probability of the teacher."""

from practicum.objective.signal_call import Full

Config = Full
