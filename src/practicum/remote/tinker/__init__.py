"""Connect to services with the Tinker API through the client of the `tinker` package.

connection  one session: waits for requests and reports failures in one line
sampling    its sampling client as a `practicum.ports.SamplingClient`
"""

from practicum.remote.tinker.connection import Connection, ServiceConfig, SessionLost
from practicum.remote.tinker.sampling import ServiceSampler

__all__ = ["Connection", "ServiceConfig", "ServiceSampler", "SessionLost"]
