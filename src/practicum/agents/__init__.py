"""Answer the requests of agents and users with the live student; episodes without a state."""

from practicum.agents.episodes import FunctionEpisode

__all__ = ["FunctionEpisode"]
