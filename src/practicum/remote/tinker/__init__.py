"""Services that speak the Tinker API, through the client of the `tinker` package: what a teacher and a backend have in common.

connection  one session: requests waited for, failures told in one line
sampling    a sampling client of it as a `practicum.ports.SamplingClient`
"""

from practicum.remote.tinker.connection import Connection, ServiceConfig, SessionLost
from practicum.remote.tinker.sampling import ServiceSampler

__all__ = ["Connection", "ServiceConfig", "ServiceSampler", "SessionLost"]
