"""The policy gradient of a sampled token's advantage."""

from practicum.objective.estimator_call import ScoreFunction

Config = ScoreFunction
